# SPDX-License-Identifier: Apache-2.0
# The simulated network. A part of _core.pyx.


@cython.final
cdef class SimNetwork:
    """A simulated network between stepped engines, with the one clock that they share.

    Parameters
    ----------
    seed : int
        Decides all that is random.
    left_out : sequence of str
        Rules that its engines break, for tests of the tests: "drain", "epoch", "fence" or "key".
    """

    def __cinit__(self, uint64_t seed, left_out=()):
        cdef unsigned flags = 0
        rules = {"drain": kNoDrain, "epoch": kNoEpoch, "fence": kNoFence, "key": kNoKey}
        for name in left_out:
            if name not in rules:
                raise ArgumentError(f"left_out={name!r} is none of {', '.join(rules)}")
            flags |= <unsigned>rules[name]
        self.network = shared_ptr[CSimNetwork](new CSimNetwork(seed, flags))

    def now_ns(self):
        """Time of the clock."""
        return self.network.get().clock().now_ns()

    def advance(self, uint64_t ns):
        """Move the clock."""
        self.network.get().clock().advance(ns)

    def set_way(self, uint64_t source, uint64_t target, *, latency=(0, 0), uint64_t bytes_per_second=0,
                uint64_t fragment_bytes=65536, double loss=0.0, uint64_t resend=0, double duplicate=0.0,
                double reorder=0.0, uint64_t reorder_most=0, visible=(0, 0), bint blocked=False):
        """Say what happens to data between two places from now on. Times are ns, pairs are least and most."""
        cdef CSimWay way
        way.latency_least, way.latency_most = latency
        way.bytes_per_second = bytes_per_second
        way.fragment_bytes = fragment_bytes
        way.loss = min(loss, 0.9)  # or nothing would ever arrive
        way.resend = resend
        way.duplicate = duplicate
        way.reorder = reorder
        way.reorder_most = reorder_most
        way.visible_least, way.visible_most = visible
        way.blocked = blocked
        self.network.get().set_way(source, target, way)

    def bind(self, int fd, uint64_t link, unsigned end, uint64_t peer_place):
        """Say that the engine connection `fd` is one end (0 or 1) of this link."""
        self.network.get().bind(fd, link, end, peer_place)

    def crash(self, uint64_t place):
        """Cut a place off at once. What it has sent is on its way."""
        self.network.get().crash(place)

    def take_accesses(self):
        """Take what was noted of accesses to memory, in order.

        A list of (time, place, life, cache id, address, bytes, tensor, is a write, place of the operation, its life,
        operation, offset). The life says which engine of that place.
        """
        cdef vector[CSimAccess] accesses = self.network.get().take_accesses()
        return [(a.at, a.place, a.life, a.cache, a.address, a.bytes, a.tensor, a.write != 0, a.by, a.by_life, a.op,
                 a.offset) for a in accesses]
