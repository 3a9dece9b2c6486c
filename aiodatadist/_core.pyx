# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, freethreading_compatible=False
"""The seam between Python and the native engine: converts, pins and completes. It decides nothing.

Everything here is called in a DataDist's loop thread and keeps the GIL: the calls take microseconds, and beside a busy
model thread letting the GIL go can cost seconds to get it back. The exceptions say so (`Engine.release`,
`Node.wait_quiet`, `Node.register_cache`, `Region.populate`, `choose_rdma`).
"""
from cpython.buffer cimport (
    Py_buffer,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBUF_STRIDES,
)
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.iterator cimport PyIter_Check
from cpython.long cimport PyLong_CheckExact
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject_Call
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.ref cimport Py_DECREF, Py_INCREF
cimport cython
from cython.operator cimport dereference as deref
from libc.string cimport memcpy
from libcpp.utility cimport move
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

import os
import weakref

from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BlockIndexError,
    CacheNotFound,
    ClosedError,
    ForkedError,
    GateError,
    OutOfMemoryError,
    TransportUnavailable,
    error_from_native,
)
from .types import as_integer, shown

EVENT_PEER_LOST = <int>CEventKind.peer_lost
EVENT_PEER_QUIET = <int>CEventKind.peer_quiet
EVENT_FENCED = <int>CEventKind.fenced
EVENT_CACHE_QUIET = <int>CEventKind.cache_quiet
EVENT_TRANSFER_ENDED = <int>CEventKind.transfer_ended
EVENT_PONG = <int>CEventKind.pong
EVENT_LEASE_OVER = <int>CEventKind.lease_over
EVENT_LEASE_ANSWER = <int>CEventKind.lease_answer
EVENT_LEASE_LOST = <int>CEventKind.lease_lost
EVENT_LAYER_ARRIVED = <int>CEventKind.layer_arrived
EVENT_ENDPOINT_SETTLED = <int>CEventKind.endpoint_settled
READ = <int>ADT_READ
WRITE = <int>ADT_WRITE
WHOLE = 2**64 - 1
NEVER = 2**64 - 1

debug = bool(kDebugBuild)

# Completions handled in one callback: some 2 us each, so that a flood never holds the loop for long.
cdef enum:
    EVENTS_A_CALL = 256


# Node id -> cache id -> what keeps the cache's memory alive. Not in the objects: users drop those when they like, and a
# peer may touch the memory for longer.
cdef dict pinned = {}


def live_objects():
    """Count the native objects that exist, by kind. All zero in a release build, which does not count."""
    return {kLiveNames[i].decode(): live_count(i) for i in range(kLiveCount)}


def forked():
    """Say whether this process is a child forked while an engine was open; its objects are inert."""
    return bool(in_forked_child())


def transport_names():
    """Names of the built-in transports."""
    return [kTransports[i].name.decode() for i in range(kTransportCount)]


def probe_transports(names=None):
    """Ask transports, or all, whether they are usable here: a list of (name, usable, what was found or why not)."""
    cdef adt_probe_t probe
    rows = []
    for i in range(kTransportCount):
        name = kTransports[i].name.decode()
        if names is None or name in names:
            kTransports[i].probe(&probe)
            rows.append((name, probe.usable != 0, (<bytes>probe.reason).decode(errors="replace")))
    return rows


def probe_transport(str name):
    """Say why a transport is not usable here; empty if it is."""
    for _, usable, reason in probe_transports((name,)):
        return "" if usable else reason
    return f"this version has no transport {name}"


def choose_rdma(devices, int gid_index):
    """Find the RDMA device, port and address that a DataDist would use, without the GIL: for a worker thread.

    `devices` are names, or name:port, in order of preference; none: any. `gid_index` -1: choose. Returns (usable,
    "name:port", index of the address, what was found or why none is usable).
    """
    cdef vector[string] names
    cdef string device
    cdef string words
    cdef int32_t chosen = -1
    cdef bint usable
    for name in devices:
        names.push_back((<str>name).encode())
    with nogil:
        usable = c_choose_rdma(names, gid_index, device, chosen, words)
    return usable, device.decode(), chosen, words.decode(errors="replace")


def rdma_stats():
    """Count what verbs holds and has done in this process."""
    return {
        "registrations": verbs_stats().registrations.load(),
        "registered_bytes": verbs_stats().registered_bytes.load(),
        "registrations_made": verbs_stats().registrations_made.load(),
        "registrations_shared": verbs_stats().registrations_shared.load(),
        "queue_pairs": verbs_stats().queue_pairs.load(),
        "rebuilds": verbs_stats().rebuilds.load(),
    }


def limit_rdma(*, uint64_t registration_bytes=0, uint64_t message_bytes=0, uint32_t sge=0, uint32_t requests=0,
               uint32_t stuck_queue_pairs=0, uint32_t stuck_registrations=0):
    """Have RDMA devices count as less able from now on, for tests. 0: as able as they are."""
    verbs_limits().registration_bytes.store(registration_bytes)
    verbs_limits().message_bytes.store(message_bytes)
    verbs_limits().sge.store(sge)
    verbs_limits().requests.store(requests)
    verbs_limits().stuck_queue_pairs.store(stuck_queue_pairs)
    verbs_limits().stuck_registrations.store(stuck_registrations)


def copy_kernel():
    """Name of the copy kernel chosen for this CPU."""
    return stream_copy_name().decode()


