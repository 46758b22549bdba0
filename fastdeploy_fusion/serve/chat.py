"""From a conversation to a prompt: the checkpoint's own chat template, or a plain one."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import ApiError

PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Where the checkpoint brings no template: one line a message."""


class _Generation(Extension):
    """``{% generation %}``: marks what the assistant said, for training; here its content is all there is to it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """``source`` is a Jinja template as ``transformers`` runs it; it sees only messages and the named tokens."""

    def __init__(self, source: str = PLAIN, tokens: dict[str, str] | None = None) -> None:
        """ValueError for a template that is no Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        self.tokens = tokens or {}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template can't be read: {error}") from error

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate":
        """From ``chat_template.jinja`` or ``tokenizer_config.json``; ValueError for one that can't be read."""
        config_file, template_file = model_dir / "tokenizer_config.json", model_dir / "chat_template.jinja"
        config = _read_object(config_file) if config_file.is_file() else {}
        source = template_file.read_text("utf-8") if template_file.is_file() else _default_of(config)
        tokens = {name: text for name, value in config.items() if (text := _token_text(name, value)) is not None}
        return cls(PLAIN if source is None else source, tokens)

    def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt, up to where the assistant speaks. ApiError 400 where the template refuses the messages."""
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self.tokens
            )
        except ApiError:
            raise
        except Exception as error:  # a template may do anything wrong, with messages that it does not expect
            message = f"the chat template does not take these messages: {type(error).__name__}: {error}"
            raise ApiError(400, message[:500], param="messages", code="chat_template") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold an object")
    return value


def _default_of(config: dict[str, Any]) -> str | None:
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _token_text(name: str, value: Any) -> str | None:
    """The text of ``bos_token`` and its like, which may be an object."""
    if not name.endswith("_token"):
        return None
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _refuse(message: str) -> NoReturn:
    raise ApiError(400, f"the chat template refuses these messages: {message}", param="messages", code="chat_template")
