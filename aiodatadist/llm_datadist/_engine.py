"""The node behind `LLMDataDist`: a `DataDist` in a loop of its own, and what the interface knows of its caches."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import time
import warnings
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from .. import (
    NO_ID,
    ArgumentError,
    BlockIndexError,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheManager,
    CacheNotFound,
    ClosedError,
    ClusterInfo,
    Config,
    DataDist,
    DataDistError,
    EventStream,
    HandshakeError,
    LinkError,
    LinkTimeout,
    MemoryPool,
    NotLinkedError,
    Placement,
    RegistrationError,
    Role,
    Transfer,
    TransferTask,
    TransportUnavailable,
    UsageError,
)
from .._cann import find_libraries
from . import host_npu
from ._counted import CountedLinks
from ._portal import Portal
from .communicators import Communicators
from .configs import LLMRole, ip_text
from .data_type import ITEM_BYTES, NATIVE_NAMES, DataType
from .rank_table import Member, check_local_comm_res
from .status import LLMException, LLMStatusCode, code_2_status, llm_error
from .utils import log
from .v2.config import EngineConfig, Pool
from .v2.llm_types import RegisterMemStatus

__all__ = ["Engine", "Key", "Peer", "Tensors"]

Key: TypeAlias = BlocksCacheKey | CacheKeyByIdAndIndex | CacheKey
T = TypeVar("T")

# A peer registers, tells its own user, and only then does the news arrive here: so long a missing cache may be late.
_ANNOUNCEMENT_SECONDS: Final = 0.25
_PROBE_SECONDS: Final = 1.0
_QUIET_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 10.0
# Where the driver shows NPUs.
_DEV: Final = Path("/dev")
# The kernel maps nothing below it (vm.mmap_min_addr).
_FIRST_PAGE: Final = 65536


class _Device(enum.Enum):
    """What Placement.DEVICE means."""

    NPU = "memory of an NPU, which moves over hixl whatever llm.TransferBackend says, or not at all"
    HOST = "host memory"


@cache
def _warn_of_host_memory() -> None:
    """Say it once a process."""
    warnings.warn(
        "Placement.DEVICE means host memory here: HIXL, which moves an NPU's, cannot be used",
        UserWarning,
        stacklevel=5,
    )


class Tensors(NamedTuple):
    """What a cache consists of."""

    num_tensors: int
    shape: Sequence[int]
    data_type: DataType

    def as_bytes(self) -> Tensors:
        """Return the same with bytes for elements: what counts where only addresses do."""
        nbytes = math.prod(self.shape[1:]) * ITEM_BYTES[self.data_type]
        return Tensors(self.num_tensors, (self.shape[0], nbytes), DataType.DT_UINT8)

    def described(self, placement: Placement = Placement.HOST) -> CacheDesc:
        """Return the description that aiodatadist takes."""
        pair = (2,) if self.data_type is DataType.DT_STRING else ()
        return CacheDesc(self.num_tensors, (*self.shape, *pair), NATIVE_NAMES[self.data_type], placement=placement)


class Peer(NamedTuple):
    """A peer to link or unlink; addresses are pairs of an IPv4 number and a port."""

    cluster_id: int
    local: Sequence[tuple[int, int]]
    remote: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class _Held:
    """A cache of this node.

    Attributes
    ----------
    cache : Cache
    reachable : bool
        Whether it was registered for peers.
    allocated : bool
        Whether its memory is a pool's.
    missing : DataDistError or None
        Why its addresses are no memory of this process: it has an id, and nothing can be moved.
    """

    cache: Cache
    reachable: bool
    allocated: bool = False
    missing: DataDistError | None = None


class Engine:
    """One node, from `LLMDataDist.init` to `LLMDataDist.finalize`.

    Its methods may be called by any thread. Each blocks the thread that calls it, and no other.

    Parameters
    ----------
    config : EngineConfig

    Raises
    ------
    LLMException
        It cannot be opened.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._held: dict[int, _Held] = {}
        self._leaving: dict[int, Cache] = {}  # unregistered, and perhaps not quiet yet
        self._moving: dict[int, set[Transfer[None]]] = {}  # by peer; touched by the loop's thread only
        self._layerwise: set[asyncio.Task[None]] = set()  # likewise
        self._pools: dict[bool, MemoryPool] = {}  # by whether it is the device's
        self._config: Config
        self._host_config: Config  # without hixl
        self._dd: DataDist
        self._communicators: Communicators
        self._aside: DataDist | None = None
        self._opening_aside = asyncio.Lock()
        self._counted: CountedLinks | None = None  # with the backend hixl
        self._device = _Device.HOST
        self._linked_at: dict[int, tuple[int, str]] = {}  # epoch of a peer's last link that was made here, and where
        self._linked_to_self = False  # of which the node's links say nothing
        self._portal = Portal()
        try:
            self.run("init", self._open)
        except BaseException:
            self._portal.close()
            raise

    async def _open(self) -> None:
        config = self.config
        self._config = Config.from_env(None, transfer_timeout=config.transfer_seconds, **dict(config.rdma))
        self._host_config = replace(
            self._config, transports=tuple(name for name in self._config.transports if name != "hixl") or ("shm",)
        )
        if not host_npu.installed() and find_libraries(self._config.hixl_library).found:
            # Last, unless the user has put it elsewhere: it is the only one for memory of an NPU wherever it stands.
            self._config = replace(
                self._config,
                transports=tuple(dict.fromkeys((*self._config.transports, "hixl"))),
                device_id=config.device_id if config.device_id is not None else self._config.device_id,
                hixl_options={**self._config.hixl_options, **dict(config.hixl_options)},
            )
        dd = await DataDist(config.cluster_id, Role(config.role), listen=config.listen, config=self._config).open()
        try:
            self._device = _device_of(dd)
            for is_device, pool in ((True, config.device_pool), (False, config.host_pool)):
                if pool is not None:
                    if is_device and self._device is not _Device.HOST:
                        raise TransportUnavailable(
                            "llm.MemPoolConfig wants a pool of NPU memory, and this library allocates host memory only",
                            transport="hixl",
                            hint="allocate tensors with torch_npu, and register them",
                        )
                    self._pools[is_device] = _pool_of(dd.cache_manager, pool)
        except BaseException:
            dd.abort()
            await dd.wait_closed()
            raise
        self._dd = dd
        self._communicators = Communicators(dd, config.link_total_seconds)
        if config.hixl:
            self._counted = CountedLinks(dd)

    def finalize(self) -> None:
        """Close the node: calls that wait end, links end, and the memory of all caches is the caller's again.

        Raises
        ------
        LLMException
            A peer may still touch the memory of the caches that the message names.
        """
        try:
            self._portal.close(self._close)
        except DataDistError as why:
            raise llm_error("finalize", why) from why
        finally:
            self._held.clear()
            self._leaving.clear()
            self._pools.clear()

    async def _close(self) -> None:
        await self._communicators.close()
        for task in self._layerwise:
            task.cancel()  # the layers may never come
        if self._counted is not None:
            await self._counted.close()
        if self._aside is not None:
            await self._aside.aclose(_CLOSE_SECONDS)
        await self._dd.aclose(_CLOSE_SECONDS)

    # Calls. -------------------------------------------------------------------------------------------------

    def run(self, call: str, start: Callable[[], Awaitable[T]]) -> T:
        """Start something in the loop, wait for its end, and raise its errors as the interface does."""
        try:
            return self._portal.run(start)
        except DataDistError as why:
            raise llm_error(call, why) from why

    @property
    def node(self) -> DataDist:
        """The node; to be used in the loop's thread, by what is given to `run`."""
        return self._dd

    # Caches. ------------------------------------------------------------------------------------------------

    def register(
        self,
        tensors: Tensors,
        addresses: Sequence[int],
        *,
        device: bool,
        reachable: bool,
        offered: bool,
        key: BlocksCacheKey | None = None,
        keys: Sequence[CacheKey] = (),
    ) -> int:
        """Register memory, and return the id of the cache.

        Parameters
        ----------
        tensors : Tensors
        addresses : sequence of int
            The memory stays the caller's to keep.
        device : bool
            Whether the memory is described as a device's.
        reachable : bool
            Whether it counts as registered for peers.
        offered : bool
            Whether peers can reach it.
        key, keys
            How peers find the cache, or its batch slots.

        Raises
        ------
        LLMException
            The description, an address or a key cannot be used.
        """
        placement = Placement.DEVICE if device and self._device is not _Device.HOST else Placement.HOST
        if device and placement is Placement.HOST:
            _warn_of_host_memory()
        held = self.run(
            "register_cache",
            partial(self._register, tensors, placement, list(addresses), reachable, offered, key, keys),
        )
        if held.missing is not None:
            warnings.warn(
                f"cache {held.cache.id} is no memory of this process, and nothing can be moved from or to it: "
                f"{held.missing}",
                RuntimeWarning,
                stacklevel=4,
            )
        return held.cache.id

    async def _register(
        self,
        tensors: Tensors,
        placement: Placement,
        addresses: list[int],
        reachable: bool,
        offered: bool,
        key: BlocksCacheKey | None,
        keys: Sequence[CacheKey],
    ) -> _Held:
        caches, desc = self._dd.cache_manager, tensors.described(placement)
        if len(addresses) != desc.num_tensors:
            raise ArgumentError(f"{len(addresses)} addresses for {desc.num_tensors} tensors")
        if reachable and 0 in addresses:
            raise ArgumentError("an address is 0, and peers cannot reach that")
        missing: DataDistError | None = None
        try:
            if min(addresses) < _FIRST_PAGE:
                raise RegistrationError(f"address {min(addresses):#x} is no memory")
            if not offered:
                cache = caches.register_cache(addresses, desc=desc, remote=None)
            elif key is not None:
                cache = caches.register_blocks_cache(addresses, desc=desc, key=key)
            else:
                cache = caches.register_cache(addresses, desc=desc, keys=keys)
        except RegistrationError as why:
            # Code that only counts caches registers numbers that are no memory; they get an id that moves nothing.
            missing = why
            cache = caches.register_blocks_cache([np.zeros((1, 1), np.uint8)], remote=None)
        await self._until_ready(cache)
        held = self._held[cache.id] = _Held(cache, reachable, missing=missing)
        return held

    async def _until_ready(self, cache: Cache) -> None:
        """Wait until a cache is registered; one that its caller never hears of is taken back."""
        try:
            await cache.ready()
        except BaseException:
            await self._dd.cache_manager.unregister_cache(cache, timeout=_QUIET_SECONDS)
            raise

    def unregister(self, cache_id: int) -> None:
        """Take a cache back, and wait until no peer can touch its memory. An unknown id is no error."""

        async def take_back() -> None:
            if (held := self._held.pop(cache_id, None)) is not None:
                self._leaving[cache_id] = held.cache
            # Whoever asks again, because this was interrupted or took too long, waits again.
            if (cache := self._leaving.get(cache_id)) is not None:
                await self._dd.cache_manager.unregister_cache(cache, timeout=_QUIET_SECONDS)
                self._leaving.pop(cache_id, None)

        self.run("unregister_cache", take_back)

    def has_pool(self, device: bool) -> bool:
        """Return whether there is a pool of device memory, or of host memory."""
        return device in self._pools

    @property
    def has_pools(self) -> bool:
        """Whether there is any pool."""
        return bool(self._pools)

    def check_capacity(self, nbytes: int) -> None:
        """Raise unless a pool has a gap of so many bytes."""
        if not any(pool.largest_gap >= nbytes for pool in self._pools.values()):
            raise LLMException(f"no pool has {nbytes} bytes", status_code=LLMStatusCode.LLM_OUT_OF_MEMORY)

    def allocate(
        self,
        tensors: Tensors,
        *,
        device: bool,
        key: BlocksCacheKey | None = None,
        keys: Sequence[CacheKey] | None = None,
    ) -> tuple[int, list[int]]:
        """Allocate a cache from a pool, and return its id and addresses.

        Raises
        ------
        LLMException
            The pool has no room, or the description or a key cannot be used.
        """
        if device:
            _warn_of_host_memory()

        async def take() -> tuple[int, list[int]]:
            caches, desc, pool = self._dd.cache_manager, tensors.described(), self._pools[device]
            if keys is None:
                cache = caches.allocate_blocks_cache(desc, key=key, pool=pool)
            else:
                cache = caches.allocate_cache(desc, keys=keys, pool=pool)
            addresses = [int(tensor.ctypes.data) for tensor in cache.tensors]
            await self._until_ready(cache)
            self._held[cache.id] = _Held(cache, reachable=True, allocated=True)
            return cache.id, addresses

        return self.run("allocate_cache", take)

    def deallocate(self, cache_id: int, *, at_once: bool) -> None:
        """Take an allocated cache back; another id is no error. Keys keep its memory, unless `at_once`."""

        async def give_back() -> None:
            held = self._held.get(cache_id)
            if held is None or not held.allocated:
                return
            del self._held[cache_id]
            caches = self._dd.cache_manager
            if at_once:
                await caches.unregister_cache(held.cache, timeout=_QUIET_SECONDS)
                return
            if held.cache.keys:
                _ = caches.deallocate_cache(held.cache)
            else:
                await caches.deallocate_cache(held.cache, timeout=_QUIET_SECONDS)

        self.run("deallocate_cache", give_back)

    def remove_key(self, key: CacheKey) -> None:
        """Take a key off its batch slot of an allocated cache; another key is no error."""

        async def remove() -> None:
            name = key if key.prefix_id == NO_ID else key._replace(req_id=NO_ID)
            caches = self._dd.cache_manager
            registered = any(name in held.cache.keys.values() for held in self._held.values() if not held.allocated)
            if not name.is_placeholder and not registered:
                caches.remove_cache_key(name)

        self.run("remove_cache_key", remove)

    # Transfers. ---------------------------------------------------------------------------------------------

    def transfer(
        self,
        call: str,
        cache_id: int,
        key: Key,
        start: Callable[[CacheManager, Cache], Transfer[None]],
        *,
        reading: bool,
    ) -> None:
        """Move something between a cache of this node and one of a peer, and wait for its end.

        Parameters
        ----------
        call : str
            For the message.
        cache_id : int
            The cache of this node.
        key : Key
            Of the peer's cache.
        start : callable
            Starts the transfer.
        reading : bool
            Whether it is a pull: a batch slot that the peer does not have counts as a missing cache then.

        Raises
        ------
        LLMException
            What is wrong with the call, or how it ended.
        """
        cache = self._usable(call, cache_id, remotely=True)
        begin = partial(self._begin, key.cluster_id, partial(start, self._dd.cache_manager, cache))
        try:
            try:
                self._portal.run(begin)
                return
            except (CacheNotFound, NotLinkedError):
                pass  # perhaps not yet
            self._portal.run(partial(self._until_announced, begin))
        except BlockIndexError as why:
            if why.peer is None or not reading:
                raise llm_error(call, why) from why
            raise LLMException(f"[{call}] failed: {why}", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST) from why
        except DataDistError as why:
            raise llm_error(call, why) from why

    def _begin(self, peer: int, start: Callable[[], Transfer[None]]) -> Transfer[None]:
        transfer = start()
        if not transfer.done():
            moving = self._moving.setdefault(peer, set())
            moving.add(transfer)
            transfer.add_done_callback(moving.discard)
        return transfer

    async def _until_announced(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Begin again until the news of a cache, or of a link, has arrived that the peer's user may know of already."""
        until = time.monotonic() + _ANNOUNCEMENT_SECONDS
        news: EventStream | None = None
        while True:
            try:
                return await begin()
            except CacheNotFound:
                if time.monotonic() > until:
                    raise
            except NotLinkedError as why:
                if time.monotonic() > until or why.peer is None or not await self._is_being_linked(why.peer):
                    raise
                continue
            if news is None:
                news = self._dd.events()  # from now on; what came before is found by beginning once more
                continue
            with contextlib.suppress(TimeoutError, StopAsyncIteration):
                async with asyncio.timeout(until - time.monotonic()):
                    await anext(news)

    async def _is_being_linked(self, peer: int) -> bool:
        """Wait for the link that a peer is making, if it is: for the peer it may be ready a moment earlier."""
        if peer == self.config.cluster_id:
            return False
        try:
            await self._dd.link(ClusterInfo(peer), timeout=_PROBE_SECONDS)
        except DataDistError as why:
            log.info("cluster %d is not linked, and does not link this node: %s", peer, why)
            return False
        return True

    def start_layerwise(
        self,
        cache_id: int,
        begins: Sequence[Callable[[CacheManager, Cache], TransferTask]],
        ended: Callable[[int, BaseException | None], None],
    ) -> list[asyncio.Task[None]]:
        """Start layer-wise transfers of a cache to one target each, and return at once.

        Parameters
        ----------
        cache_id : int
        begins : sequence of callable
            Each starts one.
        ended : callable
            Called in the loop's thread with the index of each and its error, a CancelledError where it was cancelled.

        Raises
        ------
        LLMException
            The cache cannot be used. What is wrong with one transfer is told to `ended`.
        """
        cache = self._usable("transfer_cache_async", cache_id, remotely=True)
        tasks: list[asyncio.Task[None]] = []

        async def send(begin: Callable[[CacheManager, Cache], TransferTask]) -> None:
            (result,) = await begin(self._dd.cache_manager, cache)
            if result.error is not None:
                raise result.error

        def told(index: int, task: asyncio.Task[None]) -> None:
            self._layerwise.discard(task)
            ended(index, asyncio.CancelledError() if task.cancelled() else task.exception())

        async def start() -> None:
            for index, begin in enumerate(begins):
                task = asyncio.create_task(self._until_announced(partial(send, begin)))
                tasks.append(task)
                self._layerwise.add(task)
                task.add_done_callback(partial(told, index))

        self.run("transfer_cache_async", start)
        return tasks

    def cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancel what `start_layerwise` has started; its end is told as any other."""

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        self._portal.soon(cancel)

    def local(self, call: str, cache_ids: Iterable[int], start: Callable[..., Transfer[None]]) -> None:
        """Copy within this node: `start` is given the cache manager and the caches."""
        caches = [self._usable(call, cache_id, remotely=False) for cache_id in cache_ids]
        self.run(call, partial(start, self._dd.cache_manager, *caches))

    def swap(self, sources: Tensors, source_addresses: Sequence[int], targets: Tensors,
             target_addresses: Sequence[int], pairs: dict[int, int]) -> None:  # fmt: skip
        """Copy blocks between two pieces of memory, one of the host and one of the device, caches or not."""
        if self._device is not _Device.HOST:
            raise LLMException(
                "[swap_blocks] failed: it copies host memory only; copy NPU memory with torch: dst[i].copy_(src[j])",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )

        async def copy() -> None:
            # Memory that is not registered here is registered with a node that nobody links: ids go on as they were.
            caches = (await self._own_node()).cache_manager
            both: list[Cache] = []
            try:
                for tensors, addresses in ((sources, source_addresses), (targets, target_addresses)):
                    both.append(caches.register_blocks_cache(list(addresses), desc=tensors.described(), remote=None))
                await caches.swap_blocks(both[0], both[1], pairs)
            finally:
                for cache in both:
                    await caches.unregister_cache(cache)

        self.run("swap_blocks", copy)

    async def _own_node(self) -> DataDist:
        async with self._opening_aside:
            if self._aside is None:
                self._aside = await DataDist(self.config.cluster_id, config=self._host_config).open()
        return self._aside

    def _usable(self, call: str, cache_id: int, *, remotely: bool) -> Cache:
        """Return a cache of this node that can be moved from or to."""
        held = self._held.get(cache_id)
        if held is None and self._portal.closed:
            raise llm_error(call, ClosedError("it is finalized"))
        if held is None:
            raise LLMException(
                f"[{call}] failed: there is no cache {cache_id} here", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            )
        why: object = held.missing
        if why is None and remotely and self.config.remote_accessible and not held.reachable:
            why = f"cache {cache_id} was registered with remote_accessible=False"
        if why is not None:
            raise LLMException(f"[{call}] failed: {why}", status_code=LLMStatusCode.LLM_PARAM_INVALID)
        return held.cache

    def slot_bytes(self, cache_id: int) -> int:
        """Return the bytes of a batch slot of a cache of this node, in one tensor; 0 for an unknown cache."""
        held = self._held.get(cache_id)
        return 0 if held is None else held.cache.geometry.block_bytes

    # Links. -------------------------------------------------------------------------------------------------

    def link_clusters(self, peers: Sequence[Peer], seconds: float) -> list[LLMStatusCode]:
        """Link peers, all at once, and return what became of each. What fails is logged as an error."""
        where = [[(ip_text(ip), port) for ip, port in peer.remote] for peer in peers]

        async def link() -> list[LLMStatusCode]:
            return await self._all(peers, lambda i: self._link(peers[i], where[i], seconds))

        return self.run("link_clusters", link)

    def unlink_clusters(self, peers: Sequence[Peer], seconds: float, force: bool) -> list[LLMStatusCode]:
        """Unlink peers, all at once, and return what became of each. The links are ended here in any case."""

        async def unlink() -> list[LLMStatusCode]:
            return await self._all(peers, lambda i: self._unlink(peers[i].cluster_id, seconds, force))

        return self.run("unlink_clusters", unlink)

    @staticmethod
    async def _all(peers: Sequence[Peer], one: Callable[[int], Awaitable[LLMStatusCode]]) -> list[LLMStatusCode]:
        """Run one coroutine for each peer; a peer named again is looked at when the first has ended."""
        lists: dict[int, list[int]] = {}
        for index, peer in enumerate(peers):
            lists.setdefault(peer.cluster_id, []).append(index)
        codes = [LLMStatusCode.LLM_FAILED] * len(peers)

        async def in_turn(indices: list[int]) -> None:
            for index in indices:
                codes[index] = await one(index)

        async with asyncio.TaskGroup() as tasks:
            for indices in lists.values():
                tasks.create_task(in_turn(indices))
        return codes

    async def _link(self, peer: Peer, where: list[tuple[str, int]], seconds: float) -> LLMStatusCode:
        try:
            if len(where) != 1:
                raise ArgumentError(f"cluster {peer.cluster_id} has {len(where)} remote addresses, and one is needed")
            if not self.config.local_comm_res and len(peer.local) != 1:
                raise ArgumentError(f"{len(peer.local)} local addresses are given, and one is needed")
            check_local_comm_res(self.config.local_comm_res, hixl=self.config.hixl)
            counted = self._counted
            if counted is not None and peer.cluster_id == self.config.cluster_id:
                raise ArgumentError(f"cluster {peer.cluster_id} is this node itself")
            if await self._is_linked(peer.cluster_id):
                await self._check_same_peer(peer.cluster_id, where[0], seconds)
                if counted is None or counted.is_mine(peer.cluster_id):
                    log.warn("cluster %d is linked already", peer.cluster_id)
                    return LLMStatusCode.LLM_ALREADY_LINK
            info = ClusterInfo(peer.cluster_id, where)
            if counted is not None:
                await counted.link(info, seconds)
            else:
                await self._dd.link(info, timeout=seconds)
                self._linked_to_self |= peer.cluster_id == self.config.cluster_id
            if (link := self._dd.links.get(peer.cluster_id)) is not None:
                self._linked_at[peer.cluster_id] = link.epoch, f"{where[0][0]}:{where[0][1]}"
        except LLMException as why:
            log.error("cluster %d cannot be linked: %s", peer.cluster_id, why)
            return why.status_code
        except DataDistError as why:
            log.error("cluster %d cannot be linked: %s", peer.cluster_id, why)
            if isinstance(why, UsageError | LinkTimeout):
                return code_2_status(why.status)
            return LLMStatusCode.LLM_LINK_FAILED
        return LLMStatusCode.LLM_SUCCESS

    async def _is_linked(self, cluster_id: int) -> bool:
        """Say whether there is a link, and the peer is still there: it may have been restarted this moment."""
        if cluster_id == self.config.cluster_id:
            return self._linked_to_self
        link = self._dd.links.get(cluster_id)
        if link is None:
            return False
        try:
            await self._dd.fence(cluster_id, timeout=_PROBE_SECONDS)
        except LinkError as why:
            log.info("cluster %d did not answer: %s", cluster_id, why)
        return self._dd.links.get(cluster_id) is link

    async def _check_same_peer(self, cluster_id: int, where: tuple[str, int], seconds: float) -> None:
        """Refuse to take a link for one to somebody else: two nodes with one cluster id."""
        link, address = self._dd.links.get(cluster_id), f"{where[0]}:{where[1]}"
        if link is None or address in link.peer_listens_at or self._linked_at.get(cluster_id) == (link.epoch, address):
            return
        # A peer has more addresses than it names, so that whoever is there is asked by another node of this id: the
        # peer refuses it because it is linked, and somebody else takes it.
        async with DataDist(self.config.cluster_id, config=self._config) as aside:
            try:
                await aside.link(ClusterInfo(cluster_id, where), timeout=min(seconds, _PROBE_SECONDS))
            except HandshakeError:
                raise
            except LinkError as why:
                log.info("nobody but cluster %d, which is linked, may be at %s: %s", cluster_id, address, why)
                return
            aside.abort()
        raise LinkError(
            f"cluster id {cluster_id} is that of a live node that is linked already, and of another one at {address}",
            hint="give every node a cluster id of its own",
        )

    async def _unlink(self, cluster_id: int, seconds: float, force: bool) -> LLMStatusCode:
        until = time.monotonic() + seconds
        if cluster_id == self.config.cluster_id:
            self._linked_to_self = False
        if not force and (moving := self._moving.get(cluster_id)):
            await asyncio.wait(moving, timeout=seconds)
        try:
            left, info = max(until - time.monotonic(), 0.001), ClusterInfo(cluster_id)
            if self._counted is not None:
                await self._counted.unlink(info, left, force)
            else:
                await self._dd.unlink(info, timeout=left, force=force)
        except LinkTimeout as why:
            log.error("cluster %d is unlinked here, and has not answered: %s", cluster_id, why)
            return LLMStatusCode.LLM_TIMEOUT
        except DataDistError as why:
            log.error("cluster %d cannot be unlinked: %s", cluster_id, why)
            return LLMStatusCode.LLM_UNLINK_FAILED
        return LLMStatusCode.LLM_SUCCESS

    def join(self, name: str, members: Sequence[Member]) -> int:
        """Begin to link the members of a communicator, and return its id.

        Raises
        ------
        LLMException
            ``LLM_FEATURE_NOT_ENABLED``: the backend is hixl. Or see `Communicators.link`.
        """
        self._check_not_hixl("link")
        return self.run("link", lambda: self._communicators.link(name, members, self.config.cluster_id))

    def leave(self, comm_id: int) -> None:
        """End a communicator, and the links that nothing else keeps."""
        self._check_not_hixl("unlink")
        self.run("unlink", lambda: self._communicators.unlink(comm_id))

    def joined(self, comm_id: int) -> RegisterMemStatus:
        """Return how far a communicator is."""
        self._check_not_hixl("query_register_mem_status")

        async def status() -> RegisterMemStatus:
            return self._communicators.status(comm_id)

        return self.run("query_register_mem_status", status)

    def _check_not_hixl(self, call: str) -> None:
        if self.config.hixl:
            raise LLMException(
                f"[{call}] failed: there are no two-sided links with the backend hixl",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )

    @property
    def has_links(self) -> bool:
        """Whether any peer is linked."""
        return self._linked_to_self or len(self._dd.links) > 0

    def switch_role(self, role: LLMRole, listen: tuple[str, int] | None) -> None:
        """Take another role; listen at another address, or no longer.

        Raises
        ------
        LLMException
            ``LLM_EXIST_LINK``: peers are linked. ``LLM_FEATURE_NOT_ENABLED``: with HIXL the address stays. Or the
            address cannot be had; where it listened before it still does.
        """

        async def switch() -> None:
            dd = self._dd
            if not self.config.hixl and self.has_links:
                raise LLMException(
                    f"[switch_role] failed: clusters {list(dd.links) or self.config.cluster_id} are linked",
                    status_code=LLMStatusCode.LLM_EXIST_LINK,
                )
            at = dd.listen_address
            if listen is None and not self.config.hixl:
                await dd.switch_role(Role(role), listen=None)
            elif listen is None or (at is not None and at.port == listen[1]):
                await dd.switch_role(Role(role))
            elif self.config.hixl:
                raise LLMException(
                    f"[switch_role] failed: it listens on {at}, which stays with the backend hixl",
                    status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                )
            else:
                await dd.switch_role(Role(role), listen=listen)

        self.run("switch_role", switch)


def _device_of(dd: DataDist) -> _Device:
    """Say what Placement.DEVICE means for a node. Where there are NPUs it never means host memory."""
    if dd.transports.get("hixl") == "" or any(_DEV.glob("davinci[0-9]*")):
        return _Device.HOST if host_npu.installed() else _Device.NPU
    return _Device.HOST


def _pool_of(caches: CacheManager, pool: Pool) -> MemoryPool:
    return caches.memory_pool(pool.nbytes, page_bytes=pool.page_bytes)