def probe_process_vm(int pid, uint64_t address, bytes expected):
    """Read a peer's secret by process_vm_readv: 0 if it is `expected`, else an errno (EBADMSG: it differs)."""
    return c_probe_process_vm(pid, address, <const char *>expected, len(expected))


def readable(int pid, uint64_t address, size_t nbytes):
    """Try to read at most 32 bytes of a process by process_vm_readv; 0 or an errno."""
    return c_probe_process_vm(pid, address, NULL, nbytes)


def set_ptracer(long pid):
    """Let one process (-1: any of this user) use process_vm on this one under Yama; 0 or an errno."""
    return c_allow_ptracer(pid)


cdef double monotonic() noexcept:
    """`time.monotonic()`, without the call."""
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <double>now.tv_sec + <double>now.tv_nsec * 1e-9


cdef unsigned transport_index(str name) except? 0xFFFFFFFF:
    for i in range(kTransportCount):
        if kTransports[i].name.decode() == name:
            return i
    raise ArgumentError(f"transport {name!r} is not one of {transport_names()}")


@cython.final
cdef class Secret:
    """32 random bytes of this process at a fixed address, which a peer reads to prove that process_vm works."""

    def __cinit__(self):
        self.secret = &c_secret_of_process()

    @property
    def address(self):
        return <uint64_t><size_t>&self.secret.value[0]

    @property
    def value(self):
        return PyBytes_FromStringAndSize(<char *>&self.secret.value[0], 32)


@cython.final
cdef class Region:
    """Library memory in a memfd. Exports its bytes as a writable buffer; an array over it keeps it alive."""

    def __cinit__(self, size_t nbytes):
        if nbytes == 0:
            raise ArgumentError("a region of 0 bytes")
        try:
            self.region = new CRegion(nbytes)
        except (MemoryError, RuntimeError, OSError) as e:
            raise OutOfMemoryError(f"cannot make {nbytes} bytes of library memory: {e}",
                                   hint="check memory limits and the number of open files") from e
        self.shape[0] = <Py_ssize_t>nbytes
        self.strides[0] = 1

    def __dealloc__(self):
        del self.region

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.region.base(), <Py_ssize_t>self.region.bytes(), 0, flags)

    @property
    def id(self):
        return self.region.id()

    @property
    def fd(self):
        return self.region.fd()

    @property
    def address(self):
        return <uint64_t><size_t>self.region.base()

    @property
    def size(self):
        return self.region.bytes()

    def populate(self, size_t limit):
        """Make the first `limit` bytes resident, in steps, without the GIL. For a worker thread."""
        cdef size_t at = 0
        cdef size_t end = min(limit, self.region.bytes())
        cdef size_t step
        with nogil:
            while at < end:
                step = min(<size_t>(8 << 20), end - at)
                if not self.region.populate(at, step):
                    break
                at += step


@cython.final
cdef class Span:
    """A part of a region. Exports its bytes as a writable buffer; an array over it keeps it alive."""

    def __cinit__(self, Region region, size_t offset, size_t nbytes):
        if nbytes == 0 or offset > region.region.bytes() or nbytes > region.region.bytes() - offset:
            raise ArgumentError(f"{nbytes} bytes at {offset} of a region of {region.region.bytes()}")
        self.region = region
        self.offset = offset
        self.shape[0] = <Py_ssize_t>nbytes

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.region.region.base() + self.offset, self.shape[0], 0, flags)


@cython.final
cdef class Engine:
    """Native threads and their state: one a process, counted; or one in step mode, with a clock of its own."""

    @staticmethod
    def acquire(unsigned copy_threads, unsigned io_threads):
        """Open or share the engine of this process. Threads are those of the first opener."""
        cdef Engine self = Engine.__new__(Engine)
        cdef CEngineOptions options
        if in_forked_child():
            raise ClosedError("this process was forked while a DataDist was open",
                              hint="start workers with the spawn method, or fork while none is open")
        options.copy_threads = copy_threads
        options.io_threads = io_threads
        options.stepped = False
        self.engine = CEngine.acquire(options)
        self.counted = True
        return self

    @staticmethod
    def stepped(SimNetwork network=None, uint64_t place=0):
        """Open an engine without threads, whose clock moves only in `step`, or is that of a simulated network."""
        if in_forked_child():
            raise ClosedError("this process was forked while a DataDist was open",
                              hint="start workers with the spawn method, or fork while none is open")
        cdef Engine self = Engine.__new__(Engine)
        cdef CEngineOptions options
        options.copy_threads = 0
        options.io_threads = 0
        options.stepped = True
        if network is not None:
            options.network = network.network
            options.place = place
            options.left_out = network.network.get().left_out()
        self.engine = shared_ptr[CEngine](new CEngine(options))
        return self

    def __dealloc__(self):
        let_go_engine(self.engine)

    def release(self):
        """Give the engine back. The last user waits, without the GIL, until its threads have ended."""
        if self.engine.get() == NULL or in_forked_child():
            return
        # Gone for every other user first: they find no engine instead of one that is being joined.
        cdef shared_ptr[CEngine] engine = move(self.engine)
        self.engine.reset()
        with nogil:
            if self.counted:
                CEngine.release(engine)
            else:
                engine.reset()

    cdef CEngine *get(self) except NULL:
        if self.engine.get() == NULL:
            raise ClosedError("the engine was released")
        return self.engine.get()

    def step(self, uint64_t advance_ns=0):
        """Move the clock, then do all work that is possible without waiting. Step mode only."""
        cdef CEngine *engine = self.get()
        with nogil:
            engine.step(advance_ns)

    def now_ns(self):
        """Time of the engine's clock."""
        return self.get().clock().now_ns()

    def next_due(self):
        """Time of the clock when `step` has something to do although nothing has come; `NEVER` if it has not."""
        return self.get().next_due()

    @property
    def released(self):
        """Whether it was given back."""
        return self.engine.get() == NULL


