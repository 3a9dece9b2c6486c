"""The built-in engine: the numpy transformer, with a thread of its own.

The thread takes turns between one piece of a prompt and one step of all sequences that are being decoded, up to
`slots` of them, so that a long prompt does not hold up the others. Who is in the batch is decided anew at each step.

A batch needs no padding for its tokens to be identical to the bit: the model computes each row by calls whose shapes do
not depend on the others (`aiodatadist.model.transformer` says how).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from aiodatadist.model import Model, one_blas_thread

from . import sampling as sampler
from .engine import ModelCard, Reserved
from .errors import ServeError
from .paged import BlockPool
from .protocol import KVLayout, Load, Sampling

__all__ = ["BLOCK_TOKENS", "NumpyEngine"]

BLOCK_TOKENS: Final = 16
_PIECE_SECONDS: Final = 0.1
"""A prompt is computed in pieces of about so long, between which the others get their turn."""
_PIECE_TOKENS: Final = (16, 512)


@dataclass(eq=False, slots=True)
class _Hold:
    """The engine's side of a `Reserved`: its blocks go back when it is given up and no work on it is left."""

    given_up: bool = False
    jobs: list[_Job] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Job:
    reserved: Reserved
    sampling: Sampling
    cancelled: bool = False  # written by the loop, read by the thread


@dataclass(eq=False, slots=True)
class _Prefill(_Job):
    on_layer: Callable[[int], None] | None = None
    position: int = 0
    done: asyncio.Future[int] | None = None


@dataclass(eq=False, slots=True)
class _Decode(_Job):
    token: int = 0
    position: int = 0
    left: int = 0
    out: _Tokens | None = None


class _News(NamedTuple):
    """What the thread tells: a token, if there is one, and why it was the last, or empty."""

    job: _Job
    token: int | None
    end: str | ServeError


class _Tokens:
    """New tokens of one sequence; a `Decoding`."""

    def __init__(self) -> None:
        self.finish = ""
        self.error: ServeError | None = None
        self._tokens: list[int] = []
        self._more = asyncio.Event()

    def put(self, token: int | None, finish: str) -> None:
        if token is not None:
            self._tokens.append(token)
        self.finish = self.finish or finish
        self._more.set()

    def fail(self, error: ServeError) -> None:
        self.error = error
        self._more.set()

    def __aiter__(self) -> AsyncIterator[list[int]]:
        return self

    async def __anext__(self) -> list[int]:
        while not self._tokens:
            if self.error is not None:
                raise self.error
            if self.finish:
                raise StopAsyncIteration
            self._more.clear()
            await self._more.wait()
        tokens, self._tokens = self._tokens, []
        return tokens


