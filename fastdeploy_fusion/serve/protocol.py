"""What clients may ask for: the fields of OpenAI's requests that are understood, checked strictly."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import ApiError

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

Token = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Request(_Strict):
    """``ignore_eos``: go on to ``max_tokens`` whatever comes; not OpenAI's, for measurements."""

    model: str = Field(max_length=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    ignore_eos: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {name: value for name, value in values.items() if name not in _IGNORED}
        for name, neutral in _NEUTRAL.items():
            if name not in kept:
                continue
            value = kept.pop(name)
            if value is not None and not any(value == v and type(value) in (type(v), float) for v in neutral):
                raise ApiError(422, f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
        return kept

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class CompletionRequest(_Request):
    """One prompt, as text or as token ids; a list of one of them too."""

    prompt: (
        str
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=1)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1, max_length=1)]
    )

    @property
    def single_prompt(self) -> str | list[int]:
        prompt: Any = self.prompt
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            prompt = prompt[0]
        return prompt


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates read it: the content is one string."""
        content = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or ())
        return {"role": self.role, "content": content} | ({"name": self.name} if self.name is not None else {})


class ChatRequest(_Request):
    messages: list[Message] = Field(min_length=1, max_length=4096)
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
