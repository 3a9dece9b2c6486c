"""What only verbs has: limits of devices, pinned memory and its limit, fork, processes of users without rights.

The suites that go over every transport do so over verbs, too; what needs devices that may be taken down is in
`test_verbs_machine`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import aiodatadist as adt
from aiodatadist import _core

from .pairs import OWNER, USER, linked, pattern
from .peers import PeerProcess, checksums, spawn

KEY = adt.BlocksCacheKey(OWNER)
NOBODY = 65534
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

pytestmark = [pytest.mark.verbs, pytest.mark.hang_limit(300)]


async def test_m1_a_device_with_small_limits() -> None:
    """Registrations, messages and lists are split, and the queue is short."""
    _core.limit_rdma(registration_bytes=64 * 1024, message_bytes=3000, sge=2, requests=4)
    try:
        async with linked("verbs", user={"transfer_timeout": None}) as pair:
            theirs, mine = pattern(1, (40, 10000)), pattern(2, (40, 10000))
            await pair.offer(theirs)
            target = await pair.take(mine)
            assert pair.user.stats()["rdma"]["registrations"] >= 4 * (400_000 // 65536)
            await pair.user.cache_manager.pull_blocks(KEY, target, range(39, -1, -1), range(40))
            assert all((a[::-1] == b).all() for a, b in zip(theirs, mine, strict=True))
            await pair.user.cache_manager.push_blocks(KEY, target, range(40), range(40))
            assert all((a == b).all() for a, b in zip(theirs, mine, strict=True))
    finally:
        _core.limit_rdma()


async def test_a_whole_cache_is_right_as_often_as_it_is_pulled() -> None:
    """Between two processes, with other bytes each time."""
    shape, blocks = (64, 16384), range(64)
    async with (
        spawn(OWNER, transports=("verbs",)) as peer,
        adt.DataDist(USER, config=adt.Config(transports=("verbs",), transfer_timeout=None)) as dd,
    ):
        await peer.cache("kv", tensors=4, shape=shape, model_id=0)
        await dd.link(peer.info, timeout=60.0)
        mine = pattern(2, shape, tensors=4)
        target = dd.cache_manager.register_blocks_cache(mine, remote=None)
        for turn in range(5):
            await peer.call("fill_random", name="kv", seed=turn)
            await dd.cache_manager.pull_blocks(KEY, target, blocks, blocks)
            assert checksums(target) == await peer.call("checksums", name="kv"), f"turn {turn}"
            for tensor in mine:
                tensor ^= 0xFF
            await dd.cache_manager.push_blocks(KEY, target, blocks, blocks)
            assert checksums(target) == await peer.call("checksums", name="kv"), f"pushed, turn {turn}"


async def test_pinned_memory_stays_the_parents_after_a_fork() -> None:
    """The device writes to the pages that the parent sees, whoever of the two has written to them first."""
    async with linked("verbs", user={"transfer_timeout": None}) as pair:
        theirs, mine = pattern(1, (64, 4096)), pattern(2, (64, 4096))
        await pair.offer(theirs)
        target = await pair.take(mine)
        await pair.user.cache_manager.pull_blocks(KEY, target, range(64), range(64))
        for turn in range(3):
            begun, begin = os.pipe()
            go, told = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                if turn == 0:
                    os.read(go, 1)  # the parent writes first
                for tensor in (*theirs, *mine):
                    tensor[:] = 0xEE
                os.write(begin, b"x")
                os.read(go, 1)
                os._exit(0)
            if turn:
                os.read(begun, 1)
            for tensor in theirs:
                tensor[:] = turn
            await pair.user.cache_manager.pull_blocks(KEY, target, range(64), range(64))
            assert all((tensor == turn).all() for tensor in mine)
            os.write(told, b"xx")
            assert os.waitpid(pid, 0)[1] == 0
            for fd in (begun, begin, go, told):
                os.close(fd)
            for tensor in mine:
                tensor[:] = 100 + turn
            await pair.user.cache_manager.push_blocks(KEY, target, range(64), range(64))
            assert all((tensor == 100 + turn).all() for tensor in theirs)


# Processes without rights. ------------------------------------------------------------------------------------

# Then it may look into others as a program may that this user has started.
BECOME = """
import os, ctypes
os.setgroups([])
os.setresgid(*[user] * 3)
os.setresuid(*[user] * 3)
return ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
"""
TRANSPORTS = ("verbs",)


@contextlib.asynccontextmanager
async def unprivileged(cluster_id: int) -> AsyncIterator[PeerProcess]:
    """Have a process of a user who may do nothing special, and has opened its devices as that user."""
    async with spawn(cluster_id, transports=("tcp",)) as peer:
        await peer.call("aclose")
        if os.geteuid() == 0:
            assert await peer.run(BECOME, user=NOBODY) == 0
        config = {"transports": TRANSPORTS}
        peer.address = await peer.call("open", cluster_id=cluster_id, role="mix", listen="127.0.0.1:0", config=config)
        yield peer


LOCK = """
import resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
said = []
for blocks in (64, 1):
    cache = dd.cache_manager.register_blocks_cache([np.zeros((blocks, 65536), np.uint8)])
    try:
        await cache.ready()
        said.append("ready")
    except adt.RegistrationError as error:
        said.append(str(error))
