# SPDX-License-Identifier: Apache-2.0
# Declarations of the native engine. Everything that decides stands in the Python modules.
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "aiodatadist/transport.h" nogil:
    ctypedef int32_t adt_status_t
    int ADT_OK
    int ADT_PENDING
    ctypedef enum adt_opcode_t:
        ADT_READ
        ADT_WRITE
    unsigned ADT_REMOTE_READ
    unsigned ADT_REMOTE_WRITE
    unsigned ADT_PLACEMENT_HOST
    unsigned ADT_PLACEMENT_DEVICE
    ctypedef struct adt_geometry_t:
        uint32_t num_tensors
        uint64_t num_blocks
        uint64_t block_bytes
        uint64_t block_stride
    ctypedef struct adt_memory_t:
        uint64_t cache_id
        adt_geometry_t geometry
        void **tensors
        uint32_t access
        uint32_t placement
        uint64_t region_id
        void *region_base
        uint64_t region_bytes
    ctypedef struct adt_key_t:
        const void *data
        size_t size
        int fd
    ctypedef struct adt_rdma_t:
        const char *device
        int32_t gid_index
        uint8_t traffic_class
        uint8_t service_level
        uint8_t timeout
        uint8_t retry_count
    ctypedef struct adt_path_t:
        const char *name
    ctypedef struct adt_probe_t:
        int usable
        char *reason
    ctypedef struct adt_transport_ops_t:
        const char *name
        void (*probe)(adt_probe_t *out) noexcept


cdef extern from "layers.hpp" namespace "adt" nogil:
    cdef enum class CGateOutcome "adt::Gate::Outcome"(int):
        ok
        repeated
        range
        dropped

    cdef cppclass CGate "adt::Gate":
        uint32_t layers()
        cbool recorded(uint32_t layer)
        uint32_t count()
        size_t waiting()
        CGateOutcome record(uint32_t layer) except +
        CGateOutcome fail(uint32_t layer) except +

    cdef cppclass CRecorder "adt::Recorder":
        CRecorder(uint32_t layers) except +
        const shared_ptr[CGate] &gate()

    uint64_t make_layer_signal(const shared_ptr[CRecorder] &recorder, uint32_t layer) except +
    void release_layer_signal(uint64_t context) except +
    cbool layer_signal_pending(uint64_t context)
    uint64_t layer_signal_function()


cdef extern from "hixl_library.hpp" namespace "adt" nogil:
    cdef cppclass CHixlPlaces "adt::HixlPlaces":
        string metadef
        string hixl
        string acl
        string shim
    const char *kHixlSymbols[]
    const size_t kHixlSymbolCount

cdef extern from "hixl_agent.hpp" namespace "adt" nogil:
    cdef cppclass CHixlOption "std::pair<std::string, std::string>":
        CHixlOption(string name, string value)
    cdef cppclass CHixlSettings "adt::HixlSettings":
        CHixlPlaces places
        int32_t device
        string host
        vector[CHixlOption] options
        uint64_t alignment
        uint64_t drain_ns
        int32_t connect_ms
        bint others
    cdef cppclass CHixlAgent "adt::HixlAgent":
        uint64_t refused()

cdef extern from "hixl_open.hpp" namespace "adt" nogil:
    shared_ptr[CHixlAgent] c_open_hixl "adt::open_hixl"(const CHixlSettings &settings, string &words) except +

