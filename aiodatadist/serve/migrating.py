"""Answers that survive the worker that writes them: another begins anew, and whoever has a part gets the rest."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, TypeAlias

from aiodatadist.observe import get_logger

from .dispatch import Dispatcher
from .errors import ServeError
from .legs import Upstream
from .protocol import Generation
from .results import Merged, Result, in_pieces, read_results

__all__ = ["Migrating", "Moves"]

_log = get_logger().bind(part="serve")

Begin: TypeAlias = Callable[[Generation, str], Awaitable[Upstream]]
"""Begins a request; the text is the worker that it should not go to."""


class Moves:
    """One request, at one worker after the other, as often as `RouterConfig.migrate` says.

    Parameters
    ----------
    dispatcher : Dispatcher
    generation : Generation
    begin : callable, optional
        In place of `Dispatcher.open_again`.
    """

    def __init__(self, dispatcher: Dispatcher, generation: Generation, begin: Begin | None = None) -> None:
        self._dispatcher = dispatcher
        self._generation = generation
        self._begin = dispatcher.open_again if begin is None else begin
        self._upstream: Upstream | None = None

    async def results(self) -> AsyncGenerator[Result]:
        """Yield the pieces of each run, to be merged by whoever reads. Raises ServeError."""
        left, suspect = self._dispatcher.config.migrate, ""
        while True:
            upstream = self._upstream = await self._begin(in_pieces(self._generation), suspect)
            try:
                async with contextlib.aclosing(read_results(upstream, self._generation.request_id)) as results:
                    async for result in results:
                        yield result
                return
            except ServeError as why:
                if why.code != "stream_broken" or left == 0:
                    raise
                left -= 1
                suspect = upstream.member.worker_id
                self._dispatcher.metrics.migrations += 1
                _log.info("moving an answer", request_id=self._generation.request_id, reason=str(why))
            finally:
                upstream.close()

    def close(self) -> None:
        """Give back what is held. Again is no error."""
        if self._upstream is not None:
            self._upstream.close()


class Migrating:
    """A client's request that may move; to be used like a `legs.Upstream`. `open` begins it.

    Parameters
    ----------
    dispatcher : Dispatcher
    generation : Generation
    """

    status: Final = 200

    def __init__(self, dispatcher: Dispatcher, generation: Generation) -> None:
        self.route: dict[str, str] = {}  # who will write it to its end is not known when headers are sent
        self._moves = Moves(dispatcher, generation)
        self._results = self._moves.results()
        self._merged = Merged(generation)
        self.content_type = self._merged.content_type

    async def open(self) -> Migrating:
        """Wait for the first piece. Raises ServeError."""
        try:
            self._merged.take(await anext(self._results))
        except BaseException:
            await self._results.aclose()
            raise
        return self

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it comes. Raises ServeError."""
        async with contextlib.aclosing(self._results) as results:
            for chunk in self._merged.write():
                yield chunk
            async for result in results:
                self._merged.take(result)
                for chunk in self._merged.write():
                    yield chunk
                if self._merged.error is not None:
                    raise self._merged.error

    def close(self) -> None:
        """Give everything back."""
        self._moves.close()
