"""Memory that a dead, stopped or slow worker might still touch, and KV that has been damaged on its way.

The decode worker runs in the test's process, so that the test can look at its memory; prefill workers are processes,
to be stopped and killed. Blocks that come back to the pool are filled with a guard pattern at once: whoever writes into
them after that is found out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")
pytest.importorskip("threadpoolctl", reason="serving needs threadpoolctl")

from aiohttp import ClientError, ClientSession

from aiodatadist.commands.serve_cluster import Cluster, ServeProcess
from aiodatadist.model import draw_prompt, tokenizer
from aiodatadist.serve.damage import WAYS
from aiodatadist.serve.errors import ServeError
from aiodatadist.serve.protocol import DecodeJob, PrefillJob, ReleaseJob, Reservation, ReserveJob, Ticket
from aiodatadist.serve.worker import Worker

from .conftest import Scale
from .serve_local import BLOCKS, QUICK, generation, idle_within, local_worker, tell, ticket_of
from .test_serve import client
from .waiting import until

pytestmark = pytest.mark.hang_limit(240)

GUARD = 12345.0
LONG = 1900
"""Tokens of a prompt of 119 blocks, whose last piece takes the model a tenth of a second: so long layers come."""
TELLING = tokenizer.encode(draw_prompt(3, 400).text)
"""A prompt whose answer repeats what is in it."""
ATTEMPTS = 20
FEW = 200
"""Blocks of a decode worker that has no room for two of these."""
PATIENT = dataclasses.replace(QUICK, transfer=5.0, reservation=30.0, lease=30.0)


@contextlib.asynccontextmanager
async def prefill_process(transport: str, *options: str) -> AsyncIterator[ServeProcess]:
    cluster = Cluster()
    child = await cluster.start("prefill", ("--mode", "both", "--transports", transport, *options))
    try:
        await child.wait_ready()
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGCONT)
        await child.stop()


def long_prompt(number: int) -> list[int]:
    """Return a prompt that begins like no other, so that nothing of it is in a cache."""
    return [number, *(65 + each % 26 for each in range(LONG - 1))]


async def cluster_id(http: ClientSession, url: str) -> int:
    """Return the id by which a prefill worker is linked: it says so in every ticket."""
    ticket = await ticket_of(http, url, PrefillJob(generation=generation("who", [65])))
    await tell(http, f"{url}/pd/release", ReleaseJob(request_id="who", attempt=0), dict)
    return ticket.owner.cluster_id


def free_blocks(worker: Worker) -> int:
    return worker.units.load().free_blocks


class Guard:
    """Fills blocks as they come back to a decode worker's pool, and looks at them later."""

    def __init__(self, worker: Worker) -> None:
        (self._unit,) = worker.units
        self.blocks: set[int] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        pool = self._unit.engine.pool  # type: ignore[attr-defined]
        give = pool.give

        def give_and_fill(blocks: Sequence[int]) -> None:
            give(blocks)
            self._fill(blocks)

        pool.give = give_and_fill
        try:
            yield
        finally:
            pool.give = give

    def _fill(self, blocks: Sequence[int]) -> None:
        self.blocks |= set(blocks)
        for tensor in self._tensors():
            tensor[list(blocks)] = GUARD

    def _tensors(self) -> Sequence[Any]:
        assert self._unit.cache is not None
        return self._unit.cache.tensors

    def whole(self) -> bool:
        """Tell if nobody has written into what came back."""
        return all(bool(np.all(tensor[sorted(self.blocks)] == GUARD)) for tensor in self._tensors())

    def filled_layers(self, blocks: Sequence[int]) -> int:
        """Return in how many layers all of these blocks have been written since they were guarded."""
        last = list(blocks)[-1]
        return sum(bool(np.any(values[last] != GUARD)) for values in self._tensors()[1::2])

    def guard_all(self) -> None:
        for tensor in self._tensors():
            tensor[:] = GUARD


async def begin_push(http: ClientSession, prefill: ServeProcess, decode: Worker, number: int, writer: int) -> Any:
    """Reserve, and have the prefill worker begin; returns the reservation and the prefill worker's answer."""
    asked = generation(f"push-{number}", long_prompt(number))
    job = ReserveJob(generation=asked, attempt=0, writer=writer)
    reservation = await tell(http, f"{decode.url}/pd/reserve", job, Reservation)
    push = PrefillJob(generation=asked, reservation=reservation)
    return reservation, asyncio.create_task(ticket_of(http, prefill.url, push))


async def midway(guard: Guard, reservation: Reservation, answer: asyncio.Task[Any]) -> None:
    """Wait until the first layer has come."""
    while not guard.filled_layers(reservation.blocks):
        assert not answer.done(), answer
        await asyncio.sleep(0)