cdef extern from "engine.hpp" namespace "adt" nogil:
    const unsigned kTransportCount
    const adt_transport_ops_t *kTransports[]

    cdef enum class CEventKind "adt::EventKind"(uint32_t):
        transfer_done
        peer_lost
        peer_quiet
        fenced
        cache_quiet
        transfer_ended
        pong
        lease_over
        lease_answer
        lease_lost
        layer_done
        endpoint_settled
        layer_arrived

    cdef struct CEvent "adt::Event":
        CEventKind kind
        adt_status_t status
        uint64_t node
        uint64_t peer
        uint64_t token
        uint64_t cache
        uint64_t bytes
        uint32_t opcode
        void *cookie

    cdef cppclass CRing "adt::Ring":
        CRing() except +
        int fd()
        void take(vector[CEvent] &out) except +
        void wake()

    cdef cppclass CLocalCache "adt::LocalCache":
        uint64_t id
        cbool closed
        adt_geometry_t geometry
        const cbool *registered "registered.data" ()

    cdef cppclass CRemoteCache "adt::RemoteCache":
        uint64_t id
        adt_geometry_t geometry
        unsigned transport
        adt_path_t path

    cdef cppclass CPeer "adt::Peer":
        uint64_t id

    cdef cppclass CNode "adt::Node":
        uint64_t id
        shared_ptr[CHixlAgent] hixl

    cdef cppclass CBlockFault "adt::BlockFault":
        int kind
        size_t position
        int64_t value

    cdef cppclass CRun "adt::Run":
        pass

    cdef cppclass CSelection "adt::Selection":
        const int64_t *blocks
        cbool is_slot
        uint64_t slot
        uint64_t offset

    uint64_t bytes_a_tensor(
        const CSelection &local, const CSelection &remote, size_t count, uint64_t size,
        const adt_geometry_t &local_geometry, const adt_geometry_t &remote_geometry)

    CBlockFault make_runs(
        const CSelection &local, const CSelection &remote, size_t count, uint64_t bytes,
        const adt_geometry_t &local_geometry, const adt_geometry_t &remote_geometry, cbool local_is_destination,
        cbool same_cache, vector[CRun] &out) except +

    cdef struct CTransferRequest "adt::TransferRequest":
        shared_ptr[CLocalCache] local
        shared_ptr[CRemoteCache] remote
        adt_opcode_t opcode
        CSelection local_side
        CSelection remote_side
        size_t count
        uint64_t size
        uint32_t local_tensor
        uint32_t remote_tensor
        uint32_t num_tensors
        uint64_t timeout_ns
        cbool allow_inline
        void *cookie

    cdef struct CLayerTensor "adt::LayerTensor":
        uint32_t local
        uint32_t remote
        uint64_t base

    cdef cppclass CLayerRequest "adt::LayerRequest":
        shared_ptr[CGate] gate
        uint32_t first_layer
        uint32_t per_layer
        vector[CLayerTensor] tensors
        vector[uint32_t] starts
        adt_geometry_t remote_view

    cdef struct CSubmitResult "adt::SubmitResult":
        adt_status_t status
        cbool executed
        uint64_t op
        uint64_t bytes
        CBlockFault fault

    cdef struct CPendingRow "adt::PendingRow":
        uint64_t op
        uint64_t peer
        uint64_t cache
        uint32_t opcode
        adt_status_t stop
        uint64_t age_ns
        uint64_t bytes_done
        uint64_t bytes_total
        const char *path
        cbool at_gate
        uint32_t layers_landed
        uint32_t layers

    cdef struct CLeaseRow "adt::LeaseRow":
        uint64_t id
        cbool ended
        cbool adopted
        uint64_t left_ns

    cdef cppclass CConnectRequest "adt::ConnectRequest":
        int wire
        vector[int] data
        int32_t pid
        int pidfd
        uint64_t secret_address
        unsigned char *secret_data "secret.data" ()
        cbool process_vm
        cbool dialed
        uint64_t cluster
        cbool exposed
        cbool layers_told
        uint64_t peer_limit_ns
        cbool *use

    cdef cppclass CClock "adt::Clock":
        uint64_t now_ns()
        void advance(uint64_t ns)

    cdef cppclass CSimNetwork "adt::SimNetwork"

    unsigned kNoDrain
    unsigned kNoEpoch
    unsigned kNoFence
    unsigned kNoKey

    cdef cppclass CEngineOptions "adt::Engine::Options":
        unsigned copy_threads
        unsigned io_threads
        cbool stepped
        shared_ptr[CSimNetwork] network
        uint64_t place
        unsigned left_out

    cdef cppclass CEngine "adt::Engine":
        @staticmethod
        shared_ptr[CEngine] acquire(const CEngineOptions &options) except +

        @staticmethod
        void release(shared_ptr[CEngine] &engine) except +
        CEngine(const CEngineOptions &options) except +
        CClock &clock()
        void step(uint64_t advance_ns) except +
        uint64_t next_due() except +
        shared_ptr[CNode] open_node(
            uint64_t cluster_id, shared_ptr[CRing] ring, uint64_t drain_ns, uint64_t heartbeat_ns,
            uint64_t inline_bytes, uint64_t populate_bytes) except +

        @staticmethod
        void use_rdma(CNode &node, const adt_rdma_t &rdma) except +
        void use_hixl(CNode &node, shared_ptr[CHixlAgent] agent) except +
        void abort_node(const shared_ptr[CNode] &node) except +
        cbool node_quiet(const shared_ptr[CNode] &node)
        cbool wait_node_quiet(const shared_ptr[CNode] &node, uint64_t timeout_ns) except +
        void close_node(const shared_ptr[CNode] &node) except +
        void tell(const shared_ptr[CNode] &node, cbool peers, cbool layers) except +
        vector[CPendingRow] pending(const shared_ptr[CNode] &node) except +
        adt_status_t connect(
            const shared_ptr[CNode] &node, const CConnectRequest &request, shared_ptr[CPeer] &out,
            string &error) except +
        void disconnect(const shared_ptr[CPeer] &peer, adt_status_t status) except +
        cbool expose(const shared_ptr[CPeer] &peer) except +
        string unsettled(const shared_ptr[CPeer] &peer, unsigned transport) except +
        uint64_t fence(const shared_ptr[CPeer] &peer) except +
        uint64_t ping(const shared_ptr[CPeer] &peer) except +
        int loop_fd(const shared_ptr[CPeer] &peer) except +
        cbool hold(
            const shared_ptr[CNode] &node, uint64_t lease, uint64_t cache, const uint64_t *cluster,
            uint64_t ttl_ns) except +
        void end_lease(const shared_ptr[CNode] &node, uint64_t lease) except +
        void end_leases(const shared_ptr[CNode] &node) except +
        vector[CLeaseRow] leases(const shared_ptr[CNode] &node, uint64_t only) except +
        uint64_t adopt_lease(const shared_ptr[CPeer] &peer, uint64_t lease) except +
        uint64_t release_lease(const shared_ptr[CPeer] &peer, uint64_t lease) except +
        cbool loop_progress(const shared_ptr[CPeer] &peer) except +
        adt_status_t register_cache(
            const shared_ptr[CNode] &node, const adt_memory_t &memory, shared_ptr[CLocalCache] &out,
            string &error) except +
        string export_key(const shared_ptr[CLocalCache] &cache, unsigned transport) except +
        void close_cache(const shared_ptr[CNode] &node, const shared_ptr[CLocalCache] &cache) except +
        adt_status_t import_cache(
            const shared_ptr[CPeer] &peer, uint64_t cache_id, const adt_geometry_t &geometry, unsigned transport,
            const adt_key_t &key, shared_ptr[CRemoteCache] &out, string &error) except +
        adt_status_t import_local(
            const shared_ptr[CNode] &node, const shared_ptr[CLocalCache] &source, shared_ptr[CRemoteCache] &out,
            string &error) except +
        void release_cache(const shared_ptr[CRemoteCache] &cache) except +
        CSubmitResult submit(const CTransferRequest &request) except +
        CSubmitResult submit_layers(const CTransferRequest &request, const CLayerRequest &wanted) except +
        void cancel(uint64_t op_id) except +
        cbool progress(uint64_t op_id, uint64_t *done, uint64_t *total)

    const unsigned kLiveCount
    const char *const kLiveNames[]
    int64_t live_count(unsigned kind)
    const cbool kDebugBuild
    cbool in_forked_child()
    void let_go_ring "adt::let_go"(shared_ptr[CRing] &p)
    void let_go_engine "adt::let_go"(shared_ptr[CEngine] &p)
    void let_go_node "adt::let_go"(shared_ptr[CNode] &p)
    void let_go_peer "adt::let_go"(shared_ptr[CPeer] &p)
    void let_go_local "adt::let_go"(shared_ptr[CLocalCache] &p)
    void let_go_remote "adt::let_go"(shared_ptr[CRemoteCache] &p)
    void let_go_hixl "adt::let_go"(shared_ptr[CHixlAgent] &p)
    void let_go_recorder "adt::let_go"(shared_ptr[CRecorder] &p)