class NumpyEngine:
    """An `Engine` of the numpy transformer.

    Parameters
    ----------
    model : Model
    name : str
    num_blocks : int
        Blocks of `BLOCK_TOKENS` tokens.
    slots : int
        Most sequences decoded at once.
    """

    def __init__(
        self, model: Model, name: str, num_blocks: int, slots: int = 8, *, fingerprint: str | None = None
    ) -> None:
        c = model.config
        self.card = ModelCard(
            name, model.fingerprint() if fingerprint is None else fingerprint, c.max_positions, c.end_tokens
        )
        self.layout = KVLayout(
            layers=c.layers, kv_heads=c.kv_heads, head_dim=c.head_dim, block_tokens=BLOCK_TOKENS, dtype="float32"
        )
        self.num_blocks = num_blocks
        self.slots = slots
        self.pool = BlockPool(num_blocks, BLOCK_TOKENS)
        self._model = model
        self._kv: Sequence[Any] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="aiodatadist-model", daemon=True)
        self._wake = threading.Condition()
        self._inbox: list[_Job] = []
        self._closing = False
        self._piece = _PIECE_TOKENS[0]  # of the thread
        # Of the loop: for `load`.
        self._prefills: set[_Prefill] = set()
        self._decodes: set[_Decode] = set()

    # The loop's side. ---------------------------------------------------------------------------------------

    def tensor_shapes(self) -> list[tuple[int, ...]]:
        """See `Engine`."""
        return [tuple(shape) for shape in self._model.kv_shapes(self.num_blocks, BLOCK_TOKENS)]

    def bind(self, tensors: Sequence[Any]) -> None:
        """See `Engine`."""
        self._kv = tensors

    async def start(self) -> None:
        """See `Engine`."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """See `Engine`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.shield(asyncio.to_thread(self._thread.join))
        gone = ServeError("internal_error", "the engine was closed")
        for job in [*self._prefills, *self._decodes]:
            self._end(job, gone)

    def load(self) -> Load:
        """See `Engine`."""
        running = min(len(self._decodes), self.slots) + min(len(self._prefills), 1)
        return Load(
            free_blocks=self.pool.free,
            num_blocks=self.num_blocks,
            running=running,
            waiting=len(self._decodes) + len(self._prefills) - running,
            tokens=sum(len(job.reserved.prompt) - job.reserved.cached for job in self._prefills),
        )

    def reserve(self, positions: int, prompt: Sequence[int] = ()) -> Reserved | None:
        """See `Engine`."""
        found = self.pool.find(prompt) if prompt else None
        shared = [] if found is None else found.blocks
        more = self.pool.take(-(-positions // BLOCK_TOKENS) - len(shared))
        if more is None:
            self.pool.give(shared)
            return None
        return Reserved([*shared, *more], 0 if found is None else found.tokens, prompt, _Hold())

    async def prefill(
        self, reserved: Reserved, sampling: Sampling, on_layer: Callable[[int], None] | None = None
    ) -> int:
        """See `Engine`."""
        assert self._loop is not None
        job = _Prefill(reserved, sampling, on_layer=on_layer, position=reserved.cached, done=self._loop.create_future())
        self._prefills.add(job)
        self._submit(job)
        assert job.done is not None
        try:
            return await job.done
        finally:
            job.cancelled = True

    def decode(self, reserved: Reserved, token: int, position: int, sampling: Sampling, limit: int) -> _Tokens:
        """See `Engine`."""
        out = _Tokens()
        job = _Decode(reserved, sampling, token=token, position=position, left=limit, out=out)
        self._decodes.add(job)
        self._submit(job)
        return out

    def free(self, reserved: Reserved) -> None:
        """See `Engine`."""
        hold: _Hold = reserved.handle
        if hold.given_up:
            return
        hold.given_up = True
        for job in hold.jobs:
            job.cancelled = True
        if not hold.jobs:
            self.pool.give(reserved.blocks)
        else:
            with self._wake:
                self._wake.notify()

    def _submit(self, job: _Job) -> None:
        job.reserved.handle.jobs.append(job)
        with self._wake:
            self._inbox.append(job)
            self._wake.notify()

    def _deliver(self, news: list[_News]) -> None:
        """Hear from the thread."""
        for job, token, end in news:
            if isinstance(end, ServeError):
                self._end(job, end)
                continue
            if isinstance(job, _Prefill):
                assert job.done is not None
                if token is not None:
                    self.pool.keep(job.reserved.prompt, job.reserved.blocks)
                    if not job.done.done():
                        job.done.set_result(token)
            elif isinstance(job, _Decode):
                assert job.out is not None
                job.out.put(token, end)
            if end:
                self._end(job, None)

    def _end(self, job: _Job, error: ServeError | None) -> None:
        """Account for work that the thread will not touch again."""
        if isinstance(job, _Prefill):
            self._prefills.discard(job)
            assert job.done is not None
            if error is not None and not job.done.done():
                job.done.set_exception(error)
        elif isinstance(job, _Decode):
            self._decodes.discard(job)
            assert job.out is not None
            if error is not None:
                job.out.fail(error)
        hold: _Hold = job.reserved.handle
        if job in hold.jobs:
            hold.jobs.remove(job)
            if hold.given_up and not hold.jobs:
                self.pool.give(job.reserved.blocks)

    # The thread's side. -------------------------------------------------------------------------------------

    def _run(self) -> None:
        with one_blas_thread():
            prompts: deque[_Prefill] = deque()
            texts: list[_Decode] = []
            while True:
                with self._wake:
                    while not (self._closing or self._inbox or prompts or texts):
                        self._wake.wait()
                    if self._closing:
                        return
                    taken, self._inbox = self._inbox, []
                news: list[_News] = []
                for job in taken:
                    if isinstance(job, _Prefill):
                        prompts.append(job)
                    elif isinstance(job, _Decode):
                        texts.append(job)
                # Each once: what is cancelled from here on is found in the next turn.
                gone = [job for job in (*prompts, *texts) if job.cancelled]
                news.extend(_News(job, None, "cancelled") for job in gone)
                prompts = deque(job for job in prompts if job not in gone)
                texts = [job for job in texts if job not in gone]
                if prompts and self._compute_piece(prompts[0], news):
                    prompts.popleft()
                if texts:
                    self._compute_step(texts[: self.slots], news)
                    ended = {id(job) for job, _, end in news if end}
                    texts = [job for job in texts if id(job) not in ended]
                if news:
                    assert self._loop is not None
                    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                        self._loop.call_soon_threadsafe(self._deliver, news)

    def _compute_piece(self, job: _Prefill, news: list[_News]) -> bool:
        """Compute the next piece of a prompt; return whether it was the last."""
        prompt = job.reserved.prompt
        end = min(len(prompt), job.position + self._piece)
        last = end == len(prompt)
        try:
            began = time.perf_counter()
            logits = self._model.prefill(
                prompt[job.position : end],
                self._kv,
                job.reserved.blocks,
                start=job.position,
                on_layer=job.on_layer if last else None,
            )
            least, most = _PIECE_TOKENS
            pace = (end - job.position) / (time.perf_counter() - began)
            self._piece = min(max(int(pace * _PIECE_SECONDS), least), most)
            job.position = end
            if last:
                news.append(_News(job, sampler.choose(logits, job.sampling, end), "filled"))
        except Exception as why:
            news.append(_News(job, None, _failed(why)))
            return True
        return last

    def _compute_step(self, batch: list[_Decode], news: list[_News]) -> None:
        """Write one token of each text."""
        try:
            logits = self._model.decode_batch(
                [job.token for job in batch],
                [job.position for job in batch],
                self._kv,
                [job.reserved.blocks for job in batch],
            )
            tokens = [
                sampler.choose(np.asarray(row), job.sampling, job.position + 1)
                for job, row in zip(batch, logits, strict=True)
            ]
        except Exception as why:
            news.extend(_News(job, None, _failed(why)) for job in batch)
            return
        for job, token in zip(batch, tokens, strict=True):
            job.position += 1
            job.left -= 1
            job.token = token
            if token in self.card.end_tokens and not job.sampling.ignore_end:
                news.append(_News(job, None, "stop"))
            else:
                news.append(_News(job, token, "" if job.left else "length"))


def _failed(why: Exception) -> ServeError:
    return ServeError("internal_error", f"the model failed: {type(why).__name__}: {why}")
