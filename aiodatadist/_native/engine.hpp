// SPDX-License-Identifier: Apache-2.0
// The engine: it turns transfers into batches, rotates between them, ends them by deadline, cancel or loss of the
// peer, and reports each once, when it is quiet. One engine a process (or one in step mode for a simulation).
//
// Threads. One progress thread waits on the links' engine connections, the peers' pidfds and the timers; the
// transports own their copy and I/O threads. All shared state lies under one mutex, `mu_`: a batch moves a megabyte,
// so one lock a batch costs nothing, and one lock cannot deadlock with itself. What must run without it (calls into
// transports that may take a connection's lock) is deferred to the end of the critical section: see Section.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "aiodatadist/transport.h"
#include "counted.hpp"
#include "fd.hpp"
#include "geometry.hpp"
#include "layers.hpp"
#include "region.hpp"
#include "transports.hpp"

namespace adt {

class HixlAgent;

class Engine;
class SimNetwork;
struct Node;
struct Peer;
struct Op;

// What the loop is told. `cookie` is the operation's, given back exactly once.
enum class EventKind : uint32_t {
    transfer_done = 1,  // token: operation
    peer_lost,          // status: PEER_LOST, or CLOSED for an orderly end by the peer
    peer_quiet,         // the peer can no longer touch local memory
    fenced,             // token: fence
    cache_quiet,        // cache: nothing can touch it any more
    transfer_ended,     // a peer's operation on local memory ended badly and is quiet
    pong,               // token: ping
    lease_over,         // token: lease; status: why it ended. What it held can be touched no more on its account
    lease_answer,       // token: question; status: OK or NOT_FOUND; bytes: the lease's TTL, ns
    lease_lost,         // token: lease of the peer that was adopted here; status: why its owner ended it
    layer_done,         // token: layer, from the operation's first; bytes: ns since it was recorded. The cookie is lent
    endpoint_settled,   // token: transport; status: OK, or why it moves nothing (Engine::unsettled says so in words)
    layer_arrived,      // a peer's layer is in local memory. token: operation; bytes: layer; status: how many are left
};

struct Event {
    EventKind kind = EventKind::transfer_done;
    adt_status_t status = ADT_OK;
    uint64_t node = 0;
    uint64_t peer = 0;
    uint64_t token = 0;
    uint64_t cache = 0;
    uint64_t bytes = 0;
    uint32_t opcode = 0;
    void *cookie = nullptr;
};

// One loop's completion ring: any thread pushes, the loop takes a batch per wake-up.
class Ring : Counted<Live::ring> {
  public:
    Ring();
    int fd() const { return fd_.get(); }
    void push(const Event &event, bool wakes = true);
    // Moves everything that waits into `out` and arms: a push after this call writes the descriptor again, and
    // since both happen under one lock no completion can fall between the last look and the arming.
    void take(std::vector<Event> &out);
    void wake();     // makes the descriptor readable once more
    bool crowded();  // so much waits that what only informs is left out: peers must not fill the memory of a busy loop
    // The caller is about to take: pushes until then need not wake it.
    void expect_take();

  private:
    Fd fd_;
    std::atomic<bool> woken_{false};  // the descriptor was written to: only then has `take` to read it
    std::mutex mu_;
    std::vector<Event> waiting_;
    bool armed_ = true;
};

// The host's clock, one that is moved by hand, or that of another object.
class Clock {
  public:
    explicit Clock(bool manual, const Clock *source = nullptr) : manual_(manual), source_(source) {}
    uint64_t now_ns() const;
    void advance(uint64_t ns) { at_.fetch_add(ns, std::memory_order_relaxed); }