async def end_of(answer: asyncio.Task[Any]) -> str:
    """Return the code that it ended with; a ServeError has none but those of the table."""
    (end,) = await asyncio.gather(answer, return_exceptions=True)
    if isinstance(end, ServeError):
        return end.code
    if isinstance(end, ClientError):
        return "gone"
    assert not isinstance(end, BaseException), end
    return ""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_what_a_stopped_writer_may_still_write_stays_in_quarantine_until_it_is_quiet(transport: str) -> None:
    async with (
        client() as http,
        local_worker("decode", transports=(transport,), timeouts=PATIENT, num_blocks=FEW) as decode,
        prefill_process(transport) as prefill,
    ):
        guard = Guard(decode)
        writer = await cluster_id(http, prefill.url)
        with guard.watching():
            for number in range(ATTEMPTS):  # until one is met midway
                guard.guard_all()
                guard.blocks.clear()
                reservation, answer = await begin_push(http, prefill, decode, number, writer)
                await midway(guard, reservation, answer)
                prefill.process.send_signal(signal.SIGSTOP)
                landed = guard.filled_layers(reservation.blocks)
                release = ReleaseJob(request_id=f"push-{number}", attempt=0)
                assert await tell(http, f"{decode.url}/pd/release", release, dict) == {"released": 1}
                if landed < 4:
                    break
                prefill.process.send_signal(signal.SIGCONT)
                await end_of(answer)
            assert landed < 4, "each push was complete before it could be stopped"
            counts = decode.pushes.counts()  # type: ignore[union-attr]
            assert counts["quarantined"] == 1
            # Nobody else gets these blocks, however much they are wanted.
            held = FEW - free_blocks(decode)
            assert held == -(-(LONG + 4) // 16)
            big = generation("big", [65] * (16 * (FEW - held)))
            with pytest.raises(ServeError) as refused:
                await tell(
                    http, f"{decode.url}/pd/reserve", ReserveJob(generation=big, attempt=0, writer=writer), Reservation
                )
            assert refused.value.code == "no_blocks"
            await asyncio.sleep(0.3)
            assert not guard.blocks & set(reservation.blocks)
            assert free_blocks(decode) == FEW - held

            prefill.process.send_signal(signal.SIGCONT)
            await until(lambda: free_blocks(decode) == FEW, "what was in quarantine does not come back")
            assert set(reservation.blocks) <= guard.blocks
            assert await end_of(answer) in ("reservation_gone", "transfer_failed", "transfer_timeout")
            # The writer has nothing under way any more, and has not written since.
            await idle_within(10.0, http, [prefill.url, decode.url])
            assert guard.whole()
            # And the next push is as good as ever.
            reservation, answer = await begin_push(http, prefill, decode, ATTEMPTS, writer)
            job = DecodeJob(generation=generation(f"push-{ATTEMPTS}", ""), ticket=await answer)
            said = await tell(http, f"{decode.url}/pd/decode", job, dict)
            assert len(said["choices"][0]["token_ids"]) == 4


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_blocks_of_a_killed_writer_come_back_and_are_written_no_more(transport: str, scale: Scale) -> None:
    async with client() as http, local_worker("decode", transports=(transport,), timeouts=PATIENT) as decode:
        guard = Guard(decode)
        with guard.watching():
            for number in range(scale(1)):
                async with prefill_process(transport) as prefill:
                    writer = await cluster_id(http, prefill.url)
                    guard.guard_all()
                    guard.blocks.clear()
                    reservation, answer = await begin_push(http, prefill, decode, number, writer)
                    await midway(guard, reservation, answer)
                    prefill.kill()
                    assert await end_of(answer) == "gone"
                    await tell(
                        http, f"{decode.url}/pd/release", ReleaseJob(request_id=f"push-{number}", attempt=0), dict
                    )
                    await until(lambda: free_blocks(decode) == BLOCKS, "the blocks do not come back")
                    assert set(reservation.blocks) <= guard.blocks
                    await asyncio.sleep(0.1)
                    assert guard.whole()
                await idle_within(5.0, http, [decode.url])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_pull_from_a_killed_worker_ends_and_its_blocks_are_written_no_more(
    transport: str, scale: Scale
) -> None:
    async with client() as http, local_worker("decode", transports=(transport,), timeouts=PATIENT) as decode:
        guard = Guard(decode)
        with guard.watching():
            for number in range(scale(2, least=2)):
                async with prefill_process(transport) as prefill:
                    guard.guard_all()
                    guard.blocks.clear()
                    asked = generation(f"pull-{number}", long_prompt(number))
                    ticket = await ticket_of(http, prefill.url, PrefillJob(generation=asked))
                    job = DecodeJob(generation=generation(f"pull-{number}", ""), ticket=ticket)
                    answer = asyncio.create_task(tell(http, f"{decode.url}/pd/decode", job, dict))
                    if number % 2:
                        # Linked, and on its way or nearly so.
                        await until(lambda answer=answer: decode.metrics.running["transfer"] or answer.done())  # type: ignore[misc]
                        await asyncio.sleep(0.0005 * number)
                    prefill.kill()
                    code = await end_of(answer)
                    assert code in ("", "transfer_failed", "transfer_timeout", "ticket_gone")
                    await until(lambda: free_blocks(decode) == BLOCKS, "the blocks do not come back")
                    assert guard.blocks
                    await asyncio.sleep(0.1)
                    assert guard.whole()
                await idle_within(5.0, http, [decode.url])


async def test_a_pull_from_a_stopped_worker_is_given_up_and_what_comes_late_is_written_nowhere() -> None:
    timeouts = dataclasses.replace(PATIENT, transfer=1.0)
    async with (
        client() as http,
        local_worker("decode", transports=("tcp",), timeouts=timeouts) as decode,
        prefill_process("tcp") as prefill,
    ):
        guard = Guard(decode)
        with guard.watching():
            # A first one, so that they are linked when the second begins.
            for name in ("linked", "late"):
                asked = generation(name, long_prompt(0))
                ticket = await ticket_of(http, prefill.url, PrefillJob(generation=asked))
                if name == "late":
                    guard.guard_all()
                    guard.blocks.clear()
                    prefill.process.send_signal(signal.SIGSTOP)
                job = DecodeJob(generation=generation(name, ""), ticket=ticket)
                answer = asyncio.create_task(tell(http, f"{decode.url}/pd/decode", job, dict))
                code = await end_of(answer)
                assert code == ("" if name == "linked" else "transfer_timeout")
            await until(lambda: free_blocks(decode) == BLOCKS)
            prefill.process.send_signal(signal.SIGCONT)
            await idle_within(40.0, http, [prefill.url, decode.url])  # by the lease, if nobody could say more
            assert guard.blocks
            assert guard.whole()


# Damage. ----------------------------------------------------------------------------------------------------


async def test_kv_that_was_damaged_is_found_out() -> None:
    """By digests always; by tokens not: that is why there are digests."""
    async with (
        client() as http,
        local_worker("prefill", digests=True) as told,
        local_worker("prefill") as untold,
        contextlib.AsyncExitStack() as stack,
    ):
        whole = await stack.enter_async_context(local_worker("decode"))
        damaging = {way: await stack.enter_async_context(local_worker("decode", damage=way)) for way in WAYS}

        async def pulled(prefill: Worker, decode: Worker, name: str) -> list[int]:
            ticket = await ticket_of(http, prefill.url, PrefillJob(generation=generation(name, TELLING)))
            return await finish(decode, name, ticket)

        async def pushed(prefill: Worker, decode: Worker, name: str) -> list[int]:
            assert prefill.peer is not None
            asked = generation(name, TELLING, 200)
            job = ReserveJob(generation=asked, attempt=0, writer=prefill.peer.cluster_id)
            reservation = await tell(http, f"{decode.url}/pd/reserve", job, Reservation)
            ticket = await ticket_of(http, prefill.url, PrefillJob(generation=asked, reservation=reservation))
            return await finish(decode, name, ticket)

        async def finish(decode: Worker, name: str, ticket: Ticket) -> list[int]:
            job = DecodeJob(generation=generation(name, "", 200), ticket=ticket)
            said = await tell(http, f"{decode.url}/pd/decode", job, dict)
            tokens: list[int] = said["choices"][0]["token_ids"]
            return tokens

        # The control that has to pass.
        expected = await pulled(told, whole, "a")
        assert len(expected) == 200
        assert [await pushed(told, whole, "b"), await pulled(untold, whole, "c")] == [expected] * 2
        for way, decode in damaging.items():
            for handed in (pulled, pushed):
                with pytest.raises(ServeError) as found:
                    await handed(told, decode, f"{way}-{handed.__name__}")
                assert found.value.code == "kv_damaged"
            # A byte is too little, and keys carry their positions: attention hardly minds in which block they lie.
            if way in ("layer", "zero"):
                assert await pulled(untold, decode, f"{way}-untold") != expected, way
        await idle_within(5.0, http, [told.url, untold.url, whole.url, *(each.url for each in damaging.values())])