cdef class Counts:
    """Numbers of transfers and bytes of one link; `aiodatadist.observe.Counters` says what they mean.

    `at_once` of those that ended well were done when their call returned, and have no latency of their own.
    """

    cdef void took(self, double seconds) noexcept:
        """Keep a latency for `latencies`."""
        cdef uint64_t micros = <uint64_t>(seconds * 1e6) if seconds > 0 else 0
        cdef int bucket = 0
        while micros > 0 and bucket < LATENCY_BUCKETS - 1:
            micros >>= 1
            bucket += 1
        self.buckets[bucket] += 1
        self.seconds += max(seconds, 0.0)
        self.unread = True

    def latencies(self):
        """Take the latencies of those that ended well since the last call: how many a bucket, as
        `aiodatadist.observe.Histogram` has them, and their sum in seconds. None: there are none."""
        cdef int i
        if not self.unread:
            return None
        result = [self.buckets[i] for i in range(LATENCY_BUCKETS)], self.seconds
        for i in range(LATENCY_BUCKETS):
            self.buckets[i] = 0
        self.seconds = 0.0
        self.unread = False
        return result


@cython.final
cdef class Ring:
    """Completions of one loop: `fd` turns readable, and `drain` hands over what waits.

    Parameters
    ----------
    engine : Engine
    call_soon : callable, optional
        The loop's; runs `new_turn`, which renews the inline budget once a turn.
    inline_budget : float
        Seconds of inline work that may finish in one turn of the loop.
    """

    def __cinit__(self, Engine engine, call_soon=None, double inline_budget=200e-6):
        self.engine = engine
        self.ring = shared_ptr[CRing](new CRing())
        self.nodes = {}
        self.deferred = []
        self.call_soon = call_soon
        self.inline_budget_ns = <uint64_t>(inline_budget * 1e9)

    def __dealloc__(self):
        let_go_ring(self.ring)

    @property
    def fd(self):
        return self.ring.get().fd()

    def drain(self):
        """Complete transfers and deliver events, at most a few hundred a call. Returns how many.

        A handler's exception does not stop the others; the first is raised at the end.
        """
        cdef size_t done = 0
        cdef CEvent event
        if in_forked_child():
            return 0
        if self.at >= self.events.size():
            self.at = 0
            self.ring.get().take(self.events)
        failure = None
        while self.at < self.events.size() and done < EVENTS_A_CALL:
            event = self.events[self.at]
            self.at += 1
            done += 1
            try:
                if event.kind == CEventKind.transfer_done:
                    self.complete(event)
                elif event.kind == CEventKind.layer_done:
                    # Its end is told by a later event, which holds the reference.
                    if event.cookie != NULL:
                        (<object>event.cookie)._native_layer(event.token, event.bytes)
                else:
                    if event.kind == CEventKind.cache_quiet:
                        pinned.get(event.node, {}).pop(event.cache, None)
                    node = self.nodes.get(event.node)
                    handler = node() if node is not None else None
                    if handler is not None:
                        handler(<int>event.kind, event.peer, event.token, event.status, event.cache, event.bytes,
                                <int>event.opcode)
            except BaseException as e:
                failure = failure or e
        if self.at < self.events.size():
            self.ring.get().wake()
        if failure is not None:
            raise failure
        return done

    def close(self):
        """Let go of what waits without telling anybody: its loop is gone."""
        cdef vector[CEvent] rest
        if in_forked_child():
            return
        for i in range(self.at, self.events.size()):
            rest.push_back(self.events[i])
        self.at = 0
        self.ring.get().take(self.events)
        for event in self.events:
            rest.push_back(event)
        self.events.clear()
        for event in rest:
            if event.cookie != NULL and event.kind == CEventKind.transfer_done:
                Py_DECREF(<object>event.cookie)
        self.deferred = []
        self.call_soon = None

    cdef complete(self, const CEvent &event):
        if event.cookie == NULL:
            return
        transfer = <object>event.cookie
        Py_DECREF(transfer)
        if event.status == ADT_OK and type(transfer) is self.transfer_type:
            pair = getattr(transfer, "_plain", None)
            if pair is not None and (<Pair>pair).finish_later(transfer, event.bytes):
                return
        transfer._native_done(event.status, event.bytes)

    def new_turn(self):
        """Renew the inline budget and finish what the last turn deferred."""
        self.turn_scheduled = False
        self.inline_spent_ns = 0
        if not self.deferred:
            return
        finished, self.deferred = self.deferred, []
        failure = None
        for transfer, pair, opcode, nbytes in finished:
            try:
                if pair is None:
                    transfer._native_done(ADT_OK, nbytes)
                elif transfer._cancelling or transfer.done():
                    (<Pair>pair).hand_over(transfer, opcode)
                    transfer._native_done(ADT_OK, nbytes)
                else:
                    (<Pair>pair).finish_at_once(transfer, opcode, nbytes)
            except BaseException as e:
                failure = failure or e
        if failure is not None:
            raise failure  # when all have ended, as in `drain`

    cdef bint spend(self, uint64_t ns) except -1:
        """Account for inline work; True if it still fits this turn."""
        self.inline_spent_ns += ns
        if not self.turn_scheduled and self.call_soon is not None:
            self.turn_scheduled = True
            self.call_soon(self.new_turn)
        return self.inline_spent_ns <= self.inline_budget_ns or self.call_soon is None


