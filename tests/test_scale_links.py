"""Many links in one DataDist, and a limit of open files that is too low for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import zlib
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist.control import filelimit

from .peers import spawn

pytestmark = pytest.mark.loop

LINKS = 512
# On a busy machine it may take seconds until the loop has come to each of thousands of connections.
TCP = adt.Config(transports=("tcp",), tcp_connections=1, link_timeout=100.0, handshake_timeout=100.0)


async def until(condition: Any, within: float = 60.0) -> None:
    with anyio.fail_after(within):
        while not condition():
            await asyncio.sleep(0.005)


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def files_allowed(wanted: int) -> Iterator[None]:
    """Raise the limit of open files for a while; skip where that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"the limit of open files is {hard}, and this takes {wanted}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# 512 links. -------------------------------------------------------------------------------------------------

_MANY_NODES = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
config = adt.Config(transports=("tcp",), tcp_connections=1, link_timeout=100.0)
nodes = [await adt.DataDist(number, config=config).open() for number in range(1000, 1000 + count)]
links = await asyncio.gather(*(node.link(adt.ClusterInfo(2, address)) for node in nodes))
for node, link in zip(nodes, links):
    link._post_notification(b"%d" % node.cluster_id)
kept["nodes"] = nodes
return [link.state.value for link in links].count("ready")
"""


@pytest.mark.hang_limit(240)
async def test_512_links_in_one_datadist() -> None:
    with files_allowed(8 * LINKS):
        async with adt.DataDist(2, listen="127.0.0.1:0", config=TCP) as dd, spawn(1, listen=None) as peer:
            theirs = dd.cache_manager.register_blocks_cache(
                [np.full((4, 4096), 7, np.uint8)], key=adt.BlocksCacheKey(2)
            )
            await theirs.ready()
            before = fds()
            making = peer.post("run", source=_MANY_NODES, count=LINKS, address=str(dd.listen_address))
            assert await asyncio.wait_for(making, 200) == LINKS
            await until(lambda: len(dd.links) == LINKS)
            assert {link.state for link in dd.links.values()} == {adt.LinkState.READY}
            inbox = dd.notifications()
            noted = [await anext(inbox) for _ in range(LINKS)]
            assert {note.cluster_id for note in noted} == {int(note.payload) for note in noted}
            assert len({note.cluster_id for note in noted}) == LINKS
            # Transfers go on over all of them at once, and either side ends a half.
            assert await peer.run(_ALL_PULL) == LINKS
            await asyncio.gather(*(dd.unlink(adt.ClusterInfo(number)) for number in range(1000, 1000 + LINKS // 2)))
            assert len(dd.links) == LINKS // 2
            await peer.run("await asyncio.gather(*(node.aclose() for node in kept.pop('nodes')))")
            await until(lambda: not dd.links and not len(dd._center.peers))
            await until(lambda: fds() <= before)
            assert len(asyncio.all_tasks()) < 20


_ALL_PULL = """
async def pull(node):
    mine = node.cache_manager.register_blocks_cache([np.zeros((4, 4096), np.uint8)], remote=None)
    await node.cache_manager.pull_blocks(adt.BlocksCacheKey(2), mine, [1, 2], [3, 0])
    return int((mine.tensors[0][[0, 3]] == 7).all())