  private:
    const bool manual_;
    const Clock *const source_;
    std::atomic<uint64_t> at_{1'000'000'000};
};

struct LocalCache : Counted<Live::local_cache> {
    uint64_t id = 0;
    adt_geometry_t geometry{};
    std::vector<char *> tensors;
    uint32_t access = 0;
    uint32_t placement = ADT_PLACEMENT_HOST;
    std::array<adt_mem_h, kTransportCount> mems{};
    std::array<bool, kTransportCount> registered{};
    // under Engine::mu_
    bool closed = false;
    bool quiet = false;
    uint32_t operations = 0;                   // local transfers that use it
    uint32_t serving = 0;                      // requests of peers that are being served from it
    std::unordered_set<uint64_t> waiting_for;  // peers that have not said they are done with it
};

struct RemoteCache : Counted<Live::remote_cache> {
    uint64_t id = 0;
    adt_geometry_t geometry{};
    unsigned transport = 0;
    adt_remote_h handle = nullptr;
    adt_path_t path{};
    std::shared_ptr<Peer> peer;
    std::shared_ptr<LocalCache> here;  // a cache of the node itself, which operations pin as well; null: a peer's
    // under Engine::mu_
    bool closed = false;    // the owner took it back, or the link ended
    bool released = false;  // nobody starts anything with it any more: the key goes with the last operation
    uint32_t operations = 0;
};

struct Batch : Counted<Live::batch> {
    adt_batch_t post{};  // first: transports hand this pointer back
    Op *op = nullptr;
    bool detached = false;
    bool beside_model = false;  // counted in its lane
    uint32_t layer = 0;
    std::vector<adt_chunk_t> chunks;
};

// Batches posted on one queue, and the operations that wait for their next turn on it.
struct Lane {
    std::list<Op *> ready;
    uint32_t inflight = 0;
    uint32_t depth = 0;
    // Batches of operations whose model still computes, and how many of them may be posted: it needs a core.
    uint32_t beside_model = 0;
    uint32_t most_beside_model = UINT32_MAX;
    bool pumping = false;  // a post that fails ends its operation, and that must not pump from inside the pump
};

enum class TimerKind : uint8_t { deadline, drain, heartbeat, fence, linger, lease, renew };

struct Timer {
    TimerKind kind;
    uint64_t id;
};
using Timers = std::multimap<uint64_t, Timer>;

// One tensor of a layer: which it is on each side, and how far the peer's bytes lie behind what the runs say.
struct LayerTensor {
    uint32_t local;
    uint32_t remote;
    uint64_t base;
};

// What an operation has to do layer by layer, as a gate lets it.
struct LayerWork {
    struct Layer {
        uint32_t first = 0;       // of its tensors
        uint32_t last = 0;        // one behind
        uint32_t unfinished = 0;  // posted batches that have not come back well
        bool all_cut = false;
        uint64_t recorded_ns = 0;
    };
    std::shared_ptr<Gate> gate;
    uint32_t first_layer = 0;  // the gate's number of layer 0 here
    uint32_t per_layer = 1;    // tensors that make a layer of the owner's
    std::vector<LayerTensor> tensors;
    std::vector<Layer> layers;
    bool waiting = false;         // the gate calls when it logs something
    size_t entries_read = 0;      // of the gate's log
    std::vector<uint32_t> ready;  // recorded layers, in their order
    int32_t model_cpu = -1;       // where the last was recorded
    size_t next = 0;              // the one of them that is being cut
    bool begun = false;           // ... of which something is cut
    uint32_t landed = 0;
    uint32_t untold = 0;  // layers with tensors in this cache that have not landed
};

struct Op : Counted<Live::operation> {
    // The order of starting. Any order of addresses would let a simulation go another way each time.
    struct Older {
        bool operator()(const Op *a, const Op *b) const { return a->id < b->id; }
    };
    uint64_t id = 0;
    adt_opcode_t opcode = ADT_READ;
    std::shared_ptr<Peer> peer;
    std::shared_ptr<LocalCache> local;
    std::shared_ptr<RemoteCache> remote;
    std::vector<Run> runs;
    uint32_t local_tensor = 0;
    uint32_t remote_tensor = 0;
    uint32_t num_tensors = 0;
    // how far batches were cut
    uint32_t at_tensor = 0;
    size_t at_run = 0;
    uint64_t at_byte = 0;
    std::unique_ptr<LayerWork> layers;  // null: everything may go at once
    uint64_t bytes_total = 0;
    uint64_t bytes_done = 0;
    uint32_t inflight = 0;  // posted batches that have not retired
    uint32_t detached = 0;  // of those, the ones whose local memory is quiet already
    bool exhausted = false;
    bool queued = false;  // stands in its lane's ready list, at `place`
    bool held = false;    // stands in its peer's list `held` instead
    std::list<Op *>::iterator place;
    bool reported = false;  // its future was told
    adt_status_t stop = ADT_OK;
    uint32_t epoch = 0;
    uint64_t started_ns = 0;
    Timers::iterator deadline;
    Timers::iterator drain;
    bool has_deadline = false;
    bool has_drain = false;
    void *cookie = nullptr;
};

// Messages of the engine connection, both ways, little endian, 32 bytes each. The connection is authenticated by the
// handshake before the engine gets it; what is not of this form ends the link.
enum class Say : uint8_t {
    heartbeat = 0,
    ping,        // a: token; answered at once, without Python
    pong,        // a: token
    abort,       // a: operation, b: cache of the receiver; the sender is ending an operation early
    ended,       // a: operation, b: cache, c: bytes; an operation ended badly and touches the receiver's memory no more
    fence,       // a: sequence, b: cache or 0, flags 1: the cache is being closed
    fence_done,  // a: sequence
    disconnect,  // the link is over; the receiver ends its operations
    goodbye,     // the sender's operations are over: its process touches the receiver's memory no more
    // Leases. Only who has adopted or released one is told of any.
    adopt,         // a: lease of the receiver, b: token; `renew` counts for it from now on
    release,       // a: lease of the receiver, b: token, flags 1: no operation of the sender is running on this link
    lease_answer,  // a: lease, b: token, c: TTL in ns, status: OK or NOT_FOUND
    renew,         // the sender is still there: counts for every lease that it adopted over this connection
    lease_over,    // a: lease of the sender that the receiver had adopted, status: why it has ended
    // Only told where the receiver's version knows it.
    layer,  // a: operation, b: cache of the receiver, c: its layer; all its bytes are there. status: how many are left
    // Only where both use a transport whose endpoints talk: an adt_message, whose kind and small are flags and opcode.
    endpoint,
};
struct WireMessage {
    uint8_t type;
    uint8_t flags;
    uint16_t opcode;
    int32_t status;
    uint64_t a;
    uint64_t b;
    uint64_t c;
};
static_assert(sizeof(WireMessage) == 32, "the wire format has no padding");

// Numbers that come and never go, kept as runs: an owner counts its caches up, so a few runs hold all that it closed.
class NumberSet {
  public:
    bool contains(uint64_t number) const {
        const auto after = runs_.upper_bound(number);
        return after != runs_.begin() && number <= std::prev(after)->second;
    }
    void insert(uint64_t number) {
        if (contains(number)) return;
        uint64_t last = number;
        const auto after = runs_.upper_bound(number);
        if (after != runs_.end() && after->first - 1 == number) last = after->second;
        if (after != runs_.begin() && std::prev(after)->second + 1 == number) {
            std::prev(after)->second = last;
        } else {
            runs_.emplace_hint(after, number, last);
        }
        if (last != number) runs_.erase(after);
    }
    size_t runs() const { return runs_.size(); }