@cython.final
cdef class Node:
    """Native side of one DataDist.

    `on_event(kind, peer_id, token, status, cache_id, nbytes, opcode)` is called from `Ring.drain`; a bound method is
    held weakly. `rdma`, if there is any, is (device as "name:port", index of the address, traffic class, service level,
    timeout, retry count); `hixl` an engine of its own.
    """

    def __cinit__(self, Engine engine, Ring ring, uint64_t cluster_id, on_event, *, double drain_timeout,
                  double heartbeat_limit, uint64_t inline_bytes, uint64_t populate_limit, rdma=None,
                  HixlEngine hixl=None):
        cdef adt_rdma_t settings
        self.engine = engine
        self.ring = ring
        self.node = engine.get().open_node(cluster_id, ring.ring, <uint64_t>(drain_timeout * 1e9),
                                           <uint64_t>(heartbeat_limit * 1e9), inline_bytes, populate_limit)
        if rdma is not None:
            device, settings.gid_index, settings.traffic_class, settings.service_level = rdma[:4]
            settings.timeout, settings.retry_count = rdma[4:]
            name = device.encode()
            settings.device = name
            CEngine.use_rdma(deref(self.node.get()), settings)
        if hixl is not None:
            engine.get().use_hixl(deref(self.node.get()), hixl.agent)
        handler = weakref.WeakMethod(on_event) if hasattr(on_event, "__self__") else (lambda: on_event)
        ring.nodes[self.node.get().id] = handler

    def __dealloc__(self):
        let_go_node(self.node)

    def connect(self, int engine_fd, data_fds, *, int pid, int pidfd, bint process_vm, transports, bint dialed=False,
                double peer_limit=0.0, bint exposed=True, uint64_t cluster_id=0, uint64_t secret_address=0,
                bytes secret=b"", bint layers_told=False):
        """Start the native side of a link. Takes over every descriptor, whatever comes of it.

        Of three or more data connections the last two are for short requests: the dialing side's, then the other's.
        `peer_limit` is the silence in seconds that the peer bears; 0: as long as this side. Unless `exposed`, a peer of
        this host counts as able to touch local memory only from `Peer.expose` on. `cluster_id` is the peer's.
        `layers_told`: the peer hears of layers that have landed in its memory.
        `secret`, if there is one, is that of its process: once it is not found there, the process is another program
        and cannot touch local memory.
        """
        cdef CConnectRequest request
        cdef shared_ptr[CPeer] peer
        cdef string error
        request.wire = engine_fd
        request.pidfd = pidfd
        request.pid = pid if "shm" in transports else 0
        request.process_vm = process_vm
        request.dialed = dialed
        request.exposed = exposed
        request.layers_told = layers_told
        request.cluster = cluster_id
        if len(secret) == 32:
            request.secret_address = secret_address
            memcpy(request.secret_data(), <const char *>secret, 32)
        # The peer's own word: no number is above suspicion.
        request.peer_limit_ns = <uint64_t>(peer_limit * 1e9) if 0 < peer_limit < 1e9 else 0
        try:
            for fd in data_fds:
                request.data.push_back(fd)
            for name in transports:
                request.use[transport_index(name)] = True
            self.engine.get()
        except BaseException:
            taken = [engine_fd, pidfd]
            for i in range(request.data.size()):
                taken.append(request.data[i])
            for fd in taken:
                if fd >= 0:
                    os.close(fd)
            raise
        cdef adt_status_t status = self.engine.get().connect(self.node, request, peer, error)
        if status != ADT_OK:
            raise error_from_native(status, detail=error.decode())
        cdef Peer result = Peer.__new__(Peer)
        result.node = self
        result.peer = move(peer)
        return result

    def register_cache(self, uint64_t cache_id, addresses, uint64_t num_blocks, uint64_t block_bytes,
                       uint64_t block_stride, bint readable, bint writable, Region region=None, pin=None, *,
                       bint device=False):
        """Make a cache known natively; `pin` is kept alive until nothing can touch its memory any more.

        `device`: the addresses are an NPU's. Nothing but a transport that reaches them may touch them.
        """
        cdef vector[void *] tensors
        cdef adt_memory_t memory
        cdef shared_ptr[CLocalCache] cache
        cdef string error
        for address in addresses:
            tensors.push_back(<void *><size_t><uint64_t>address)
        memory.cache_id = cache_id
        memory.geometry.num_tensors = <uint32_t>tensors.size()
        memory.geometry.num_blocks = num_blocks
        memory.geometry.block_bytes = block_bytes
        memory.geometry.block_stride = block_stride
        memory.tensors = tensors.data()
        memory.access = (ADT_REMOTE_READ if readable else 0) | (ADT_REMOTE_WRITE if writable else 0)
        memory.placement = ADT_PLACEMENT_DEVICE if device else ADT_PLACEMENT_HOST
        memory.region_id = 0
        memory.region_base = NULL
        memory.region_bytes = 0
        if region is not None:
            memory.region_id = region.region.id()
            memory.region_base = region.region.base()
            memory.region_bytes = region.region.bytes()
        cdef CEngine *engine = self.engine.get()
        cdef adt_status_t status
        with nogil:  # called in a worker thread: a device may take seconds to pin the pages
            status = engine.register_cache(self.node, memory, cache, error)
        if status != ADT_OK:
            said = error.decode()
            named = said.partition(": ")[0]  # the engine begins with the transport that refused
            raise error_from_native(status, transport=named if named in transport_names() else None,
                                    detail=said or f"cache {cache_id}")
        cdef LocalCache result = LocalCache.__new__(LocalCache)
        result.node = self
        result.region = region
        result.cache = move(cache)
        pinned.setdefault(self.node.get().id, {})[cache_id] = pin
        return result

    def hixl_refused(self):
        """How many ranges of host memory HIXL has refused."""
        return 0 if self.node.get().hixl.get() == NULL else self.node.get().hixl.get().refused()

    def abort(self):
        """End every link and operation now; quiet follows by itself."""
        self.engine.get().abort_node(self.node)

    def quiet(self):
        """Whether no peer can touch local memory and no operation is unfinished."""
        return self.engine.get().node_quiet(self.node)

    def wait_quiet(self, double timeout):
        """Block, without the GIL, until quiet; for the end of the process only. False: `timeout` seconds passed."""
        cdef CEngine *engine = self.engine.get()
        cdef uint64_t ns = <uint64_t>(timeout * 1e9)
        cdef bint quiet
        with nogil:
            quiet = engine.wait_node_quiet(self.node, ns)
        return quiet

    def tell(self, *, bint peers, bint layers):
        """Say what the loop hears: what peers did to local memory; each layer that lands, at once, and not only with
        what comes next. Both at first."""
        self.engine.get().tell(self.node, peers, layers)

    def close(self):
        """Forget the node: its events are dropped from now on."""
        self.engine.get().close_node(self.node)
        self.ring.nodes.pop(self.node.get().id, None)
        # Where a stopped peer may still wake and write, what it may write to stays for as long as the process.
        if self.quiet():
            pinned.pop(self.node.get().id, None)

    def pending(self):
        """Every unfinished operation.

        (id, peer id, cache id, opcode, stop status, age s, bytes done, total, path, whether it waits at a gate, layers
        that have landed, layers). No layers: it is not layer-wise.
        """
        cdef vector[CPendingRow] rows = self.engine.get().pending(self.node)
        result = []
        for row in rows:
            result.append((row.op, row.peer, row.cache, <int>row.opcode, row.stop, row.age_ns * 1e-9, row.bytes_done,
                           row.bytes_total, row.path.decode(), bool(row.at_gate), row.layers_landed, row.layers))
        return result

    def hold(self, uint64_t lease_id, uint64_t cache_id, double ttl, cluster_id=None):
        """Keep a lease for a peer, or for the first that adopts it; EVENT_LEASE_OVER follows. False: the id is taken.

        `ttl` in seconds, at most some years.
        """
        cdef uint64_t cluster = 0 if cluster_id is None else cluster_id
        cdef const uint64_t *held_for = &cluster
        if cluster_id is None:
            held_for = NULL
        return self.engine.get().hold(self.node, lease_id, cache_id, held_for, <uint64_t>(ttl * 1e9))

    def end_lease(self, uint64_t lease_id):
        """End a lease as released; nothing happens if it has ended."""
        self.engine.get().end_lease(self.node, lease_id)

    def end_leases(self):
        """End all leases, because this side closes."""
        self.engine.get().end_leases(self.node)

    def leases(self, uint64_t only=0):
        """Every lease that is not over, or one: (id, has ended, is adopted, seconds until it ends if not renewed)."""
        cdef vector[CLeaseRow] rows = self.engine.get().leases(self.node, only)
        return [(row.id, bool(row.ended), bool(row.adopted), row.left_ns * 1e-9) for row in rows]


