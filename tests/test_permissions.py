"""What the system refuses: other processes' memory, other users, memory to lock, descriptors, memory to register."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist import _core
from aiodatadist.errors import NativeStatus, error_from_native

from .pairs import OWNER, USER, linked, pattern
from .peers import PeerProcess, spawn

KEY = adt.BlocksCacheKey(OWNER)
LIBRARY = adt.BlocksCacheKey(OWNER, model_id=1)
BLOCKS, BLOCK_BYTES = 16, 4096
NOBODY = 65534

# prctl(PR_SET_DUMPABLE, 0): what the kernel does itself to programs that changed their user. Nobody but root may look
# into such a process.
KEEP_OTHERS_OUT = "import ctypes; return ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"


async def offer(peer: PeerProcess) -> None:
    shape = (BLOCKS, BLOCK_BYTES)
    await peer.cache("ordinary", tensors=2, shape=shape, memory="ordinary", model_id=0, value=5)
    await peer.cache("library", tensors=2, shape=shape, memory="library", model_id=1, value=6)


async def moved(dd: adt.DataDist, peer: PeerProcess, link: adt.Link) -> dict[str, str]:
    """Pull and push ordinary and library memory; return the paths they took."""
    paths = {}
    for name, key, value in (("ordinary", KEY, 5), ("library", LIBRARY, 6)):
        cache = dd.cache_manager.register_blocks_cache([np.zeros((BLOCKS, BLOCK_BYTES), np.uint8) for _ in range(2)])
        await dd.cache_manager.pull_blocks(key, cache, range(BLOCKS), range(BLOCKS))
        assert all((tensor == value).all() for tensor in cache.tensors)
        for tensor in cache.tensors:
            tensor[:] = value + 10
        await dd.cache_manager.push_blocks(key, cache, range(BLOCKS), range(BLOCKS))
        assert await peer.call("count", name=name, value=value + 10) == 2 * BLOCKS * BLOCK_BYTES
        native = link.table[key].native
        assert native is not None
        paths[name] = native.path
    return paths


# --- the memory of other processes ----------------------------------------------------------------------


@pytest.mark.unprivileged
async def test_process_vm_refused_falls_back_to_tcp() -> None:
    """Refused by the kernel itself. Library memory is still mapped, and the other direction still works."""
    async with spawn(OWNER) as peer, adt.DataDist(USER) as dd:
        assert await peer.run(KEEP_OTHERS_OUT) == 0
        await offer(peer)
        link = await dd.link(peer.info)
        assert link.path.transport == "shm"
        assert dict(link.path.memory) == {"library": "mapped", "ordinary": "tcp"}
        assert f"process_vm_readv on process {peer.pid}: Operation not permitted" in link.path.reasons["process_vm"]
        assert link.path.reasons["process_vm"] in str(link.path)
        assert await moved(dd, peer, link) == {"ordinary": "tcp", "library": "shm-mapped"}


@pytest.mark.unprivileged
async def test_without_tcp_a_cache_that_cannot_be_reached_says_so() -> None:
    async with (
        spawn(OWNER, transports=("shm",)) as peer,
        adt.DataDist(USER, config=adt.Config(transports=("shm",))) as dd,
    ):
        assert await peer.run(KEEP_OTHERS_OUT) == 0
        await offer(peer)
        link = await dd.link(peer.info)
        assert dict(link.path.memory) == {"library": "mapped", "ordinary": "none"}
        mine = dd.cache_manager.register_blocks_cache([np.zeros((BLOCKS, BLOCK_BYTES), np.uint8) for _ in range(2)])
        await dd.cache_manager.pull_blocks(LIBRARY, mine, [0], [0])
        with pytest.raises(adt.TransportUnavailable, match="process_vm is not allowed"):
            await dd.cache_manager.pull_blocks(KEY, mine, [0], [0])


# --- other users ----------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize("dialing", ["this user", "the other user"])
async def test_processes_of_two_users_share_no_memory(dialing: str) -> None:
    """Root could reach into the other's memory and must not: the link goes over tcp and says why."""
    async with spawn(OWNER) as peer, adt.DataDist(USER, listen="127.0.0.1:0") as dd:
        # Who listens is noted by the kernel when listening begins, so it opens again as somebody else.
        await peer.call("aclose")
        become = "import os; os.setgroups([]); os.setresgid(*[nobody] * 3); os.setresuid(*[nobody] * 3)"
        await peer.run(become, nobody=NOBODY)
        peer.address = await peer.call("open", cluster_id=OWNER, role="mix", listen="127.0.0.1:0", config={})
        await offer(peer)
        if dialing == "this user":
            link = await dd.link(peer.info)
        else:
            await peer.call("link", cluster_id=USER, address=str(dd.listen_address))
            link = dd.links[OWNER]
        assert link.path.transport == "tcp"
        theirs = await peer.run(
            f"path = dd.links[{USER}].path; return [path.transport, dict(path.memory), path.reasons['shm']]"
        )
        assert theirs[:2] == ["tcp", {}]
        said = {link.path.reasons["shm"], theirs[2]}
        here, there = os.geteuid(), NOBODY
        users = f"as user {here}, this process as user {there}", f"as user {there}, this process as user {here}"
        assert any(each in text for text in said for each in users), said
        assert await moved(dd, peer, link) == {"ordinary": "tcp", "library": "tcp"}