cdef extern from "sim.hpp" namespace "adt" nogil:
    cdef struct CSimWay "adt::SimWay":
        uint64_t latency_least
        uint64_t latency_most
        uint64_t bytes_per_second
        uint64_t fragment_bytes
        double loss
        uint64_t resend
        double duplicate
        double reorder
        uint64_t reorder_most
        uint64_t visible_least
        uint64_t visible_most
        cbool blocked

    cdef struct CSimAccess "adt::SimAccess":
        uint64_t at
        uint64_t place
        uint64_t life
        uint64_t cache
        uint64_t address
        uint64_t bytes
        uint32_t tensor
        uint32_t write
        uint64_t by
        uint64_t by_life
        uint64_t op
        uint64_t offset

    cdef cppclass CSimNetwork "adt::SimNetwork":
        CSimNetwork(uint64_t seed, unsigned left_out) except +
        CClock &clock()
        unsigned left_out()
        void set_way(uint64_t source, uint64_t target, const CSimWay &way) except +
        void bind(int fd, uint64_t link, unsigned end, uint64_t peer_place) except +
        void crash(uint64_t place) except +
        vector[CSimAccess] take_accesses() except +

cdef extern from "verbs_stats.hpp" namespace "adt" nogil:
    cdef cppclass CAtomic64 "std::atomic<uint64_t>":
        uint64_t load()
        void store(uint64_t value)
    cdef cppclass CAtomic32 "std::atomic<uint32_t>":
        void store(uint32_t value)
    cdef cppclass CVerbsStats "adt::VerbsStats":
        CAtomic64 registrations
        CAtomic64 registered_bytes
        CAtomic64 registrations_made
        CAtomic64 registrations_shared
        CAtomic64 queue_pairs
        CAtomic64 rebuilds
    CVerbsStats &verbs_stats()
    cdef cppclass CVerbsLimits "adt::VerbsLimits":
        CAtomic64 registration_bytes
        CAtomic64 message_bytes
        CAtomic32 sge
        CAtomic32 requests
        CAtomic32 stuck_queue_pairs
        CAtomic32 stuck_registrations
    CVerbsLimits &verbs_limits()
    cbool c_choose_rdma "adt::choose_rdma"(
        const vector[string] &devices, int32_t gid_index, string &device, int32_t &chosen, string &words) except +