  private:
    std::map<uint64_t, uint64_t> runs_;  // first to last
};

// A fence that the peer asked for: acknowledged when no earlier operation of ours on its memory is left.
struct FenceFromPeer {
    uint64_t seq;
    uint64_t cache;
};

// A fence that we asked for.
struct FenceOnPeer {
    uint64_t token;
    uint64_t seq;
    std::shared_ptr<LocalCache> closing;  // null: dd.fence(), or
    std::vector<uint64_t> leases;         // leases that have ended and are over when the fence is
    uint64_t answered_ns = 0;             // when the peer said that it is done; 0: it has not
};

// Blocks that the owner keeps for a peer. Which ones, Python knows; here it is time and who may still touch them.
struct Lease : Counted<Live::lease> {
    uint64_t id = 0;
    std::shared_ptr<Node> node;
    uint64_t cache = 0;
    uint64_t cluster = 0;  // the peer that it is held for
    bool anyone = false;   // for whoever adopts it first
    uint64_t ttl_ns = 0;
    uint64_t renewed_ns = 0;        // that of the link below counts as well
    std::shared_ptr<Peer> adopter;  // the link over which it was adopted, while it lasts
    bool lost = false;              // that link has ended
    bool ended = false;             // waits for its fences
    adt_status_t why = ADT_OK;      // OK: released, TIMEOUT, PEER_LOST, CLOSED
    uint32_t fences = 0;
    Timers::iterator expiry;
};

struct LeaseRow {
    uint64_t id;
    bool ended;
    bool adopted;
    uint64_t left_ns;  // until it ends unless it is renewed; 0: it has ended
};

// A request of a peer that is being served, between begin_serve and end_serve.
struct Served : Counted<Live::served> {
    std::shared_ptr<Peer> peer;
    std::shared_ptr<LocalCache> cache;
    uint32_t epoch = 0;
};

// One link's native side, one epoch. The engine connection carries WireMessage both ways.
//
// A node's copies between its own caches are operations like all others, on a peer that is the node itself: it has no
// wire, no process and no endpoints, so it is never lost, nobody fences on it, and only the end of the node ends it. It
// stands in Node::self and in none of the tables of links.
struct Peer : Counted<Live::peer> {
    enum class State : uint8_t { active, ending, quiet };

