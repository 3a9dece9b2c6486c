"""From tokens to the text that a client may see: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple

from aiodatadist.model import Tokenizer

from .engine import Decoding

__all__ = ["Piece", "TextStream", "pieces"]

_CUT: Final = "\ufffd"
_LONGEST: Final = 4
"""Tokens that the bytes of one character may be spread over."""


class Piece(NamedTuple):
    """A piece of an answer.

    Attributes
    ----------
    text : str
        May be empty: the tokens are part of a character, or may become a stop string.
    tokens : list of int
    finish : str or None
        With the last piece ``"stop"`` or ``"length"``.
    """

    text: str
    tokens: list[int]
    finish: str | None


class TextStream:
    """Turns tokens into text, one after the other, the same however many come at once.

    Parameters
    ----------
    tokenizer : Tokenizer
    stop : sequence of str
        Strings that end the text and do not belong to it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._tokens: list[int] = []
        self._held = ""
        self._stopped = False

    def has_stopped(self) -> bool:
        """Tell if a stop string has come."""
        return self._stopped

    def push(self, token: int) -> str:
        """Take a token; return the text that is certain now. Not to be called after `has_stopped`."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if text.endswith(_CUT) and len(self._tokens) < _LONGEST:
            return ""
        self._tokens.clear()
        return self._pass(text)

    def end(self) -> str:
        """Return what was kept back, at the end of the tokens."""
        text = self._tokenizer.decode(self._tokens)
        self._tokens.clear()
        text = self._pass(text) + self._held
        self._held = ""
        return text

    def _pass(self, text: str) -> str:
        self._held += text
        found = [index for index in (self._held.find(stop) for stop in self._stop) if index >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            self._stopped = True
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return how much of the end of `text` is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


async def pieces(
    stream: TextStream, first: int, ends: bool, decoding: Decoding | None, finish: str
) -> AsyncIterator[Piece]:
    """Yield an answer: the first token by itself at once, and then what `decoding` brings.

    Parameters
    ----------
    stream : TextStream
    first : int
        The token that came with the prompt.
    ends : bool
        It is an end token: the answer is empty.
    decoding : Decoding, optional
        None: `first` was the last token.
    finish : str
        The finish reason where there is no `decoding`.
    """
    if ends:
        yield Piece("", [], "stop")
        return
    text = stream.push(first)
    if stream.has_stopped():
        yield Piece(text, [first], "stop")
        return
    if decoding is None:
        yield Piece(text + stream.end(), [first], "stop" if stream.has_stopped() else finish)
        return
    yield Piece(text, [first], None)
    async for tokens in decoding:
        text, taken = "", []
        for token in tokens:
            text += stream.push(token)
            taken.append(token)
            if stream.has_stopped():
                yield Piece(text, taken, "stop")
                return
        yield Piece(text, taken, None)
    text = stream.end()
    yield Piece(text, [], "stop" if stream.has_stopped() else decoding.finish)