cdef extern from "hixl_stats.hpp" namespace "adt" nogil:
    cdef cppclass CHixlStats "adt::HixlStats":
        CAtomic64 engines
        CAtomic64 registrations
        CAtomic64 registered_bytes
        CAtomic64 connections
        CAtomic64 disconnects
        CAtomic64 forced
        CAtomic64 requests
        CAtomic64 failures
        CAtomic64 polls
    CHixlStats &c_hixl_stats "adt::hixl_stats"()

cdef extern from "copy.hpp" namespace "adt" nogil:
    const char *stream_copy_name()

cdef extern from "region.hpp" namespace "adt" nogil:
    cdef cppclass CRegion "adt::Region":
        CRegion(size_t bytes) except +
        uint64_t id()
        int fd()
        char *base()
        size_t bytes()
        cbool populate(size_t at, size_t step)
    cdef cppclass CSecret "adt::Secret":
        const unsigned char value[32]
    const CSecret &c_secret_of_process "adt::Secret::of_process"() except +
    int c_probe_process_vm "adt::probe_process_vm"(int pid, uint64_t address, const void *expected, size_t bytes)
    int c_allow_ptracer "adt::allow_ptracer"(long pid)


cdef class HixlEngine:
    cdef shared_ptr[CHixlAgent] agent
    cdef readonly str words

cdef class SimNetwork:
    cdef shared_ptr[CSimNetwork] network

cdef class Engine:
    cdef shared_ptr[CEngine] engine
    cdef bint counted
    cdef CEngine *get(self) except NULL

