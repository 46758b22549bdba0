"""Responses that stop working when the client leaves."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Response
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from .errors import ApiError

_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, headers=error.headers)


class Watched(Response):
    """Runs ``work`` while watching the client; when it leaves, the work is cancelled and nothing is sent.

    ``on_end`` is called in every case, even if the work never began.
    """

    def __init__(self, work: Callable[[Scope, Receive, Send], Awaitable[None]], on_end: Callable[[], object]) -> None:
        super().__init__()
        self.work, self.on_end = work, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(self.work(scope, receive, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.on_end()
            for task in (working, leaving):
                task.cancel()
            results = await asyncio.gather(working, leaving, return_exceptions=True)
        error = results[0]
        if isinstance(error, Exception) and not isinstance(error, OSError):  # OSError: the client left while we sent
            raise error


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def whole(answer: Callable[[], Awaitable[dict[str, Any]]], on_end: Callable[[], object]) -> Response:
    """One JSON document, made while the client waits."""

    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = JSONResponse(await answer())
        except ApiError as error:
            response = error_response(error)
        await response(scope, receive, send)

    return Watched(work, on_end)


def events(documents: AsyncIterator[dict[str, Any]], on_end: Callable[[], object]) -> Response:
    """Server-sent events, one a document, then ``[DONE]``. An error on the way is an event too, and ends the stream."""

    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        try:
            async for document in documents:
                await send({"type": "http.response.body", "body": _event(document), "more_body": True})
            last = b"data: [DONE]\n\n"
        except ApiError as error:
            last = _event(error.body)
        await send({"type": "http.response.body", "body": last})

    return Watched(work, on_end)


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