return said
"""


async def test_m3_a_registration_beyond_memlock_names_it() -> None:
    """And leaves nothing pinned: what is within the limit can be registered afterwards."""
    async with unprivileged(OWNER) as peer:
        large, small = await peer.run(LOCK, limit=1 << 20)
    assert "RLIMIT_MEMLOCK is 1048576 bytes" in large.replace(",", "")
    assert "ulimit -l unlimited" in large
    assert f"{64 * 65536}" in large.replace(",", "")
    assert small == "ready"


@pytest.fixture
def restricted() -> Iterator[None]:
    """Have Yama allow a process to reach into its children alone."""
    if not YAMA.exists():
        assert not os.environ.get("IN_TEST_VM")
        pytest.skip("this kernel has no Yama")
    before = YAMA.read_text().strip()
    if before != "1":
        if not os.environ.get("IN_TEST_VM"):
            pytest.skip(f"kernel.yama.ptrace_scope is {before}; tests/vm/run.sh sets it")
        YAMA.write_text("1")
    yield
    if before != "1":
        YAMA.write_text(before)


LOOK = "from aiodatadist import _core; return _core.readable(pid, address, 4)"
MOVE = """
link = await dd.link(adt.ClusterInfo(owner, address), timeout=60.0)
cache = dd.cache_manager.register_blocks_cache([np.zeros((16, 4096), np.uint8) for _ in range(2)])
for model_id, value in ((0, 5), (1, 6)):
    key = adt.BlocksCacheKey(owner, model_id=model_id)
    while key not in link.table:
        await asyncio.sleep(0.002)
    await dd.cache_manager.pull_blocks(key, cache, range(16), range(16))
    assert all((tensor == value).all() for tensor in cache.tensors)
    for tensor in cache.tensors:
        tensor[:] = value + 10
    await dd.cache_manager.push_blocks(key, cache, range(16), range(16))
return link.path.transport
"""


@pytest.mark.usefixtures("restricted")
async def test_processes_that_may_not_reach_into_each_other() -> None:
    """Under ptrace_scope 1, as a user without rights: library memory and ordinary memory, both ways."""
    async with unprivileged(OWNER) as owner, unprivileged(USER) as user:
        word = await owner.run("kept['word'] = np.zeros(4, np.uint8); return int(kept['word'].ctypes.data)")
        assert await owner.run(LOOK, pid=owner.pid, address=word) == 0
        assert await user.run(LOOK, pid=owner.pid, address=word) == errno.EPERM
        for name, memory, model_id, value in (("ordinary", "ordinary", 0, 5), ("library", "library", 1, 6)):
            await owner.cache(name, tensors=2, shape=(16, 4096), memory=memory, model_id=model_id, value=value)
        assert await user.run(MOVE, owner=OWNER, address=owner.address) == "verbs"
        for name, value in (("ordinary", 15), ("library", 16)):
            assert await owner.call("count", name=name, value=value) == 2 * 16 * 4096
