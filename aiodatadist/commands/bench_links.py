"""`bench links`: linking and unlinking many peers at once."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import aiodatadist as adt

from .bench_memory import PEER_ID
from .bench_peer import config, resident
from .bench_rows import Progress, Rows, in_turn
from .bench_transfers import Session

__all__ = ["LinksScale", "measure_links"]

_NODE_ID: Final = PEER_ID + 100
_CONNECTION: Final = "one TCP connection made and closed"


@dataclass(frozen=True, slots=True)
class LinksScale:
    """How much is measured.

    Attributes
    ----------
    peers : int
        DataDists of the passive process that are linked at a time.
    repeat : int
        Rounds.
    """

    peers: int
    repeat: int


async def measure_links(
    session: Session, paths: Sequence[str], scale: LinksScale, rows: Rows, progress: Progress
) -> None:
    """Measure for each transport that the paths use: time, CPU and memory of links."""
    for number, transport in enumerate(dict.fromkeys(path.partition("-")[0] for path in paths)):
        progress(f"links: {scale.peers} peers over {transport}")
        memory = await _measure_transport(session, transport, scale, rows)
        if number == 0:
            # Later links live in the memory that the first ones left.
            rows.add("links memory of a link, both sides", transport, None, [memory], "KiB", "lower")


async def _measure_transport(session: Session, transport: str, scale: LinksScale, rows: Rows) -> float:
    """Link and unlink peers in turn with raw connections; return the KiB of memory that a first link took."""
    # tcp stays second for shm: a peer that cannot be reached by it is linked all the same.
    transports = ["shm", "tcp"] if transport == "shm" else [transport]
    addresses = await session.peer.call("open_others", count=scale.peers, transports=transports)
    peers = [adt.ClusterInfo(PEER_ID + 1000 + number, address) for number, address in enumerate(addresses)]
    linking: list[float] = []
    unlinking: list[float] = []
    cpu: list[float] = []
    memory: list[float] = []
    try:
        async with adt.DataDist(_NODE_ID, adt.Role.DECODER, config=config(*transports)) as dd:

            async def links() -> None:
                before = await _cpu(session), await _resident(session)
                began = perf_counter()
                await asyncio.gather(*(dd.link(peer) for peer in peers))
                linked = perf_counter()
                if len(dd.links) != scale.peers:
                    raise adt.NotLinkedError(f"{len(dd.links)} of {scale.peers} links are there")
                memory.append(max(0, await _resident(session) - before[1]) / scale.peers / 1024)
                again = perf_counter()
                await asyncio.gather(*(dd.unlink(peer) for peer in peers))
                unlinking.append(scale.peers / (perf_counter() - again))
                linking.append(scale.peers / (linked - began))
                cpu.append((await _cpu(session) - before[0]) / scale.peers * 1e3)

            async def connections() -> float:
                return _connections(scale.peers)

            found = await in_turn({"links": links, "connections": connections}, scale.repeat)
    finally:
        await session.peer.call("close_others")
    limit = _CONNECTION, found["connections"]
    rows.add(f"links link {scale.peers} at once", transport, None, linking, "1/s", "higher", limit)
    rows.add(f"links unlink {scale.peers} at once", transport, None, unlinking, "1/s", "higher")
    rows.add("links CPU of link and unlink, both sides", transport, None, cpu, "ms", "lower")
    return memory[0]


async def _cpu(session: Session) -> float:
    """Return the CPU seconds of both processes."""
    return time.process_time() + float(await session.peer.call("cpu"))


async def _resident(session: Session) -> int:
    """Return the bytes of memory that both processes have touched."""
    gc.collect()
    return resident() + int(await session.peer.call("resident"))


def _connections(count: int) -> float:
    """Make and close plain connections, one after the other; return how many a second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        began = perf_counter()
        for _ in range(count):
            with socket.create_connection(address):
                accepted, _ = listener.accept()
                accepted.close()
        return count / (perf_counter() - began)