# --- limits ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@pytest.mark.unprivileged
@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)])
async def test_no_memory_may_be_locked(transports: tuple[str, ...]) -> None:
    """Neither transport locks any, so a small memlock is no obstacle. Root may lock as much as it likes."""
    config = adt.Config(transports=transports)
    with limited(resource.RLIMIT_MEMLOCK, 0):
        async with spawn(OWNER, transports=transports) as peer, adt.DataDist(USER, config=config) as dd:
            await peer.run("import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))")
            await offer(peer)
            link = await dd.link(peer.info)
            paths = await moved(dd, peer, link)
            assert set(paths.values()) == ({"tcp"} if transports == ("tcp",) else {"shm-mapped", "shm-process_vm"})


async def test_m3_no_descriptor_for_library_memory_says_which_limit() -> None:
    async with adt.DataDist(USER) as dd:
        with limited(resource.RLIMIT_NOFILE, 0), pytest.raises(adt.OutOfMemoryError) as raised:
            dd.cache_manager.allocate_blocks_cache(adt.CacheDesc(2, (BLOCKS, BLOCK_BYTES), "uint8"))
        said = str(raised.value)
        assert f"{2 * BLOCKS * BLOCK_BYTES} bytes" in said
        assert "Too many open files" in said
        assert "number of open files" in said
        assert not dd.cache_manager.caches


async def test_m3_no_address_space_for_library_memory_says_so() -> None:
    """More than the machine's addresses hold, so that no limit is needed."""
    desc = adt.CacheDesc(8, (1 << 34, BLOCK_BYTES), "uint8")
    async with adt.DataDist(USER) as dd:
        with pytest.raises(adt.OutOfMemoryError, match=f"{desc.num_tensors << 46} bytes") as raised:
            dd.cache_manager.allocate_blocks_cache(desc)
        assert raised.value.status is adt.Status.OUT_OF_MEMORY
        assert "memory limits" in str(raised.value)
        assert not dd.cache_manager.caches


NO_THREADS = """
import resource
before = resource.getrlimit(resource.RLIMIT_NPROC)
resource.setrlimit(resource.RLIMIT_NPROC, (0, before[1]))
said = []
cache = dd.cache_manager.register_blocks_cache([np.zeros((4, 64), np.uint8)], key=adt.BlocksCacheKey(1))
try:
    await cache.ready()
except adt.DataDistError as error:
    said.append([type(error).__name__, str(error)])
await dd.aclose()
other = adt.DataDist(3, listen="127.0.0.1:0")
try:
    await other.open()
except adt.DataDistError as error:
    said.append([type(error).__name__, str(error)])
await other.aclose()
resource.setrlimit(resource.RLIMIT_NPROC, before)
async with adt.DataDist(4) as third:
    await third.cache_manager.register_blocks_cache([np.zeros((4, 64), np.uint8)], key=adt.BlocksCacheKey(4)).ready()
return said
"""