return sum(await asyncio.gather(*(pull(node) for node in kept["nodes"])))
"""


# Too few files. ---------------------------------------------------------------------------------------------

_LOW_LIMIT = """
import os, resource
fd = os.open("/", os.O_PATH)
os.close(fd)
resource.setrlimit(resource.RLIMIT_NOFILE, (fd + room, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
return fd + room
"""
_LINK_ALL = """
results = []
calls = (lambda: [dd.link(adt.ClusterInfo(int(number), address)) for number, address in addresses.items()])
if at_once:
    results = await asyncio.gather(*calls(), return_exceptions=True)
else:
    for number, address in addresses.items():
        results += await asyncio.gather(dd.link(adt.ClusterInfo(int(number), address)), return_exceptions=True)
return [[type(result).__name__, str(result), getattr(result, "hint", "")] for result in results]
"""


@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)], ids=lambda names: names[0])
@pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "at once"])
async def test_the_side_that_links_names_the_limit_of_open_files_and_goes_on(
    transports: tuple[str, ...], at_once: bool
) -> None:
    config = adt.Config(transports=transports)
    async with contextlib.AsyncExitStack() as stack:
        peer = await stack.enter_async_context(spawn(1, listen=None, transports=transports, link_timeout=20.0))
        nodes = [
            await stack.enter_async_context(adt.DataDist(number, listen="127.0.0.1:0", config=config))
            for number in range(10, 26)
        ]
        addresses = {str(node.cluster_id): str(node.listen_address) for node in nodes}
        limit = await peer.run(_LOW_LIMIT, room=90)
        results = await peer.run(_LINK_ALL, addresses=addresses, at_once=at_once)
        linked = [result for result in results if result[0] == "Link"]
        refused = [result for result in results if result[0] != "Link"]
        assert linked, results
        assert refused, results
        for kind, text, hint in refused:
            assert kind == "FileLimitError", text
            assert "open files" in text
            assert "ulimit -n" in hint
        if not at_once:
            assert f"limit of {limit} open files" in refused[-1][1]
        # Those that were made are whole, and what is given back can be used again.
        ready = await peer.run("return [number for number, link in dd.links.items() if link.state == 'ready']")
        assert len(ready) == len(linked)
        await peer.run("await asyncio.gather(*(dd.fence(number) for number in dd.links))")
        for number in ready:
            await peer.call("unlink", cluster_id=number)
        other = next(number for number in addresses if int(number) not in ready)
        await peer.call("link", cluster_id=int(other), address=addresses[other])


async def test_the_side_that_is_linked_refuses_what_it_has_no_files_for() -> None:
    async with contextlib.AsyncExitStack() as stack:
        peer = await stack.enter_async_context(spawn(1, transports=("tcp",)))
        limit = await peer.run(_LOW_LIMIT, room=60)
        config = adt.Config(transports=("tcp",))
        nodes = [await stack.enter_async_context(adt.DataDist(number, config=config)) for number in range(10, 30)]
        linked: list[adt.DataDist] = []
        with pytest.raises(adt.LinkRefusedError, match="too many open files there") as caught:
            for node in nodes:
                await node.link(peer.info)
                linked.append(node)
        assert caught.value.status is adt.Status.LINK_BUSY
        assert f"limit of {limit} open files" in str(caught.value)
        assert len(linked) >= 2
        await linked[0].unlink(peer.info)
        await nodes[-1].link(peer.info)
        await linked[1].fence(1)


def test_what_is_left_of_the_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open("/", os.O_PATH)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 5, hard))
        assert filelimit.files_are_short(5) == ""
        assert filelimit.files_are_short(6) == (
            f"the link needs 6 files, and 5 of the limit of {lowest_free + 5} open files are left"
        )
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        assert f"the limit of open files is {lowest_free}" in filelimit.files_are_short(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Many writers on one link. ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)], ids=lambda names: names[0])
async def test_s2_frames_of_32_tasks_never_interleave(transports: tuple[str, ...]) -> None:
    """faults.md S2: 32 tasks notify, announce caches and switch roles on one link, through a small socket."""
    config = adt.Config(transports=transports, notify_credits=64)
    async with (
        adt.DataDist(1, listen="127.0.0.1:0", config=config) as a,
        adt.DataDist(2, config=config) as b,
    ):
        link = await b.link(adt.ClusterInfo(1, a.listen_address))
        await until(lambda: 2 in a.links)
        link._channel.stream._sock.setsockopt(1, 7, 4096)  # type: ignore[attr-defined]  # SOL_SOCKET, SO_SNDBUF
        got: list[bytes] = []

        async def read() -> None:
            inbox = a.notifications()
            while True:
                got.append((await anext(inbox)).payload)

        async def work(number: int) -> None:
            random = np.random.default_rng(number)
            for round_ in range(12):
                body = random.bytes(int(random.integers(0, 30_000)))
                await link._post_notification(b"%4d %4d %10d " % (number, round_, zlib.crc32(body)) + body)
                if number % 4 == 0:
                    cache = b.cache_manager.register_blocks_cache([np.zeros((2, 8), np.uint8)])
                    await cache.ready()
                    await b.cache_manager.unregister_cache(cache)
                if number % 8 == 1:
                    await b.switch_role([adt.Role.PROMPT, adt.Role.DECODER][round_ % 2])

        reader = asyncio.ensure_future(read())
        async with asyncio.TaskGroup() as group:
            for number in range(32):
                group.create_task(work(number))
        await until(lambda: len(got) == 32 * 12)
        assert {(int(note[:4]), int(note[5:9])) for note in got} == {(n, r) for n in range(32) for r in range(12)}
        assert all(zlib.crc32(note[21:]) == int(note[10:20]) for note in got)
        assert link.state is adt.LinkState.READY
        assert a.links[2].error is None
        await until(lambda: a.links[2].role is b.role)
        reader.cancel()