@cython.final
cdef class LocalCache:
    """A registered cache."""

    def __dealloc__(self):
        let_go_local(self.cache)

    @property
    def id(self):
        return self.cache.get().id

    def export_keys(self):
        """What peers need to reach it: a list of (transport, key, descriptor to pass or -1)."""
        if self.cache.get().closed:
            raise ClosedError(f"cache {self.id} is closed")  # its registrations with the transports may be gone
        keys = []
        for i in range(kTransportCount):
            if not self.cache.get().registered()[i]:
                continue
            name = kTransports[i].name.decode()
            fd = self.region.fd if self.region is not None and name == "shm" else -1
            key = <bytes>self.node.engine.get().export_key(self.cache, i)
            if key or name != "hixl":  # HIXL has let go of what it refuses; the keys of some others are empty
                keys.append((name, key, fd))
        return keys

    def served_by(self, str transport):
        """Whether a transport reaches it: HIXL refuses some memory of the host."""
        return any(name == transport for name, _, _ in self.export_keys())

    def source(self):
        """The cache as the source of copies into caches of the same node. Closing the cache ends it, too."""
        cdef shared_ptr[CRemoteCache] cache
        cdef string error
        cdef adt_status_t status = self.node.engine.get().import_local(self.node.node, self.cache, cache, error)
        if status != ADT_OK:
            raise error_from_native(status, detail=error.decode() or f"cache {self.id}")
        return imported(self.node, move(cache), "local", [])

    def close(self):
        """Refuse new use; EVENT_CACHE_QUIET follows when nothing can touch it any more."""
        self.node.engine.get().close_cache(self.node.node, self.cache)