    uint64_t id = 0;
    std::shared_ptr<Node> node;
    Fd wire;
    Fd pidfd;
    bool self = false;
    bool same_host = false;
    int32_t pid = 0;
    uint64_t secret_address = 0;
    std::array<unsigned char, Secret::kBytes> secret{};
    bool exposed = false;      // the peer's process can touch local memory by itself: same host, and it may have a key
    bool layers_told = false;  // the peer wants to hear of layers that have landed in its memory
    std::array<adt_endpoint_h, kTransportCount> endpoints{};
    std::array<std::string, kTransportCount> unsettled;  // why an endpoint moves nothing; under Engine::mu_
    bool unstoppable = false;  // it comes to memory by a transport by which it cannot be kept out; set by connect
    std::array<Lane, kTransportCount> lanes;
    std::array<Lane, kTransportCount> short_lanes;  // of what the loop's thread may receive: it waits for nothing long
    // under Engine::mu_
    State state = State::active;
    adt_status_t end_status = ADT_OK;
    bool endpoints_gone = false;
    int32_t endpoints_going = 0;  // of those that were disconnected, the ones by which the peer may still come
    bool process_gone = false;    // or another program, which has nothing of what the peer had mapped
    bool goodbye_sent = false;
    bool goodbye_received = false;
    bool wire_open = true;
    bool lingered = false;  // waited long enough for the goodbye of a peer that cannot touch our memory
    std::set<Op *, Op::Older> ops;
    std::unordered_map<uint64_t, uint32_t> leftovers;  // the peer's caches: detached writes still on the wire
    std::vector<Op *> held;                            // writes that wait until there is none
    uint32_t inline_active = 0;                        // small copies running in loop threads right now
    uint32_t epoch = 0;                                // the newest fence of the peer that we have seen
    uint32_t min_epoch = 0;                            // requests older than this are refused (a fence ended by force)
    uint32_t fence_seq = 0;
    std::unordered_multimap<uint64_t, std::weak_ptr<RemoteCache>> imports;  // one cache may be imported repeatedly
    NumberSet closed_caches;                                                // ids never come back
    std::unordered_set<uint64_t> pings;                                     // tokens that the peer has not sent back
    std::vector<FenceFromPeer> fences_from_peer;
    std::vector<FenceOnPeer> fences_on_peer;
    std::vector<const Served *> serving;
    bool fence_timer = false;
    uint64_t fence_since = 0;  // when the timer that watches the peer's answers began
    std::string out;
    bool wants_write = false;
    std::array<char, sizeof(WireMessage)> in{};
    size_t in_size = 0;
    uint64_t last_heard = 0;
    uint64_t last_sent = 0;
    uint64_t shorter_limit_ns = 0;  // the shorter of both sides' heartbeat limits
    uint64_t cluster = 0;
    // leases of ours
    std::unordered_set<uint64_t> leases;  // that the peer has adopted over this link
    uint64_t renewed_ns = 0;              // when it renewed them
    std::vector<uint64_t> leases_ended;   // that wait for a fence of their own on the peer
    uint32_t lease_fences = 0;
    // leases of the peer's
    std::unordered_map<uint64_t, uint64_t> adopted;      // by us, with their TTL in ns; 0: it has not answered
    std::unordered_map<uint64_t, bool> lease_questions;  // tokens that it has not answered; true: of an adoption
    Timers::iterator renewal;
    bool has_renewal = false;
};

// Native side of one DataDist.
struct Node : Counted<Live::node> {
    uint64_t id = 0;
    uint64_t cluster_id = 0;
    std::shared_ptr<Ring> ring;
    uint64_t drain_ns = 0;
    uint64_t heartbeat_limit_ns = 0;
    uint64_t inline_bytes = 0;
    uint64_t populate_bytes = 0;
    std::string rdma_device;  // empty: the node uses no RDMA
    adt_rdma_t rdma{};
    std::shared_ptr<HixlAgent> hixl;  // null: the node uses no HIXL
    // under Engine::mu_
    std::unordered_map<uint64_t, std::shared_ptr<LocalCache>> caches;
    std::unordered_map<uint64_t, std::shared_ptr<Peer>> peers;
    std::shared_ptr<Peer> self;    // from the first local copy until the node is closed and they have ended
    bool hears_peers = true;       // what peers did to local memory is told; else nobody would hear it
    bool wakes_for_layers = true;  // a layer that has landed wakes the loop; else it is told with what comes next
    bool closed = false;
};

struct PendingRow {
    uint64_t op;
    uint64_t peer;
    uint64_t cache;
    uint32_t opcode;
    adt_status_t stop;
    uint64_t age_ns;
    uint64_t bytes_done;
    uint64_t bytes_total;
    const char *path;
    bool at_gate;  // it has nothing to move until a layer is recorded
    uint32_t layers_landed;
    uint32_t layers;  // 0: all may go at once
};

struct TransferRequest {
    std::shared_ptr<LocalCache> local;
    std::shared_ptr<RemoteCache> remote;
    adt_opcode_t opcode = ADT_READ;
    Selection local_side;
    Selection remote_side;
    size_t count = 0;   // entries of the block lists
    uint64_t size = 0;  // bytes of each tensor, where a side is a slot
    uint32_t local_tensor = 0;
    uint32_t remote_tensor = 0;
    uint32_t num_tensors = 0;
    uint64_t timeout_ns = 0;  // 0: none
    bool allow_inline = true;
    void *cookie = nullptr;
};

// Beside a TransferRequest, whose tensor numbers do not count here.
struct LayerRequest {
    std::shared_ptr<Gate> gate;
    uint32_t first_layer = 0;
    uint32_t per_layer = 1;
    std::vector<LayerTensor> tensors;
    std::vector<uint32_t> starts;  // the first tensor of each layer, and the number of all
    adt_geometry_t remote_view{};  // how the remote side counts blocks, from the base of each tensor on
};

struct SubmitResult {
    adt_status_t status = ADT_OK;  // ADT_OK: done already. ADT_PENDING: an event with the cookie follows. Else failed:
    bool executed = false;         // while it ran (true), or refused before anything moved (false)
    uint64_t op = 0;
    uint64_t bytes = 0;
    BlockFault fault;
};

struct ConnectRequest {
    int wire = -1;
    std::vector<int> data;
    int32_t pid = 0;
    int pidfd = -1;
    uint64_t secret_address = 0;  // where process_vm finds the secret of the peer's process; 0: it cannot
    std::array<unsigned char, Secret::kBytes> secret{};
    bool process_vm = false;
    bool dialed = false;
    uint64_t cluster = 0;  // the peer's cluster id, for whom leases are held
    bool exposed = true;   // false: the peer gets its first key after `expose`
    bool layers_told = false;
    uint64_t peer_limit_ns = 0;  // the silence that the peer bears; 0: as long as this side
    std::array<bool, kTransportCount> use{};
};

// epoll_event.data of the progress thread: what became ready. The upper byte is the kind, the rest an id or an index.
enum class Ready : uint64_t { kick, wire, process, transport };
constexpr uint64_t tag(Ready kind, uint64_t value) {
    return static_cast<uint64_t>(kind) << 56 | value;
}

// Rules that an engine in step mode can be told to break, so that tests can show that they would notice.
enum LeftOut : unsigned {
    kNoDrain = 1,  // an operation that was stopped ends before what was posted is back
    kNoEpoch = 2,  // requests from before a fence that was ended by force are served
    kNoFence = 4,  // a fence asks nobody
    kNoKey = 8,    // the key of a request is not compared with that of the memory
};

class Engine : public std::enable_shared_from_this<Engine>, Counted<Live::engine> {
  public:
    struct Options {
        unsigned copy_threads = 2;
        unsigned io_threads = 2;
        bool stepped = false;
        // In step mode only.
        std::shared_ptr<SimNetwork> network = nullptr;  // whose clock counts
        uint64_t place = 0;                             // where this engine is there
        unsigned left_out = 0;                          // LeftOut: what a test of the tests does without
    };

