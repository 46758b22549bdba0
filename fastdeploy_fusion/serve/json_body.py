"""A request's body: read within limits of size and time, and parsed into an object."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

from .errors import ApiError

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SWALLOWED = 16  # times the limit: read and dropped, so that a client that is still sending gets the answer
_SWALLOW_S = 2.0


async def read_body(chunks: AsyncIterator[bytes], headers: Mapping[str, str], limit: int, seconds: float) -> bytes:
    """All bytes of a body.

    Raises:
        ApiError: 413 for more than ``limit`` bytes, 408 when they did not come within ``seconds``.
    """
    declared = headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 20 or int(declared) > limit):
        await _swallow(chunks, limit * _SWALLOWED)
        raise _too_large(limit)
    body = bytearray()

    async def read() -> bool:
        async for chunk in chunks:
            body.extend(chunk)
            if len(body) > limit:
                return False
        return True

    try:
        whole = await asyncio.wait_for(read(), seconds)
    except (TimeoutError, asyncio.TimeoutError):
        raise ApiError(408, f"the request's body did not come within {seconds:g} s") from None
    if not whole:
        await _swallow(chunks, limit * _SWALLOWED)
        raise _too_large(limit)
    return bytes(body)


async def _swallow(chunks: AsyncIterator[bytes], most: int) -> None:
    async def drop() -> None:
        left = most
        async for chunk in chunks:
            left -= len(chunk)
            if left < 0:
                return

    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
        await asyncio.wait_for(drop(), _SWALLOW_S)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than {limit} bytes", code="body_too_large")


def parse_object(body: bytes) -> dict[str, Any]:
    """ApiError 400 for what is not a JSON object in UTF-8."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _bad(f"it is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise _bad("it is nested too deeply") from None
    except ValueError as error:
        raise _bad(str(error)[:200]) from None
    if not isinstance(value, dict):
        raise _bad("it must be an object")
    if _SURROGATE.search(body):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise _bad("a string holds half of a surrogate pair") from None
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _bad(reason: str) -> ApiError:
    return ApiError(400, f"the request's body can't be read as JSON: {reason}", code="invalid_json")