@cython.final
cdef class Peer:
    """Native side of one link, for one epoch."""

    def __dealloc__(self):
        let_go_peer(self.peer)

    @property
    def id(self):
        return self.peer.get().id

    def import_cache(self, uint64_t cache_id, geometry, keys):
        """Reach a peer's cache by the first transport of `keys` that can.

        `geometry` is (num_tensors, num_blocks, block_bytes, block_stride); `keys` holds (transport, key, descriptor),
        whose descriptors are borrowed.
        """
        cdef adt_geometry_t g
        cdef adt_key_t key
        cdef shared_ptr[CRemoteCache] cache
        cdef string error
        cdef adt_status_t status
        g.num_tensors, g.num_blocks, g.block_bytes, g.block_stride = geometry
        reasons = []
        for name, data, fd in keys:
            key.data = <const char *><bytes>data
            key.size = len(data)
            key.fd = fd
            status = self.node.engine.get().import_cache(
                self.peer, cache_id, g, transport_index(name), key, cache, error)
            if status == ADT_OK:
                return imported(self.node, move(cache), name, reasons)
            if status == -2:
                raise CacheNotFound(f"cache {cache_id} was closed by its owner")
            if status == -8:
                raise error_from_native(status)
            reasons.append(f"{name}: {error.decode(errors='replace')}")
        raise TransportUnavailable(f"no transport reaches cache {cache_id} ({'; '.join(reasons) or 'no keys'})",
                                   reason="; ".join(reasons) or "the peer sent no usable key")

    def unsettled(self, str transport):
        """Say why the endpoint that settled (EVENT_ENDPOINT_SETTLED) moves nothing; empty if it does."""
        return self.node.engine.get().unsettled(self.peer, transport_index(transport)).decode(errors="replace")

    def fence(self):
        """Ask the peer's engine to finish what it does to local memory; EVENT_FENCED with the token follows."""
        return self.node.engine.get().fence(self.peer)

    def ping(self):
        """Ask the peer's engine for EVENT_PONG with the token."""
        return self.node.engine.get().ping(self.peer)

    def adopt_lease(self, uint64_t lease_id):
        """Adopt a lease of the peer, which the engine renews from then on; EVENT_LEASE_ANSWER with the token follows.

        0: the link is over, and no answer comes.
        """
        return self.node.engine.get().adopt_lease(self.peer, lease_id)

    def release_lease(self, uint64_t lease_id):
        """Tell the peer to end a lease; EVENT_LEASE_ANSWER with the token follows, or 0 as for `adopt_lease`."""
        return self.node.engine.get().release_lease(self.peer, lease_id)

    def loop_fd(self):
        """A new descriptor on which the loop waits for the answers of short requests, or -1. The caller closes it."""
        return self.node.engine.get().loop_fd(self.peer)

    def loop_progress(self):
        """Take the answers that wait on `loop_fd` and complete their transfers. False: stop watching it."""
        cdef bint useful
        if self.node.engine.engine.get() == NULL:
            return False
        useful = self.node.engine.get().loop_progress(self.peer)
        self.node.ring.drain()
        return useful

    def expose(self):
        """Call before the peer gets its first key. False: the link is over, and it must not get one."""
        return self.node.engine.get().expose(self.peer)

    def disconnect(self, int status):
        """End the link: operations end with `status`, and EVENT_PEER_QUIET follows."""
        self.node.engine.get().disconnect(self.peer, status)


cdef imported(Node node, shared_ptr[CRemoteCache] cache, str transport, list reasons):
    cdef RemoteCache result = RemoteCache.__new__(RemoteCache)
    result.node = node
    result.engine = node.engine
    result.transport = transport
    result.path = cache.get().path.name.decode()
    result.reasons = "; ".join(reasons)
    result.cache = move(cache)
    return result


# The engine is needed to give the key back, also when the collector ends this as part of a cycle; then the node may
# have lost its own attributes already.
@cython.no_gc_clear
@cython.final
cdef class RemoteCache:
    """A peer's cache, or one of this node as the source of local copies, reachable from here."""

    def __dealloc__(self):
        if self.cache.get() != NULL and self.engine.engine.get() != NULL:
            self.engine.engine.get().release_cache(self.cache)
        let_go_remote(self.cache)

    @property
    def id(self):
        return self.cache.get().id

    def release(self):
        """Give it back; a mapping goes with the last operation that uses it."""
        self.engine.get().release_cache(self.cache)


include "_core_blocks.pxi"
include "_core_gates.pxi"
include "_core_hixl.pxi"
include "_core_sim.pxi"