    explicit Engine(const Options &options);
    ~Engine();  // joins every thread
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;

    // One engine a process, counted. A last release while a stopped peer can still touch memory keeps it running.
    static std::shared_ptr<Engine> acquire(const Options &options);
    static void release(std::shared_ptr<Engine> &engine);

    Clock &clock() { return clock_; }
    bool stepped() const { return options_.stepped; }
    void step(uint64_t advance_ns);
    uint64_t next_due();  // when a step has something to do although nothing came over a descriptor; UINT64_MAX: never

    std::shared_ptr<Node> open_node(uint64_t cluster_id, std::shared_ptr<Ring> ring, uint64_t drain_ns,
                                    uint64_t heartbeat_limit_ns, uint64_t inline_bytes, uint64_t populate_bytes);
    // Before the node has caches or links; rdma.device is copied.
    static void use_rdma(Node &node, const adt_rdma_t &rdma);
    // Likewise. The engine keeps the agent until its end.
    void use_hixl(Node &node, std::shared_ptr<HixlAgent> agent);
    void abort_node(const std::shared_ptr<Node> &node);
    bool node_quiet(const std::shared_ptr<Node> &node);
    bool wait_node_quiet(const std::shared_ptr<Node> &node, uint64_t timeout_ns);  // blocks
    void close_node(const std::shared_ptr<Node> &node);
    // Says what the node's loop hears: see Node.
    void tell(const std::shared_ptr<Node> &node, bool peers, bool layers);
    std::vector<PendingRow> pending(const std::shared_ptr<Node> &node);

