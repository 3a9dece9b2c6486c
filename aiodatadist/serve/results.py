"""Answers by their pieces, each with its position: so that another run of a request can go on with what a client has.

A run writes an answer from its beginning. It is the same answer each time, because a token depends on the prompt, the
seed and its position alone; so whoever has a part of it drops that, and takes the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from .errors import CODES, ServeError
from .legs import Upstream
from .openai import Answer
from .protocol import Generation, Id, Message
from .text import Piece

__all__ = ["Merged", "Result", "in_pieces", "read_results"]


class Result(Message, frozen=True):
    """A piece of an answer.

    Attributes
    ----------
    at, text_at
        How many tokens and characters of the answer come before it: whoever has them already drops them.
    finish
        The finish reason; None: more comes.
    prompt_tokens, cached_tokens
        With the last piece, for which `last` is true.
    error
        Code of `errors.CODES` if the request ends with an error, which `text` explains.
    """

    request_id: Id
    at: int = 0
    text_at: int = 0
    tokens: Sequence[int] = ()
    text: str = ""
    finish: str | None = None
    last: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


def in_pieces(generation: Generation) -> Generation:
    """Return the request for an answer that `read_results` can read, whatever the client wants to have of it."""
    return replace(generation, stream=True, include_usage=True, return_token_ids=True)


async def read_results(upstream: Upstream, request_id: str) -> AsyncGenerator[Result]:
    """Yield the pieces of an answer that was asked for `in_pieces`; the last one is `last`.

    Raises
    ------
    ServeError
        What the worker said, or ``stream_broken``.
    """
    result = Result(request_id=request_id)
    at = text_at = 0
    try:
        async with contextlib.aclosing(_events(upstream)) as events:
            async for event in events:
                for choice in event.choices:
                    text = choice.text if choice.delta is None else choice.delta.content
                    result = Result(
                        request_id=request_id, at=at, text_at=text_at,
                        tokens=choice.token_ids, text=text, finish=choice.finish_reason,
                    )  # fmt: skip
                    at, text_at = at + len(choice.token_ids), text_at + len(text)
                    yield result
                if event.usage is not None:
                    result = replace(
                        result, at=at, text_at=text_at, tokens=(), text="", last=True,
                        prompt_tokens=event.usage.prompt_tokens,
                        cached_tokens=event.usage.prompt_tokens_details.cached_tokens,
                    )  # fmt: skip
                    yield result
    except ServeError:
        if not result.last:  # else all has been said
            raise
    if not result.last:
        raise ServeError("stream_broken", f"{upstream.member.worker_id} broke off in the middle of an answer")


class Merged:
    """One answer, of however many runs.

    Parameters
    ----------
    generation : Generation
        What the client asked for.

    Attributes
    ----------
    lost : bool
        Pieces were missing before one that came: only another run can say them.
    error : ServeError or None
        How it ended, if not well.
    """

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.content_type = "text/event-stream" if generation.stream else "application/json"
        self.lost = False
        self.error: ServeError | None = None
        self._tokens: list[int] = []
        self._text = ""
        self._finish: str | None = None
        self._pieces: list[Piece] = []
        self._usage: tuple[int, int] | None = None
        self._answer = Answer(generation, 0, 0)

    @property
    def complete(self) -> bool:
        """Whether all is here."""
        return self._usage is not None

    @property
    def begun(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._pieces)

    def take(self, result: Result) -> bool:
        """Take a result in, whichever run of the request wrote it. What is here already is dropped.

        Returns False if it could not be taken, because the answer has ended or is `lost`.
        """
        if self.error is not None or self.complete:
            return False
        if result.error is not None:
            self.error = ServeError(result.error if result.error in CODES else "worker_failed", result.text)
        elif result.at > len(self._tokens) or result.text_at > len(self._text):
            self.lost = True
            return False
        else:
            self._merge(result)
        return True

    def _merge(self, result: Result) -> None:
        known, known_text = len(self._tokens) - result.at, len(self._text) - result.text_at
        if (
            self._tokens[result.at :][: len(result.tokens)] != list(result.tokens[:known])
            or self._text[result.text_at :][: len(result.text)] != result.text[:known_text]
        ):
            # Only where the model does not write the same each time.
            self.error = ServeError("stream_broken", "the request was begun again, and the answer was another one")
            return
        tokens, text = list(result.tokens[known:]), result.text[known_text:]
        self._tokens += tokens
        self._text += text
        finish = result.finish if self._finish is None else None
        if tokens or text or finish:
            self._pieces.append(Piece(text, tokens, finish))
        self._finish = self._finish or finish
        if result.last:
            self._usage = result.prompt_tokens, result.cached_tokens

    def write(self) -> Iterator[bytes]:
        """Yield what the client may have now: events of a stream, or all of an answer that is whole."""
        if self.generation.stream:
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                if event := self._answer.event(piece):
                    yield event
        if self._usage is not None:
            yield self._end(*self._usage)

    def _end(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        # The numbers of the usage come with the end, and the end is the first to need them.
        answer = Answer(self.generation, prompt_tokens, cached_tokens)
        whole = Piece(self._text, self._tokens, self._finish)
        if not self.generation.stream:
            return answer.whole([whole])
        answer.event(whole)
        return answer.last()


class _Delta(msgspec.Struct):
    content: str = ""


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta | None = None
    token_ids: list[int] = []
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


async def _events(upstream: Upstream) -> AsyncGenerator[_Event]:
    """Yield the events of a worker's stream. Raises ServeError."""
    decoder = msgspec.json.Decoder(_Event)
    rest = b""
    async with contextlib.aclosing(upstream.chunks()) as chunks:
        async for chunk in chunks:
            *whole, rest = (rest + chunk).split(b"\n\n")
            for line in whole:
                data = line.removeprefix(b"data: ")
                if data == b"[DONE]":
                    continue
                event = decoder.decode(data)
                if event.error is not None:
                    code = str(event.error.get("code"))
                    raise ServeError(code if code in CODES else "worker_failed", str(event.error.get("message")))
                yield event
