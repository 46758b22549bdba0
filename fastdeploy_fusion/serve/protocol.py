"""What clients may ask for: the fields of OpenAI's requests that are understood, checked strictly.

A body may hold hundreds of thousands of wrong values, and pydantic collects the errors of all of them, in each branch
of a union, while nobody else is served. So what may be of several kinds or long is checked in ``values``, which stops
at the first error.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, ValidationError, model_validator

from .errors import ApiError
from .values import one_prompt, stop_strings, text_of, wrong

_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Accepted and not looked at: they do not change an answer."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none",),
    "modalities": (["text"],),
}
"""Not implemented: refused but for the values that ask for nothing."""


class _Strict(BaseModel):
    """Unknown fields are refused but for null, which asks for nothing: clients send back whole objects of theirs."""

    model_config = ConfigDict(extra="forbid", strict=True)
    ignored: ClassVar[tuple[str, ...]] = ()
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {}
        for name, value in values.items():
            if name in cls.model_fields:
                kept[name] = value
            elif value is not None and name not in cls.ignored and not cls._is_neutral(name, value):
                raise cls._refused(name)
        return kept

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        return any(value == v and type(value) in (type(v), float) for v in cls.neutral.get(name, ()))

    @classmethod
    def _refused(cls, name: str) -> Exception:
        return wrong(_why_refused(cls, name))


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Request(_Strict):
    """``ignore_eos``: go on to ``max_tokens`` whatever comes; not OpenAI's, for measurements."""

    ignored = _IGNORED
    neutral = _NEUTRAL

    model: str = Field(max_length=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[tuple[str, ...], PlainValidator(stop_strings)] = ()
    ignore_eos: bool | None = None

    @classmethod
    def _refused(cls, name: str) -> Exception:
        code = "unsupported_parameter" if name in cls.neutral else "invalid_value"
        return ApiError(422, _why_refused(cls, name), param=name[:100], code=code)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class CompletionRequest(_Request):
    """One prompt, as text or as token ids; a list of one of them too."""

    prompt: Annotated[str | list[int], PlainValidator(one_prompt)]


class Message(_Strict):
    neutral = {"tool_calls": ([],), "annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, PlainValidator(text_of)] = ""
    name: str | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates read it: only what is there."""
        return self.model_dump(exclude_none=True)


class ChatRequest(_Request):
    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def parse_request(kind: type[Any], values: dict[str, Any]) -> Any:
    """ApiError 422 that names the first field at fault."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or None
        param = str(first["loc"][0]) if first["loc"] else None
        message = f"{place}: {first['msg']}" if place else first["msg"]
        raise ApiError(422, message[:500], param=param, code="invalid_value") from None


def _why_refused(kind: type[_Strict], name: str) -> str:
    known = "is not supported" if name in kind.neutral else "is not a field that is known here"
    return f"{name[:100]} {known}; leave it out"