    // Takes over every descriptor in `request`, whatever comes of it.
    adt_status_t connect(const std::shared_ptr<Node> &node, const ConnectRequest &request, std::shared_ptr<Peer> &out,
                         std::string &error);
    void disconnect(const std::shared_ptr<Peer> &peer, adt_status_t status);
    // Before the peer gets its first key. False: the link is over, and it must not get one.
    bool expose(const std::shared_ptr<Peer> &peer);
    // Why the endpoint that event endpoint_settled named moves nothing; empty if it does.
    std::string unsettled(const std::shared_ptr<Peer> &peer, unsigned transport);
    uint64_t fence(const std::shared_ptr<Peer> &peer);
    uint64_t ping(const std::shared_ptr<Peer> &peer);
    // A duplicate of the descriptor on which the loop may wait for short answers, or -1; the caller closes it.
    int loop_fd(const std::shared_ptr<Peer> &peer);

    // Keeps a lease until its TTL has passed since it was last renewed. `cluster` null: for whoever adopts it first.
    // False: there is one with this id, or the node is closed.
    bool hold(const std::shared_ptr<Node> &node, uint64_t lease, uint64_t cache, const uint64_t *cluster,
              uint64_t ttl_ns);
    void end_lease(const std::shared_ptr<Node> &node, uint64_t lease);
    void end_leases(const std::shared_ptr<Node> &node);
    // All of a node that are not over, or the one with this id.
    std::vector<LeaseRow> leases(const std::shared_ptr<Node> &node, uint64_t only = 0);
    // A lease of the peer's, from here on renewed natively. lease_answer follows with the token that is returned.
    uint64_t adopt_lease(const std::shared_ptr<Peer> &peer, uint64_t lease);
    uint64_t release_lease(const std::shared_ptr<Peer> &peer, uint64_t lease);
    // Takes the answers that wait there. Their events lie in the node's ring afterwards, which was not woken for them:
    // drain it. False: the descriptor is of no more use.
    bool loop_progress(const std::shared_ptr<Peer> &peer);

    adt_status_t register_cache(const std::shared_ptr<Node> &node, const adt_memory_t &memory,
                                std::shared_ptr<LocalCache> &out, std::string &error);
    std::string export_key(const std::shared_ptr<LocalCache> &cache, unsigned transport);
    void close_cache(const std::shared_ptr<Node> &node, const std::shared_ptr<LocalCache> &cache);

    adt_status_t import_cache(const std::shared_ptr<Peer> &peer, uint64_t cache_id, const adt_geometry_t &geometry,
                              unsigned transport, const adt_key_t &key, std::shared_ptr<RemoteCache> &out,
                              std::string &error);
    // A cache of the node itself as the source of local copies. Closing it ends this, too, after running copies.
    adt_status_t import_local(const std::shared_ptr<Node> &node, const std::shared_ptr<LocalCache> &source,
                              std::shared_ptr<RemoteCache> &out, std::string &error);
    void release_cache(const std::shared_ptr<RemoteCache> &cache);

    SubmitResult submit(const TransferRequest &request);
    // A write whose layers go as the gate lets them; an event with the cookie follows for each, and one for the end.
    SubmitResult submit_layers(const TransferRequest &request, const LayerRequest &wanted);
    // Called by a gate in the recording thread.
    void read_gate(uint64_t op_id);
    void cancel(uint64_t op_id);
    bool progress(uint64_t op_id, uint64_t *done, uint64_t *total);
    std::string last_error(unsigned transport);

