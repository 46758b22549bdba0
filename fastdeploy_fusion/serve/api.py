"""The HTTP interface: routes, keys, errors. Everything behind it is plain Python."""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..metrics import CONTENT_TYPE
from .answer import Documents, pieces
from .errors import ApiError
from .frontend import Frontend
from .json_body import parse_object, read_body
from .metrics import Metrics
from .prepare import Served, check_model, prepare
from .protocol import ChatRequest, CompletionRequest, parse_request
from .responses import error_response, events, whole
from .settings import ServeSettings

log = logging.getLogger(__name__)

ENDPOINTS = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics")
_THREAD_FROM_BYTES = 4096  # tokenising so much is moved out of the event loop


class Api:
    """What the routes share. ``trouble``: why the server is not well, or None; ``more_metrics``: further text."""

    def __init__(
        self,
        settings: ServeSettings,
        served: Served,
        frontend: Frontend,
        *,
        trouble: Callable[[], str | None] = lambda: None,
        more_metrics: Callable[[], str] = str,
    ) -> None:
        self.settings, self.served, self.frontend = settings, served, frontend
        self.trouble, self.more_metrics = trouble, more_metrics

    @property
    def metrics(self) -> Metrics:
        return self.frontend.metrics

    def authorise(self, request: Request) -> None:
        expected = self.settings.api_key
        if expected is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), expected.encode()):
            raise ApiError(401, "the API key is missing or wrong; send it as a bearer token", code="invalid_api_key")

    async def generate(self, request: Request, kind: type[Any]) -> Response:
        self.authorise(request)
        self.frontend.check_open()
        s = self.settings
        body = await read_body(request.stream(), request.headers, s.max_body_bytes, s.body_seconds)
        asked = parse_request(kind, parse_object(body))
        if len(body) > _THREAD_FROM_BYTES:
            prepared = await asyncio.to_thread(prepare, asked, self.served)
        else:
            prepared = prepare(asked, self.served)
        documents = Documents(prepared, self.served.name, chat=kind is ChatRequest)
        ticket = self.frontend.submit(prepared.prompt, prepared.max_tokens, prepared.eos, prepared.sampler)
        parts = pieces(self.frontend, ticket, self.served, asked.stop)

        async def stream() -> AsyncIterator[dict[str, Any]]:
            first, count = documents.first(), 0
            if first is not None:
                yield first
            async for piece in parts:
                count = piece.num_tokens
                yield documents.part(piece)
            if asked.wants_usage:
                yield documents.last(count)

        async def answer() -> dict[str, Any]:
            taken = [piece async for piece in parts]
            last = taken[-1]
            return documents.whole("".join(p.text for p in taken), last.num_tokens, last.finish_reason or "stop")

        on_end = partial(self.frontend.cancel, ticket)
        return events(stream(), on_end) if asked.stream else whole(answer, on_end)

    def health(self) -> Response:
        trouble = self.trouble() or self.frontend.closed_because or ("draining" if self.frontend.draining else None)
        return JSONResponse({"status": trouble or "ok"}, 503 if trouble else 200)


def build_app(api: Api) -> ASGIApp:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    model = {"id": api.served.name, "object": "model", "created": 0, "owned_by": "fastdeploy_fusion"}
    model["max_model_len"] = api.served.limit

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await api.generate(request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await api.generate(request, ChatRequest)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        api.authorise(request)
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        api.authorise(request)
        check_model(name, api.served)
        return JSONResponse(model)

    @app.get("/health")
    async def health() -> Response:
        return api.health()

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(api.metrics.text() + api.more_metrics(), media_type=CONTENT_TYPE)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        response = error_response(ApiError(error.status_code, message, code="no_such_route"))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    return _Counted(app, api)


class _Counted:
    """Counts answers by endpoint and status; what nobody foresaw becomes a 500 of the usual shape."""

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self.app, self.api = app, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange, broken_off = _Exchange(receive, send), False
        try:
            await self.app(scope, exchange.receive, exchange.send)
        except Exception:
            log.exception("a request could not be answered")
            broken_off = bool(exchange.status)
            if not broken_off:
                await error_response(ApiError(500, "the server failed to answer"))(scope, receive, exchange.send)
        finally:
            endpoint = scope["path"] if scope["path"] in ENDPOINTS else "other"
            self.api.metrics.answered(endpoint, 500 if broken_off else exchange.status if exchange.is_whole else None)


class _Exchange:
    """One request and its answer as the connection sees them. ``is_whole``: the client got the answer's end."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.status, self.is_whole, self._has_left = 0, False, False

    async def receive(self) -> Message:
        message = await self._receive()
        self._has_left |= message["type"] == "http.disconnect"  # after the answer's end that means nothing
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_whole = not self._has_left
