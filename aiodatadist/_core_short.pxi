# SPDX-License-Identifier: Apache-2.0
# The way of nearly all transfers, without a line of Python. A part of _core.pyx.
import asyncio
import functools

# Defaults, by identity: an equal number of another type takes the long way, which looks at types.
cdef object ALL_BYTES = -1
cdef object KEYS_AND_VALUES = 2


# A look-up of an attribute by its name takes longer than one in a dict: what is needed for each transfer stands here.

cdef class HasTable:
    """A link, as far as the short way needs it: its table, the peer's caches by key."""


cdef class HasPairs:
    """A peer's cache, as far as the short way needs it: its pairs by local cache id."""


cdef class ShortWay:
    """What a manager of caches inherits, so that `short_pull` and `short_push` find what they need."""

    def _open_short_way(self, dict links, unsigned long thread_id, loop, no_timeout, cache_type, blocks_key, id_key):
        """Let transfers go the short way.

        `links` are those that are ready, by cluster id; `thread_id` is the loop's, `no_timeout` what stands for
        the default of a pair. The rest are the types of a cache and of the keys in a link's table.
        """
        self.links = links
        self.thread_id = thread_id
        self.loop = loop
        self.is_running = loop.is_running
        # What asyncio's own loops look at: a call of Python code takes five times as long as the look.
        self.shows_thread = (getattr(type(loop), "is_running", None) is asyncio.BaseEventLoop.is_running
                             and getattr(loop, "_thread_id", None) == thread_id)
        self.no_timeout = no_timeout
        self.cache_type = cache_type
        self.blocks_key = blocks_key
        self.id_key = id_key

    def _close_short_way(self):
        """From here on all transfers go the long way, which says what is wrong."""
        self.links = None

    cdef start_short(self, int opcode, key, cache, local_blocks, remote_blocks, timeout):
        """Start a transfer of whole blocks, all tensors; or return None where the long way has to look closer."""
        if self.links is None or type(cache) is not self.cache_type:
            return None
        # A key equals every tuple of its fields, and not all of them are keys.
        if type(key) is not self.blocks_key and type(key) is not self.id_key or len(<tuple>key) == 0:
            return None
        if local_blocks is None or remote_blocks is None:
            return None
        if timeout is not self.no_timeout and type(timeout) is not float:
            return None
        if PyThread_get_thread_ident() != self.thread_id or not (
                self.loop._thread_id is not None if self.shows_thread else self.is_running()):
            return None
        try:
            # A cache that was unregistered has no pair, and one for which one is left is closed for the engine as well.
            link = self.links[(<tuple>key)[0]]
            entry = (<HasTable?>link).table[key]
            pair = (<HasPairs?>entry).pairs[cache.id]
        except (KeyError, TypeError, AttributeError):
            return None
        if type(pair) is not Pair:
            return None
        return (<Pair>pair).start(opcode, cache, local_blocks, remote_blocks, timeout)


def short_pull(default_timeout):
    """Put the short way in front of the method `pull_blocks`, whose face the result has.

    A call of Python code with so many arguments and their checks would take as long as the copy of a small block.
    """
    def in_front(long_way):
        def pull_blocks(ShortWay self not None, src_key, dst_cache, src_blocks=None, dst_blocks=None, *,
                        dst_batch_index=None, size=-1, src_layer_range=None, dst_layer_range=None,
                        tensor_num_per_layer=2, timeout=default_timeout, notify=None, wait=False):
            if (dst_batch_index is None and src_layer_range is None and dst_layer_range is None and notify is None
                    and size is ALL_BYTES and tensor_num_per_layer is KEYS_AND_VALUES):
                transfer = self.start_short(ADT_READ, src_key, dst_cache, dst_blocks, src_blocks, timeout)
                if transfer is not None:
                    return transfer
            return long_way(self, src_key, dst_cache, src_blocks, dst_blocks, dst_batch_index=dst_batch_index,
                            size=size, src_layer_range=src_layer_range, dst_layer_range=dst_layer_range,
                            tensor_num_per_layer=tensor_num_per_layer, timeout=timeout, notify=notify, wait=wait)
        return functools.wraps(long_way)(pull_blocks)
    return in_front


def short_push(default_timeout):
    """Put the short way in front of the method `push_blocks`, as `short_pull`."""
    def in_front(long_way):
        def push_blocks(ShortWay self not None, dst_key, src_cache, src_blocks=None, dst_blocks=None, *,
                        src_batch_index=None, size=-1, src_layer_range=None, dst_layer_range=None,
                        tensor_num_per_layer=2, timeout=default_timeout, notify=None):
            if (src_batch_index is None and src_layer_range is None and dst_layer_range is None and notify is None
                    and size is ALL_BYTES and tensor_num_per_layer is KEYS_AND_VALUES):
                transfer = self.start_short(ADT_WRITE, dst_key, src_cache, src_blocks, dst_blocks, timeout)
                if transfer is not None:
                    return transfer
            return long_way(self, dst_key, src_cache, src_blocks, dst_blocks, src_batch_index=src_batch_index,
                            size=size, src_layer_range=src_layer_range, dst_layer_range=dst_layer_range,
                            tensor_num_per_layer=tensor_num_per_layer, timeout=timeout, notify=notify)
        return functools.wraps(long_way)(push_blocks)
    return in_front
