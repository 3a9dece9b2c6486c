"""Memory of an NPU in every kind of transfer, over a STAND-IN for HIXL whose device memory a processor cannot touch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt

from .hixl_standin import Acl, Controls
from .pairs import OWNER, USER, Pair, linked, pattern
from .test_buffers import Npu

pytestmark = [pytest.mark.hixl, pytest.mark.usefixtures("hixl")]

ROOT = Path(__file__).parent.parent
SHAPE = (8, 4096)
KEY = adt.BlocksCacheKey(OWNER)


class Device:
    """Device memory that is given back after the test."""

    def __init__(self) -> None:
        self.acl = Acl()
        self.acl.set_device()
        self.taken: list[int] = []

    def tensors(self, content: list[np.ndarray[Any, Any]]) -> list[int]:
        """Return addresses of tensors with this content."""
        addresses = []
        for tensor in content:
            addresses.append(self.acl.malloc(tensor.nbytes))
            self.acl.write(addresses[-1], tensor.tobytes())
        self.taken += addresses
        return addresses

    def read(self, addresses: list[int]) -> list[np.ndarray[Any, Any]]:
        nbytes = SHAPE[0] * SHAPE[1]
        return [np.frombuffer(self.acl.read(address, nbytes), np.uint8).reshape(SHAPE) for address in addresses]


@pytest.fixture
def device(hixl: Controls) -> Iterator[Device]:
    made = Device()
    yield made
    for address in made.taken:
        made.acl.free(address)


def described(tensors: int = 2) -> adt.CacheDesc:
    return adt.CacheDesc(tensors, SHAPE, "uint8", placement=adt.Placement.DEVICE)


async def on(pair: Pair, device: Device, where: str, content: list[Any], *, owner: bool) -> tuple[adt.Cache, Any]:
    """Register tensors of the NPU or of the host; return the cache and how to read it."""
    if where == "npu":
        addresses = device.tensors(content)
        x, options = addresses, {"desc": described()}
    else:
        x, options = content, {}
    cache = await (pair.offer(x, **options) if owner else pair.take(x, **options))
    return cache, (lambda: device.read(addresses)) if where == "npu" else (lambda: content)


WAYS = pytest.mark.parametrize(("here", "there"), [("npu", "npu"), ("npu", "host"), ("host", "npu"), ("host", "host")])


@WAYS
@pytest.mark.parametrize("transports", [("hixl", "shm", "tcp"), ("shm", "tcp", "hixl"), ("hixl",)])
async def test_pull_and_push(
    here: str, there: str, transports: tuple[str, ...], device: Device, hixl: Controls
) -> None:
    async with linked(*transports) as pair:
        theirs, mine = pattern(1, SHAPE), pattern(2, SHAPE)
        _, read_theirs = await on(pair, device, there, [one.copy() for one in theirs], owner=True)
        cache, read_mine = await on(pair, device, here, [one.copy() for one in mine], owner=False)
        assert pair.link.path.memory["device"] == "hixl"
        before = hixl.count("requests")
        await pair.user.cache_manager.pull_blocks(KEY, cache, [1, 5, 6], [7, 0, 1])
        for got, old, sent in zip(read_mine(), mine, theirs, strict=True):
            assert (got[[7, 0, 1]] == sent[[1, 5, 6]]).all()
            assert (got[2:7] == old[2:7]).all()
        await pair.user.cache_manager.push_blocks(KEY, cache, [2, 3], [0, 4])
        for got, old, sent in zip(read_theirs(), theirs, mine, strict=True):
            assert (got[[0, 4]] == sent[[2, 3]]).all()
            assert (got[[1, 2, 3, 5, 6, 7]] == old[[1, 2, 3, 5, 6, 7]]).all()
        over_hixl = "npu" in (here, there) or transports[0] == "hixl"
        assert (hixl.count("requests") > before) == over_hixl


async def test_batch_slots_and_layers(device: Device) -> None:
    async with linked("shm", "hixl") as pair:
        theirs, mine = pattern(1, SHAPE, tensors=4), pattern(2, SHAPE, tensors=4)
        far, near = device.tensors(theirs), device.tensors(mine)
        await pair.offer(far, desc=described(4))
        cache = await pair.take(near, desc=described(4))
        caches = pair.user.cache_manager
        await caches.pull_blocks(KEY, cache, [3], [2], src_layer_range=range(1, 2), dst_layer_range=range(1))
        assert (device.read(near)[0][2] == theirs[2][3]).all()
        gate = adt.LayerGate(2)
        target = adt.TransferWithCacheKeyConfig(KEY, range(2), range(2))
        task = caches.transfer_cache_async(cache, gate, [target], [0, 1], [6, 7])
        by_address = adt.TransferConfig(OWNER, [address + 5 * SHAPE[1] for address in far])
        other = caches.transfer_cache_async(cache, gate, [by_address], [4], [0])
        for layer in (1, 0):
            gate.record(layer)
        assert [result.error for result in [*await task, *await other]] == [None, None]
        sent = device.read(near)
        for tensor, got in enumerate(device.read(far)):
            assert (got[6:] == sent[tensor][:2]).all()
            assert (got[5] == sent[tensor][4]).all()


async def test_tensors_of_torch_npu(device: Device) -> None:
    """Objects that say of themselves what such tensors say: nothing but their addresses is used."""
    async with linked("hixl") as pair:
        theirs = pattern(1, (4, 3), np.float16, tensors=1)
        (far,), (near,) = device.tensors(theirs), device.tensors(pattern(2, (4, 3), np.float16, tensors=1))
        await pair.offer([Npu(far)])
        cache = await pair.take([Npu(near)])
        assert repr(cache) == f"<Cache {cache.id}: ready, 1 x (4, 3) float16 on an NPU>"
        await pair.user.cache_manager.pull_blocks(KEY, cache, [0, 1, 2, 3], [0, 1, 2, 3])
        assert device.acl.read(near, 24) == theirs[0].tobytes()
        with pytest.raises(adt.ArgumentError, match=r"on NPU 1, and this DataDist uses NPU 0") as caught:
            pair.user.cache_manager.register_blocks_cache([Npu(number=1)])
        assert "device_id=1" in str(caught.value)


async def test_nothing_copies_it_within_a_node(device: Device) -> None:
    async with linked("shm", "hixl") as pair:
        caches = pair.user.cache_manager
        first = await pair.take(device.tensors(pattern(1, SHAPE)), desc=described())
        second = await pair.take(pattern(2, SHAPE))
        for start in (
            lambda: caches.copy_blocks(first, {0: [1]}),
            lambda: caches.copy_cache(second, first),
            lambda: caches.copy_cache(first, second),
            lambda: caches.swap_blocks(first, second, {0: 1}),
            lambda: caches.swap_blocks(second, first, {0: 1}),
        ):
            with pytest.raises(adt.TransportUnavailable, match=f"cache {first.id} is memory of an NPU") as caught:
                start()
            assert "torch" in str(caught.value)
        await caches.copy_blocks(second, {0: [1]})


async def test_a_peer_without_hixl(device: Device) -> None:
    here, there = adt.Config(transports=("hixl", "tcp")), adt.Config(transports=("tcp",))
    async with (
        adt.DataDist(OWNER, listen="127.0.0.1:0", config=there) as owner,
        adt.DataDist(USER, config=here) as user,
    ):
        owner.cache_manager.register_blocks_cache(pattern(1, SHAPE), key=KEY)
        link = await user.link(adt.ClusterInfo(OWNER, str(owner.listen_address)))
        assert (link.path.transport, link.path.memory["device"]) == ("tcp", "none")
        cache = user.cache_manager.register_blocks_cache(
            device.tensors(pattern(2, SHAPE)), desc=described(), key=adt.BlocksCacheKey(USER)
        )
        host = user.cache_manager.register_blocks_cache(pattern(3, SHAPE))
        await user.cache_manager.pull_blocks(KEY, host, [0], [0], wait=True)
        for start in (user.cache_manager.pull_blocks, user.cache_manager.push_blocks):
            with pytest.raises(adt.TransportUnavailable, match="only hixl reaches") as caught:
                await start(KEY, cache, [0], [0])
            assert caught.value.peer == OWNER
            assert "the peer does not list it as usable" in caught.value.reason
        # And the other way round: the owner's host memory, and a device's of the peer.
        mine = owner.cache_manager.register_blocks_cache(pattern(4, SHAPE))
        with pytest.raises(adt.TransportUnavailable, match="no transport reaches cache"):
            await owner.cache_manager.pull_blocks(adt.BlocksCacheKey(USER), mine, [0], [0], wait=True)


async def test_registered_late_and_taken_back_while_linked(device: Device) -> None:
    async with linked("hixl", "tcp") as pair:
        theirs = pattern(1, SHAPE)
        mine = device.tensors(pattern(2, SHAPE))
        cache = await pair.take(mine, desc=described())
        for _ in range(3):
            offered = await pair.offer(device.tensors(theirs), desc=described())
            await pair.user.cache_manager.pull_blocks(KEY, cache, [3], [3])
            assert (device.read(mine)[1][3] == theirs[1][3]).all()
            await pair.owner.cache_manager.unregister_cache(offered)
        with pytest.raises(adt.CacheNotFound):
            await pair.user.cache_manager.pull_blocks(KEY, cache, [0], [0])


async def test_an_event_of_the_device_is_a_layer(device: Device) -> None:
    class Event:
        passed = False

        def query(self) -> bool:
            return self.passed

        def synchronize(self) -> None:
            raise AssertionError

    async with linked("hixl", "tcp") as pair:
        far = device.tensors(pattern(1, SHAPE))
        mine = pattern(2, SHAPE)
        await pair.offer(far, desc=described())
        cache = await pair.take(device.tensors(mine), desc=described())
        event = Event()
        target = adt.TransferWithCacheKeyConfig(KEY, range(1), range(1))
        task = pair.user.cache_manager.transfer_cache_async(cache, [event], [target], [0], [0])
        await asyncio.sleep(0.02)
        assert not task.done()
        event.passed = True
        (result,) = await task
        assert result.error is None
        assert (device.read(far)[0][0] == mine[0][0]).all()


# The drop-in. ---------------------------------------------------------------------------------------------------


def drop_in(address: tuple[str, int], device: Device, backend: str, mine: list[int], host: list[Any]) -> list[str]:
    """Do what a script for Ascend does, in another thread; return what it was refused."""
    from aiodatadist import llm_datadist as llm

    config = llm.LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.rdma_traffic_class = 128
    config.global_resource_config = '{"connect_pool.thread_num": "2"}'
    if backend == "hixl":
        config.transfer_backend = "hixl"
        config.listen_ip_info = "127.0.0.1:0"
    node = llm.LLMDataDist(llm.LLMRole.DECODER, USER)
    node.init(config.generate_options())
    refused: list[str] = []
    try:
        manager = node.cache_manager
        desc = llm.CacheDesc(2, SHAPE, llm.DataType.DT_UINT8, llm.Placement.DEVICE)
        cache = manager.register_blocks_cache(desc, mine, llm.BlocksCacheKey(USER))
        on_host = llm.CacheDesc(2, SHAPE, llm.DataType.DT_UINT8, llm.Placement.HOST)
        addresses = [tensor.ctypes.data for tensor in host]
        beside = manager.register_blocks_cache(on_host, addresses, None, True)
        peer = llm.LLMClusterInfo()
        peer.remote_cluster_id = OWNER
        peer.append_local_ip_info("127.0.0.1", 0)
        peer.append_remote_ip_info(*address)
        status, each = node.link_clusters([peer], 10_000)
        assert status == llm.LLMStatusCode.LLM_SUCCESS, each
        manager.pull_blocks(llm.BlocksCacheKey(OWNER), cache, [1, 5], [7, 0])
        manager.push_blocks(llm.BlocksCacheKey(OWNER), cache, [3], [2])
        manager.pull_blocks(llm.BlocksCacheKey(OWNER), beside, [6], [6])
        for call in (
            lambda: manager.copy_blocks(cache, {0: [1]}),
            lambda: manager.swap_blocks(cache, beside, {0: 1}),
            lambda: manager.swap_blocks(beside, cache, {0: 1}),
        ):
            with pytest.raises(llm.LLMException) as caught:
                call()
            assert caught.value.status_code == llm.LLMStatusCode.LLM_FEATURE_NOT_ENABLED
            refused.append(str(caught.value))
        node.unlink_clusters([peer], 10_000)
        for one in (cache, beside):
            manager.unregister_cache(one.cache_id)
    finally:
        node.finalize()
    return refused


@pytest.mark.parametrize("backend", ["default", "hixl"])
async def test_the_drop_in_moves_it_with_either_backend(backend: str, device: Device, hixl: Controls) -> None:
    theirs, mine, host = pattern(1, SHAPE), pattern(2, SHAPE), pattern(3, SHAPE)
    far, near = device.tensors(theirs), device.tensors(mine)
    config = adt.Config(transports=("shm", "tcp", "hixl"))
    async with adt.DataDist(OWNER, listen="127.0.0.1:0", config=config) as owner:
        await owner.cache_manager.register_blocks_cache(far, desc=described(), key=KEY).ready()
        assert owner.listen_address is not None
        address = ("127.0.0.1", owner.listen_address.port)
        refused = await asyncio.to_thread(drop_in, address, device, backend, near, host)
    for got, old, sent in zip(device.read(near), mine, theirs, strict=True):
        assert (got[[7, 0]] == sent[[1, 5]]).all()
        assert (got[1:7] == old[1:7]).all()
    for got, sent in zip(device.read(far), mine, strict=True):
        assert (got[2] == sent[3]).all()
    for got, sent in zip(host, theirs, strict=True):
        assert (got[6] == sent[6]).all()
    assert len(refused) == 3


def test_the_drop_in_has_no_pool_of_it(hixl: Controls) -> None:
    from aiodatadist import llm_datadist as llm

    config = llm.LLMConfig()
    config.enable_cache_manager = True
    config.mem_pool_cfg = '{"memory_size": 1048576}'
    node = llm.LLMDataDist(llm.LLMRole.DECODER, USER)
    with pytest.raises(llm.LLMException, match="allocates host memory only") as caught:
        node.init(config.generate_options())
    assert caught.value.status_code == llm.LLMStatusCode.LLM_FEATURE_NOT_ENABLED


@pytest.mark.parametrize("options", [{"global_resource_config": '{"what": 1}'}, {"local_comm_res": '{"version": "9"}'}])
def test_the_drop_in_refuses_what_hixl_would(options: dict[str, str], hixl: Controls) -> None:
    from aiodatadist import llm_datadist as llm

    config = llm.LLMConfig()
    config.enable_cache_manager = True
    for name, value in options.items():
        setattr(config, name, value)
    node = llm.LLMDataDist(llm.LLMRole.DECODER, USER)
    with pytest.raises(llm.LLMException, match="hixl_options") as caught:
        node.init(config.generate_options())
    assert caught.value.status_code == llm.LLMStatusCode.LLM_PARAM_INVALID
