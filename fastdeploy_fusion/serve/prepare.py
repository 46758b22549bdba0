"""From a checked request to tokens and sampling: everything that can be wrong with it is found here."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..tokenizer import token_ids
from .chat import ChatTemplate
from .errors import ApiError
from .protocol import ChatRequest, CompletionRequest
from .scheduler import Sampler

COMPLETION_TOKENS = 16
"""OpenAI's default for completions."""
CHAT_TOKENS = 1024
"""The default for chat, less where the context has no room for it."""


@dataclass(frozen=True)
class Served:
    """The model as requests see it.

    limit: tokens of a prompt and its answer together. longest_token: bytes that one token stands for, at most.
    make_sampler: ``(temperature, top_p, seed)`` to a sampler.
    """

    name: str
    tokenizer: Any
    template: ChatTemplate
    vocab_size: int
    limit: int
    eos: frozenset[int]
    make_sampler: Callable[[float, float, int], Sampler]
    longest_token: int

    def decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


@dataclass(frozen=True)
class Prepared:
    prompt: list[int]
    max_tokens: int
    eos: frozenset[int]
    sampler: Sampler


def longest_token_of(tokenizer: Any) -> int:
    """Bytes of text that one token stands for at most. Byte-level vocabularies spell a byte with up to two."""
    return max((len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True)), default=1)


def check_model(name: str, served: Served) -> None:
    if name != served.name:
        raise ApiError(
            404, f"the model {name[:100]!r} does not exist; this server has {served.name!r}", param="model",
            code="model_not_found",
        )  # fmt: skip


def prepare(request: CompletionRequest | ChatRequest, served: Served) -> Prepared:
    """ApiError for a model, prompt or length that can't be served."""
    check_model(request.model, served)
    if isinstance(request, ChatRequest):
        text = served.template.render([message.plain() for message in request.messages])
        prompt = _encode(text, served, "messages", add_special_tokens=False)
        default, param = CHAT_TOKENS, "messages"
    else:
        given = request.prompt
        prompt = _encode(given, served, "prompt") if isinstance(given, str) else _check_tokens(given, served)
        default, param = COMPLETION_TOKENS, "prompt"
    if not prompt:
        raise ApiError(422, "the prompt has no tokens; it needs at least one", param=param, code="invalid_value")
    room = served.limit - len(prompt)
    if room < 1 or (request.token_limit or 0) > room:
        raise _too_long(len(prompt), request.token_limit, served.limit, param)
    return Prepared(
        prompt,
        request.token_limit or min(default, room),
        frozenset() if request.ignore_eos else served.eos,
        served.make_sampler(
            1.0 if request.temperature is None else request.temperature,
            1.0 if request.top_p is None else request.top_p,
            secrets.randbits(63) if request.seed is None else request.seed % 2**64,
        ),
    )


def _encode(text: str, served: Served, param: str, add_special_tokens: bool = True) -> list[int]:
    at_least = -(-len(text.encode()) // served.longest_token)
    if at_least > served.limit:  # tokenising it would take long, for nothing
        raise _too_long(f"at least {at_least}", None, served.limit, param)
    try:
        return token_ids(served.tokenizer, text, served.vocab_size, add_special_tokens=add_special_tokens)
    except ValueError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from None


def _check_tokens(tokens: list[int], served: Served) -> list[int]:
    if tokens and max(tokens) >= served.vocab_size:
        raise ApiError(
            422, f"the prompt has token ids outside 0..{served.vocab_size - 1}", param="prompt", code="invalid_value"
        )
    return tokens


def _too_long(num_tokens: int | str, max_tokens: int | None, limit: int, param: str) -> ApiError:
    wanted = f" and max_tokens {max_tokens}" if max_tokens else ""
    return ApiError(
        400,
        f"the prompt's {num_tokens} tokens{wanted} are more than the {limit} that fit; shorten it",
        param=param,
        code="context_length_exceeded",
    )