cdef class Ring:
    cdef shared_ptr[CRing] ring
    cdef vector[CEvent] events
    cdef size_t at
    cdef readonly Engine engine
    cdef dict nodes
    cdef public object call_soon
    cdef object transfer_type  # of what `Pair.start` starts
    cdef public uint64_t inline_budget_ns
    cdef uint64_t inline_spent_ns
    cdef bint turn_scheduled
    cdef list deferred
    cdef vector[int64_t] local_blocks
    cdef vector[int64_t] remote_blocks
    cdef bint reading
    cdef complete(self, const CEvent &event)
    cdef bint spend(self, uint64_t ns) except -1

cdef class Node:
    cdef shared_ptr[CNode] node
    cdef readonly Engine engine
    cdef readonly Ring ring

cdef class Peer:
    cdef shared_ptr[CPeer] peer
    cdef readonly Node node

cdef class LocalCache:
    cdef shared_ptr[CLocalCache] cache
    cdef readonly Node node
    cdef readonly Region region

cdef class RemoteCache:
    cdef shared_ptr[CRemoteCache] cache
    cdef readonly Node node
    cdef Engine engine
    cdef readonly str transport
    cdef readonly str path
    cdef readonly str reasons

cdef class Region:
    cdef CRegion *region
    cdef Py_ssize_t shape[1]
    cdef Py_ssize_t strides[1]

cdef class Span:
    cdef object __weakref__
    cdef Region region
    cdef size_t offset
    cdef Py_ssize_t shape[1]

cdef class Secret:
    cdef const CSecret *secret

cdef class Gate:
    cdef object __weakref__
    cdef shared_ptr[CRecorder] recorder
    cdef readonly dict failures
    cdef int check_not_forked(self) except -1
    cdef uint32_t number(self, layer) except? 0xFFFFFFFF

cdef class LayerSignal:
    cdef readonly uint64_t context

cdef class Slot:
    cdef readonly uint64_t index
    cdef readonly uint64_t offset
    cdef readonly uint64_t nbytes

cdef enum:
    LATENCY_BUCKETS = 32

cdef class Counts:
    cdef public long long started
    cdef public long long ok
    cdef public long long failed
    cdef public long long cancelled
    cdef public long long timed_out
    cdef public long long peer_lost
    cdef public long long aborted
    cdef public long long lease_expired
    cdef public long long bytes_pulled
    cdef public long long bytes_pushed
    cdef public long long at_once
    cdef long long buckets[LATENCY_BUCKETS]
    cdef double seconds
    cdef bint unread
    cdef void took(self, double seconds) noexcept

cdef class Pair:
    cdef CTransferRequest request
    cdef readonly LocalCache local
    cdef readonly RemoteCache remote
    cdef readonly object pin
    cdef readonly uint32_t local_tensors
    cdef Ring ring
    cdef Engine engine
    cdef uint64_t cost_base_ns
    cdef uint64_t cost_per_kib_ns
    cdef object cache
    cdef object peer
    cdef Counts counts
    cdef object transfer_type
    cdef dict of_loop
    cdef bint real_time
    cdef double default_timeout
    cdef uint32_t num_tensors
    cdef bint readable
    cdef bint writable
    cdef int read(self, driven, int opcode, local_side, remote_side, double timeout) except -1
    cdef int begin(
        self, transfer, int opcode, local_side, remote_side, uint32_t local_tensor, uint32_t remote_tensor,
        uint32_t num_tensors, double timeout, bint allow_inline, CSubmitResult *result) except -1
    cdef refusal(self, int opcode, const CSubmitResult &result)
    cdef start(self, int opcode, cache, local_blocks, remote_blocks, timeout)
    cdef hand_over(self, transfer, int opcode)
    cdef finish_at_once(self, transfer, int opcode, uint64_t nbytes)
    cdef bint finish_later(self, transfer, uint64_t nbytes) except -1
    cdef count(self, bint pull, uint64_t nbytes)


cdef class ShortWay:
    cdef dict links
    cdef unsigned long thread_id
    cdef object loop
    cdef object is_running
    cdef bint shows_thread
    cdef object no_timeout
    cdef object cache_type
    cdef object blocks_key
    cdef object id_key
    cdef start_short(self, int opcode, key, cache, local_blocks, remote_blocks, timeout)


cdef class HasTable:
    cdef public dict table


cdef class HasPairs:
    cdef public dict pairs
