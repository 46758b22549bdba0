"""A ticket's tokens as pieces of text, and the documents that OpenAI's clients read."""

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from .errors import ApiError
from .frontend import LOST, Frontend, Ticket
from .prepare import Prepared, Served
from .text import StopStrings, TextStream


@dataclass
class Piece:
    """Text that follows, "" too; ``finish_reason`` on the last one. ``num_tokens``: of the answer so far."""

    text: str
    num_tokens: int
    finish_reason: str | None


async def pieces(
    frontend: Frontend, ticket: Ticket, served: Served, stop_strings: tuple[str, ...]
) -> AsyncIterator[Piece]:
    """What the ticket brings, joined where several tokens lie ready. It ends early at a stop string, and then the
    ticket is complete; when the rest is not wanted for another reason, the caller cancels it.

    Raises:
        ApiError: 503 when the engine will not finish it.
    """
    stream, stops, count = TextStream(served.decode), StopStrings(stop_strings), 0
    reason = None
    while reason is None:
        event, text = await ticket.events.get(), ""
        while True:
            if event.finish_reason == LOST:
                raise ApiError(503, frontend.closed_because or "the server stopped", code="unavailable")
            if event.token is not None:
                text += stops.feed(stream.add(event.token))
                count += 1
            reason = event.finish_reason
            if reason is not None:
                text += stops.feed(stream.finish())
            if stops.hit:
                reason = "stop"
                frontend.complete(ticket)
            if reason is not None or ticket.events.empty():
                break
            event = ticket.events.get_nowait()
        if reason is not None:
            text += stops.finish()
        if text or reason is not None:
            yield Piece(text, count, reason)


class Documents:
    """The answers to one request: whole or in chunks, of a completion or of a chat."""

    def __init__(self, prepared: Prepared, model: str, *, chat: bool) -> None:
        self.chat, self.model = chat, model
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.num_prompt = len(prepared.prompt)

    def whole(self, text: str, num_tokens: int, finish_reason: str) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": self.usage(num_tokens)}

    def first(self) -> dict[str, Any] | None:
        """What a stream begins with."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None) if self.chat else None

    def part(self, piece: Piece) -> dict[str, Any]:
        if not self.chat:
            return self._chunk({"text": piece.text}, piece.finish_reason)
        return self._chunk({"delta": {"content": piece.text} if piece.text else {}}, piece.finish_reason)

    def last(self, num_tokens: int) -> dict[str, Any]:
        """The chunk that brings the counts."""
        return {**self._head(self._chunk_kind), "choices": [], "usage": self.usage(num_tokens)}

    def usage(self, num_tokens: int) -> dict[str, int]:
        total = self.num_prompt + num_tokens
        return {"prompt_tokens": self.num_prompt, "completion_tokens": num_tokens, "total_tokens": total}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, said: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head(self._chunk_kind), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
