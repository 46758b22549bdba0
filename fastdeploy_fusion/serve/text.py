"""From tokens to text as they come: whole characters only, and nothing of a stop string."""

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
_LONGEST_CHARACTER = 4
_MAX_WINDOW = 64
_CONTEXT = 32  # tokens that are kept of a window that was longer


class TextStream:
    """Text of a growing list of tokens. What ``add`` and ``finish`` return makes up what decoding all at once gives.

    Some tokens are decoded again together with what is new, since a decoder may drop a space at the start. A character
    whose bytes have not all come is held back.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # tokens before it are done with
        self._num_known = 0  # of these tokens: whole characters, all given out, kept for context
        self._num_given = 0  # characters given out of the window's text

    def add(self, token: int) -> str:
        """What is certain to follow now; often "" or more than one token's text."""
        self._window.append(token)
        text, given = self._decode(self._window), self._num_given
        is_long = len(self._window) > _MAX_WINDOW
        if not text.endswith(_BROKEN) or (is_long and not self._shorten(text)):
            new = text[given:]
            self._window = self._window[self._num_known :]
            self._num_known = len(self._window)
            self._num_given = len(self._decode(self._window))
            return new
        # Bytes that are still to come can only change what the last few bytes are read as.
        certain = max(given, len(text) - _LONGEST_CHARACTER + 1)
        self._num_given += certain - given
        return text[given:certain]

    def _shorten(self, text: str) -> bool:
        """Forget all but the last tokens of the window. False where these do not end as ``text`` does.

        What has not been given out stays so: a wrong start changes how a few bytes are read, and not those at the end.
        """
        window = self._window[-_CONTEXT:]
        tail, held = self._decode(window), text[self._num_given :]
        if len(tail) < len(held) + _LONGEST_CHARACTER or not tail.endswith(held):
            return False
        self._window, self._num_known, self._num_given = window, 0, len(tail) - len(held)
        return True

    def finish(self) -> str:
        """The rest, with U+FFFD for bytes that are no character."""
        text = self._decode(self._window)
        new, self._num_given = text[self._num_given :], len(text)
        return new


class StopStrings:
    """Cuts a text at the first of some strings, without giving out the beginning of one before it is clear."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """What may be given out. After a hit: what came before the stop string, and then nothing more."""
        if self.hit or not self._strings:
            return "" if self.hit else text
        self._held += text
        places = [place for string in self._strings if (place := self._held.find(string)) >= 0]
        if places:
            self.hit = True
            return self._held[: min(places)]
        keep = max(_overlap(self._held, string) for string in self._strings)
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return given

    def finish(self) -> str:
        """What was held back, now that nothing more comes."""
        rest, self._held = "" if self.hit else self._held, ""
        return rest


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of ``text`` that ``string`` begins with, the whole string excepted."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