  private:
    // A critical section: holds `mu_`, and runs what was deferred after letting it go.
    class Section {
      public:
        explicit Section(Engine &engine) : lock_(engine.mu_) {}
        explicit Section(std::unique_lock<std::mutex> lock) : lock_(std::move(lock)) {}
        ~Section() {
            lock_.unlock();
            for (size_t i = 0; i < deferred_.size(); ++i) deferred_[i]();
        }
        Section(const Section &) = delete;
        Section &operator=(const Section &) = delete;
        void defer(std::function<void()> action) { deferred_.push_back(std::move(action)); }

      private:
        std::unique_lock<std::mutex> lock_;
        std::vector<std::function<void()>> deferred_;
    };

    struct Transport {
        const adt_transport_ops_t *ops = nullptr;
        adt_transport_h handle = nullptr;
        Lane lane;  // ADT_TRANSPORT_SHARED_QUEUE
        // Held from a poll until its completions are taken in: two of one batch may come, and their order counts.
        std::mutex poll_mu;
    };

    // engine.cpp: operations
    Lane &lane_of(const Op &op);
    static bool is_short(const Op &op);
    Op &admit(const TransferRequest &request, uint64_t bytes, std::vector<Run> &runs);
    bool runs_long(const Op &op) const;
    void enqueue(Section &s, Op &op, bool later = false);
    void pump_starting();
    bool cut(Op &op, Batch &batch);
    void pump(Section &s, Lane &lane);
    void complete_batch(Section &s, const adt_completion_t &completion);
    void stop_op(Section &s, Op &op, adt_status_t status);
    void settle(Section &s, Op &op);
    void report(Section &s, Op &op);
    void retire(Section &s, Op &op);
    static bool hold_back(Op &op);
    std::vector<Lane *> release_held(Peer &peer, uint64_t cache);
    Batch *take_batch();
    void give_batch(Batch *batch);
    void poll_transport(unsigned index);
    SubmitResult execute_inline(const TransferRequest &request, uint64_t bytes, const std::vector<Run> &runs);
    static adt_status_t usable(const TransferRequest &request);
    void with_endpoint(const std::shared_ptr<Peer> &peer, unsigned transport,
                       const std::function<void(const adt_transport_ops_t *, adt_transport_h, adt_endpoint_h)> &use);

    // layers.cpp
    void follow_gate(Section &s, Op &op);
    void follow_heard(Section &s);
    void follow_heard();
    void leave_gate(const Op &op);
    void land_empty(Section &s, Op &op);
    void land_layer(Section &s, Op &op, uint32_t layer);
    void stop_at_gates(Section &s, Peer &peer, const LocalCache *local, uint64_t remote, adt_status_t status);

    // link.cpp: peers, fences, closing
    // `told`: the loop hears of it (the peer or the network ended the link, not this side).
    void end_peer(Section &s, Peer &peer, adt_status_t status, bool told);
    void disconnect_endpoints(const std::shared_ptr<Peer> &peer);
    void settle_peer(Section &s, Peer &peer);
    void settle_cache(Section &s, Node &node, LocalCache &cache);
    void deregister(LocalCache &cache, std::shared_ptr<Ring> ring, const Event &event);
    static bool pins_for(const Node &node, const Transport &transport);
    bool pinned(const LocalCache &cache) const;
    void close_local(Section &s, const std::shared_ptr<Node> &node, const std::shared_ptr<LocalCache> &cache);
    void send(Section &s, Peer &peer, const WireMessage &message);
    void tell_end(Section &s, Peer &peer, Say type, uint64_t op, uint64_t cache, uint64_t bytes, adt_status_t status,
                  uint32_t opcode);
    void flush(Section &s, Peer &peer);
    static void close_wire(Peer &peer);
    void read_wire(Section &s, Peer &peer);
    void inform(const Peer &peer, EventKind kind, const WireMessage &message);
    void handle(Section &s, Peer &peer, const WireMessage &message);
    void take_over(Section &s, Peer &peer);
    void answer_fences(Section &s, Peer &peer, size_t from = 0);
    void start_fence(Section &s, Peer &peer, uint64_t token, std::shared_ptr<LocalCache> closing,
                     std::vector<uint64_t> leases = {});
    void finish_fence(Section &s, Peer &peer, const FenceOnPeer &fence, adt_status_t status);
    void finish_answered(Section &s, Peer &peer);
    void force_fences(Section &s, Peer &peer, bool silent);
    void release_remote(Section &s, RemoteCache &cache);
    void close_remote(Section &s, const std::weak_ptr<RemoteCache> &import);
    void close_imports(Section &s, Peer &peer, uint64_t cache);
    static bool nothing_left(const Node &node);
    static bool answers_late(const Peer &peer, uint64_t now);
    void emit(const Node &node, const Event &event, bool wakes = true) const { node.ring->push(event, wakes); }