@cython.final
cdef class Pair:
    """One local cache and one cache of a peer whose geometries were compared: the hot path of a transfer.

    Parameters
    ----------
    pin : object
        Kept alive by every transfer of the pair until the native side is done with its memory.
    """

    def __cinit__(self, LocalCache local, RemoteCache remote, pin):
        self.local = local
        self.remote = remote
        self.pin = pin
        if local.node is not remote.node:
            raise ArgumentError("the two caches of a pair belong to different nodes")
        self.ring = local.node.ring
        self.engine = local.node.engine
        self.request.local = local.cache
        self.request.remote = remote.cache
        self.local_tensors = local.cache.get().geometry.num_tensors
        # Estimates for the inline budget; reading a clock twice would cost as much as a small copy.
        self.cost_base_ns, self.cost_per_kib_ns = (2500, 200) if remote.path == "shm-process_vm" else (700, 100)

    def __dealloc__(self):
        let_go_local(self.request.local)
        let_go_remote(self.request.remote)

    def submit(self, transfer, int opcode, local_side, remote_side, uint32_t local_tensor, uint32_t remote_tensor,
               uint32_t num_tensors, double timeout, bint allow_inline=True):
        """Start a transfer and drive `transfer`, which holds the pins until its end.

        Each side is a list of blocks or a `Slot`.
        `transfer` is told by `_native_started(engine, operation, nbytes)` if it is pending, and by
        `_native_done(status, nbytes)` once it is quiet. `timeout` 0 means none. What is wrong with the call raises.
        """
        cdef CSubmitResult result
        self.begin(transfer, opcode, local_side, remote_side, local_tensor, remote_tensor, num_tensors, timeout,
                   allow_inline, &result)
        if result.status == ADT_PENDING:
            transfer._native_started(self, result.op, result.bytes)
        elif result.status == ADT_OK:
            if self.ring.spend(self.cost_base_ns + (result.bytes >> 10) * self.cost_per_kib_ns):
                transfer._native_done(ADT_OK, result.bytes)
            else:
                transfer._native_started(self, 0, result.bytes)
                self.ring.deferred.append((transfer, None, opcode, result.bytes))
        elif result.executed:
            transfer._native_started(self, 0, result.bytes)
            transfer._native_done(result.status, 0)
        else:
            raise self.refusal(opcode, result)

    cdef int read(self, driven, int opcode, local_side, remote_side, double timeout) except -1:
        """Fill the request with what all kinds of transfers name."""
        cdef CTransferRequest *request = &self.request
        cdef Ring ring = self.ring
        if in_forked_child():
            raise error_from_native(-10, detail="this process is a forked child")
        if ring.reading:
            raise ArgumentError("a transfer was started while the blocks of another one were being read")
        ring.reading = True
        try:
            read_sides(opcode, local_side, remote_side, ring.local_blocks, ring.remote_blocks, deref(request))
        finally:
            ring.reading = False
        request.opcode = <adt_opcode_t>opcode
        # What is longer than a lifetime does not fit the clock's 64 bits, and means none.
        request.timeout_ns = <uint64_t>(timeout * 1e9) if 0 < timeout < 5e9 else 0
        request.cookie = <void *>driven
        return 0

    cdef int begin(self, transfer, int opcode, local_side, remote_side, uint32_t local_tensor, uint32_t remote_tensor,
                   uint32_t num_tensors, double timeout, bint allow_inline, CSubmitResult *result) except -1:
        """Give a transfer to the engine. Only where it is pending does the engine keep a reference."""
        cdef CTransferRequest *request = &self.request
        self.read(transfer, opcode, local_side, remote_side, timeout)
        request.local_tensor = local_tensor
        request.remote_tensor = remote_tensor
        request.num_tensors = num_tensors
        request.allow_inline = allow_inline
        # The operation owns a reference until its completion is drained. Taken first: it may end before submit returns.
        Py_INCREF(transfer)
        try:
            result[0] = self.engine.get().submit(deref(request))
        except BaseException:
            Py_DECREF(transfer)
            raise
        if result.status != ADT_PENDING:
            Py_DECREF(transfer)
        return 0

    cdef refusal(self, int opcode, const CSubmitResult &result):
        """Say why a transfer did not start."""
        if result.fault.kind != 0:
            return block_error(result.fault, opcode, self.local_blocks, self.remote_blocks,
                               self.remote.transport == "local")
        return error_from_native(result.status, transport=self.remote.transport)

    def prepare(self, cache, peer, Counts counts, transfer_type, loop, double default_timeout, uint32_t num_tensors,
                bint readable, bint writable):
        """Have `ShortWay` work: all `num_tensors` tensors, from blocks to blocks of one size.

        A transfer is a `transfer_type` of `loop`, driven as by `submit` and counted in `counts`.
        """
        self.cache = cache
        self.peer = peer
        self.counts = counts
        self.transfer_type = self.ring.transfer_type = transfer_type
        self.of_loop = {"loop": loop}  # made once: each call would make one anew
        self.real_time = getattr(loop, "virtual_time", None) is None
        self.default_timeout = default_timeout
        self.num_tensors = num_tensors
        self.readable = readable
        self.writable = writable

    cdef start(self, int opcode, cache, local_blocks, remote_blocks, timeout):
        """Start a transfer of whole blocks, or return None where another way has to explain what is wrong.

        `timeout` is a float; whatever else stands for the default.
        """
        cdef CSubmitResult result
        cdef double seconds = self.default_timeout
        if cache is not self.cache or not (self.readable if opcode == ADT_READ else self.writable):
            return None  # of another DataDist, or no cache at all; or one may not do that
        if type(timeout) is float:
            seconds = timeout
            if not 0.0 < seconds <= 1e9:
                return None
        transfer = PyObject_Call(self.transfer_type, (), self.of_loop)
        self.begin(transfer, opcode, local_blocks, remote_blocks, 0, 0, self.num_tensors, seconds, True, &result)
        if result.status == ADT_OK:
            self.counts.started += 1
            if self.ring.spend(self.cost_base_ns + (result.bytes >> 10) * self.cost_per_kib_ns):
                self.finish_at_once(transfer, opcode, result.bytes)
                return transfer
            transfer._cancelling = False
            transfer._bytes_total = result.bytes
            self.ring.deferred.append((transfer, self, opcode, result.bytes))
            return transfer
        if result.status == ADT_PENDING or result.executed:
            self.counts.started += 1
            self.hand_over(transfer, opcode)
            transfer._cancelling = False
            if self.real_time and not result.executed:
                transfer._native = transfer._plain = self
                transfer._op = result.op
                transfer._bytes_total = result.bytes
                transfer._started = monotonic()
                return transfer
            transfer._native_started(self, result.op, result.bytes)
            if result.executed:
                transfer._native_done(result.status, 0)
            return transfer
        # The long way would find an iterator used up, and miss its blocks.
        if result.fault.kind != 0 or PyIter_Check(local_blocks) or PyIter_Check(remote_blocks):
            raise self.refusal(opcode, result)
        return None

    cdef hand_over(self, transfer, int opcode):
        """Let a transfer count its own end."""
        transfer._counters = self.counts
        transfer._pull = opcode == ADT_READ
        transfer._peer = self.peer
        transfer._then = None

    cdef finish_at_once(self, transfer, int opcode, uint64_t nbytes):
        """End a transfer well that nobody has cancelled."""
        self.counts.at_once += 1
        self.count(opcode == ADT_READ, nbytes)
        transfer._bytes_total = nbytes
        transfer.set_result(None)

    cdef bint finish_later(self, transfer, uint64_t nbytes) except -1:
        """End a pending transfer of `start` well, as its `_native_done` would; False: leave it to that."""
        if transfer._cancelling or transfer._then is not None or transfer.done():
            return False
        transfer._bytes_done = nbytes
        transfer._native = transfer._plain = None  # lets go of the caches
        transfer._counters = None
        self.count(transfer._pull, nbytes)
        self.counts.took(monotonic() - <double>transfer._started)
        transfer.set_result(None)
        return True

    cdef count(self, bint pull, uint64_t nbytes):
        """Count a transfer that ended well."""
        self.counts.ok += 1
        if pull:
            self.counts.bytes_pulled += nbytes
        else:
            self.counts.bytes_pushed += nbytes

    def submit_layers(self, part, local_side, remote_side, Gate gate, uint32_t first_layer, uint32_t per_layer,
                      tensors, starts, view, double timeout):
        """Start writing layer by layer, as `gate` records them, and drive `part`, which holds the pins until its end.

        `tensors` holds (local tensor, remote tensor, byte offset there) of all layers, those of layer ``i`` from
        ``starts[i]`` to ``starts[i + 1]``. Layer 0 is the gate's `first_layer`; the peer hears of layers of `per_layer`
        of its tensors. `view` is the geometry by which `remote_side` counts, as for `checked_sides`. `part` is told as
        for `submit`, always by way of the ring, and before its end by `_native_layer(layer, ns since its recording)` of
        each that has landed.
        """
        cdef CLayerRequest wanted
        cdef CLayerTensor tensor
        cdef CSubmitResult result
        wanted.gate = gate.recorder.get().gate()
        wanted.first_layer = first_layer
        wanted.per_layer = per_layer
        for tensor.local, tensor.remote, tensor.base in tensors:
            wanted.tensors.push_back(tensor)
        wanted.starts = starts
        (wanted.remote_view.num_tensors, wanted.remote_view.num_blocks, wanted.remote_view.block_bytes,
         wanted.remote_view.block_stride) = view
        # Last: what runs in between could start a transfer of its own, which would take its place.
        self.read(part, ADT_WRITE, local_side, remote_side, timeout)
        Py_INCREF(part)
        try:
            result = self.engine.get().submit_layers(self.request, wanted)
        except BaseException:
            Py_DECREF(part)
            raise
        if result.status == ADT_PENDING:
            part._native_started(self, result.op, result.bytes)
            return
        Py_DECREF(part)
        if result.fault.kind != 0:
            raise block_error(result.fault, ADT_WRITE, self.local_blocks, wanted.remote_view.num_blocks, False)
        raise error_from_native(result.status, transport=self.remote.transport)

    @property
    def local_blocks(self):
        """Blocks in a tensor of the local cache."""
        return self.request.local.get().geometry.num_blocks

    @property
    def remote_blocks(self):
        """Blocks in a tensor of the peer's cache."""
        return self.request.remote.get().geometry.num_blocks

    def cancel(self, uint64_t op):
        """Ask the engine to end an operation; its completion follows. Nothing happens if it has ended."""
        if self.engine.engine.get() != NULL:
            self.engine.get().cancel(op)

    def progress(self, uint64_t op):
        """Bytes done of a running operation, or None once it has retired."""
        cdef uint64_t done = 0
        cdef uint64_t total = 0
        if self.engine.engine.get() != NULL and self.engine.get().progress(op, &done, &total):
            return done
        return None


include "_core_short.pxi"