@pytest.mark.unprivileged
async def test_m3_no_thread_to_be_had_is_typed() -> None:
    async with spawn(OWNER) as peer:
        (registering, said), (opening, says) = await peer.run(NO_THREADS)
    assert registering == "RegistrationError"
    assert "can't start new thread" in said
    assert "threads (-u)" in said
    assert opening == "OutOfMemoryError"
    assert "ulimit -u" in says


# --- registration that fails -----------------------------------------------------------------------------


class Refusing:
    """A native node that takes no memory."""

    def __init__(self, node: _core.Node, error: Exception) -> None:
        self._node = node
        self._error = error

    def register_cache(self, *arguments: Any, **more: Any) -> None:
        raise self._error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


FAULTS = [
    error_from_native(NativeStatus.NO_MEMORY, detail="registering memory: Cannot allocate memory"),
    error_from_native(NativeStatus.IO, detail="registering memory: Bad address"),
    MemoryError("no memory"),
    OSError(12, "Cannot allocate memory"),
]


@pytest.fixture(params=FAULTS, ids=lambda fault: type(fault).__name__)
def fault(request: pytest.FixtureRequest) -> Iterator[Exception]:
    error: Exception = request.param
    yield error
    error.__traceback__ = None  # its frames hold the node


@contextlib.contextmanager
def refused(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(adt.DataDist, "_node", property(lambda dd: Refusing(dd._center.node, fault)))
        yield


@pytest.mark.parametrize("memory", ["ordinary", "library"])
async def test_m3_a_refused_registration_names_count_bytes_and_limit(
    memory: str, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with adt.DataDist(OWNER) as dd:
        others = [dd.cache_manager.register_blocks_cache(pattern(i, (4, 64))) for i in range(3)]
        for other in others:
            await other.ready()
        with refused(monkeypatch, fault):
            if memory == "ordinary":
                cache = dd.cache_manager.register_blocks_cache(pattern(9, (BLOCKS, 64), tensors=5), key=KEY)
            else:
                cache = dd.cache_manager.allocate_blocks_cache(adt.CacheDesc(5, (BLOCKS, 64), "uint8"), key=KEY)
            with pytest.raises(adt.RegistrationError) as raised:
                await cache.ready()
        said = str(raised.value)
        for words in ("5 tensors", f"{5 * BLOCKS * 64} bytes", "3 others", str(fault), "ulimit", "open files (-n)"):
            assert words in said, said
        assert raised.value.__cause__ is fault
        # Nothing is left of it: the key is free, and the next one works.
        assert set(dd.cache_manager.caches.values()) == set(others)
        await dd.cache_manager.register_blocks_cache(pattern(9, (4, 64)), key=KEY).ready()


@pytest.mark.loop
async def test_m6_a_failed_registration_always_raises(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To whoever waits, in every transfer on the cache, and in the log: at times only peers would have waited."""
    async with linked("tcp") as pair:
        await pair.offer(pattern(1, (4, 64)))
        with refused(monkeypatch, fault), caplog.at_level(logging.ERROR, "aiodatadist"):
            mine = pair.user.cache_manager.register_blocks_cache(pattern(2, (4, 64)))
            early = pair.user.cache_manager.pull_blocks(KEY, mine, [0], [1], timeout=None)
            for _ in range(2):  # as often as asked
                with pytest.raises(adt.RegistrationError):
                    await mine.ready()
            with pytest.raises(adt.RegistrationError):
                await early
        with pytest.raises(adt.RegistrationError) as late:
            _ = pair.user.cache_manager.pull_blocks(KEY, mine, [0], [1], timeout=None)
        assert late.value.__cause__ is fault
        assert "cannot be registered" in caplog.text
        assert pair.user.dump() == []
