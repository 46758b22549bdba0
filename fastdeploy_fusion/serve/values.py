"""Fields that may be of several kinds: each is told by its type, and read up to the first error."""

from typing import Any

from pydantic_core import PydanticCustomError

_MOST_STOP_STRINGS, _LONGEST_STOP_STRING = 4, 256
_PART_FIELDS = ("type", "text")


def one_prompt(value: Any) -> str | list[int]:
    """Text or token ids, also as the only entry of a list."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise wrong(f"a list of {len(value)} prompts; one is answered at a time, so send a request for each")
        value = value[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(f"{_shown(value)}; it must be text or a list of token ids")
    if not value:
        raise wrong("an empty list; it must hold at least one token id")
    for place, token in enumerate(value):
        if type(token) is not int or token < 0:
            raise wrong(f"{_shown(token)} at place {place}; token ids are whole numbers of at least 0")
    return value


def stop_strings(value: Any) -> tuple[str, ...]:
    """A string or a list of some; none for null."""
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list):
        raise wrong(f"{_shown(value)}; it must be a string or a list of up to {_MOST_STOP_STRINGS}")
    if len(given) > _MOST_STOP_STRINGS:
        raise wrong(f"{len(given)} strings; at most {_MOST_STOP_STRINGS} are taken")
    for string in given:
        if not isinstance(string, str):
            raise wrong(f"{_shown(string)} in the list; it must hold strings alone")
        if not 1 <= len(string) <= _LONGEST_STOP_STRING:
            length = f"a string of {len(string)} characters" if string else "an empty string"
            raise wrong(f"{length}; a stop string has 1 to {_LONGEST_STOP_STRING} characters")
    return tuple(given)


def text_of(value: Any) -> str:
    """A message's content: text, or parts of text that are joined; "" for null."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise wrong(f"{_shown(value)}; it must be text or a list of parts of text")
    return "".join(_text_of_part(part, place) for place, part in enumerate(value))


def _text_of_part(part: Any, place: int) -> str:
    if not isinstance(part, dict):
        raise wrong(f"part {place} is {_shown(part)}; it must be an object with type and text")
    if part.get("type") != "text":
        raise wrong(f"part {place} has the type {_shown(part.get('type'))}; only 'text' is understood")
    text = part.get("text")
    if not isinstance(text, str):
        raise wrong(f"part {place} has {_shown(text)} for its text; it must be a string")
    for name, value in part.items():
        if name not in _PART_FIELDS and value is not None:
            raise wrong(f"part {place}: {name[:100]} is not known here; leave it out")
    return text


def wrong(message: str) -> PydanticCustomError:
    """To be raised by what checks a field; pydantic adds the place."""
    return PydanticCustomError("wrong", "{message}", {"message": message})  # a client's own braces are not filled in


def _shown(value: Any) -> str:
    """Short whatever its size."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return repr(value[:40])
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return str(value)[:40]