    // leases.cpp
    bool handle_lease(Section &s, Peer &peer, const WireMessage &message);
    void end_lease(Section &s, Lease &lease, adt_status_t why, const Peer *done = nullptr);
    void end_leases(Section &s, const Node &node, uint64_t cache);
    void fence_leases(Section &s, Peer &peer);
    void leases_fenced(Section &s, Peer &peer, const std::vector<uint64_t> &leases);
    void finish_lease(Section &s, Lease &lease);
    void expire_lease(Section &s, uint64_t id);
    void renew_leases(Section &s, Peer &peer);
    void schedule_renewal(Peer &peer, uint64_t ttl_ns);
    void leave_leases(Peer &peer);
    static uint64_t due_ns(const Lease &lease);
    uint64_t ask_lease(Section &s, Peer &peer, Say what, uint8_t flags, uint64_t lease);

    // link.cpp: the host table that transports call
    static void host_notify(void *ctx, adt_transport_h transport);
    static uint64_t host_now(void *ctx);
    static adt_status_t host_begin_serve(void *ctx, void *link, adt_request_t *request, void **token);
    static void host_end_serve(void *ctx, void *token);
    static void host_endpoint_lost(void *ctx, void *link, adt_status_t status, const char *reason);
    static void host_endpoint_settled(void *ctx, void *link, adt_transport_h transport, adt_status_t status,
                                      const char *reason);
    static void host_endpoint_gone(void *ctx, void *link);
    static void host_mem_gone(void *ctx, void *token);
    static void host_tell(void *ctx, void *link, const adt_message_t *message);

    // progress thread
    void run();
    void progress_once(int timeout_ms);
    int wait_ms();
    void run_timers();
    void fire(Section &s, const Timer &timer);
    Timers::iterator add_timer(uint64_t at_ns, TimerKind kind, uint64_t id);
    void kick();
    void kick_to_start();

    const EngineAlive alive_;  // first, so that it is the last to go
    const Options options_;
    Clock clock_;
    adt_host_t host_{};
    std::array<Transport, kTransportCount> transports_;
    Fd epoll_;
    Fd kick_;
    // Guards the use of endpoints outside `mu_` against their disconnecting. Taken before transports' locks and `mu_`;
    // recursive, because a transport may complete batches (and so end another peer) inside cancel.
    std::recursive_mutex endpoints_mu_;
    std::mutex mu_;
    std::condition_variable quiet_cv_;
    std::mutex heard_mu_;          // a leaf
    std::vector<uint64_t> heard_;  // operations whose gates have something new to say
    Timers timers_;
    uint64_t waking_at_ = 0;  // when the progress thread will look at the timers by itself
    std::unordered_map<uint64_t, std::unique_ptr<Op>> ops_;
    std::vector<std::unique_ptr<Batch>> spare_batches_;
    std::vector<std::vector<Run>> spare_runs_;
    std::vector<uint64_t> starting_;  // operations whose first batches the progress thread posts
    std::atomic<pid_t> progress_thread_{0};
    std::atomic<bool> yields_{false};  // it lets others go first, until it has read the next kick
    std::unordered_map<uint64_t, std::shared_ptr<Peer>> peers_;
    std::unordered_map<uint64_t, std::shared_ptr<Node>> nodes_;
    std::unordered_map<uint64_t, std::unique_ptr<Lease>> leases_;
    uint64_t next_id_ = 1;
    bool stopping_ = false;
    std::thread thread_;
};

// Drops a reference. In a forked child nothing native may be destroyed (threads to join do not exist there, locks may
// be held for ever), so there the reference is left to the end of the process.
template <typename T>
void let_go(std::shared_ptr<T> &reference) {
    if (in_forked_child()) {
        [[maybe_unused]] auto *kept = new std::shared_ptr<T>(std::move(reference));
    } else {
        reference.reset();
    }
}

}  // namespace adt
