"""An argparse parser that says `error: ...` in one line and names the flag a misspelt one was meant to be."""

import argparse
import difflib
import math
from collections.abc import Sequence
from typing import Any, NoReturn


class UsageError(ValueError):
    """Wrong input of the user: shown as one line, exit code 2."""

    exit_code = 2


class Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")

    def flags(self) -> list[str]:
        """All flags of this parser and of its commands."""
        own = [flag for action in self._actions for flag in action.option_strings]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                own += [flag for command in action.choices.values() for flag in command.flags()]
        return own


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses all of `argv`; an unknown flag ends the process with 2 and the nearest known flag's name."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        misspelt = next((word for word in unknown if word.startswith("-") and len(word) > 1), unknown[0])
        parser.error(unknown_argument(misspelt, parser.flags()))
    return args


def unknown_argument(word: str, flags: Sequence[str]) -> str:
    name = word.split("=", 1)[0]
    if not name.startswith("-"):
        return f"unexpected argument {word!r}"
    near = difflib.get_close_matches(name, flags, n=1)
    return f"unknown flag {name}; " + (f"did you mean {near[0]}?" if near else "see --help")


def number_in(low: float, high: float, *, above_low: bool = False) -> Any:
    """An argparse type: a finite number in [low, high], or in (low, high]."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not low <= value <= high or (above_low and value == low):
            bound = f"above {low:g}" if above_low else f"of at least {low:g}"
            limit = "" if high == math.inf else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {bound}{limit}")
        return value

    return convert


def whole_number(text: str) -> int:
    """An argparse type: a whole number of at least 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)
