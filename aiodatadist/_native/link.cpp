// SPDX-License-Identifier: Apache-2.0
// Links natively: the engine connection, heartbeats, fences, the closing of caches and of links, and what the owner
// of memory answers to transports. None of it needs Python: a peer whose loop is blocked stays linked and answers.
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <utility>

#include "engine.hpp"
#include "hixl_open.hpp"

namespace adt {
namespace {

constexpr uint8_t kClosing = 1;                  // flags of Say::fence
constexpr int kMessagesATurn = 1024;             // read of one peer before others, and other threads, get the lock
constexpr size_t kMaxUnsent = size_t{16} << 20;  // a peer that asks and never reads must not fill our memory
constexpr size_t kMaxFences = 65536;
constexpr size_t kMaxRuns = 65536;  // of numbers of caches that a peer closed
constexpr uint64_t kLeastLimit = 1'000'000;
constexpr int kLastTurns = 8;  // of kMessagesATurn each: a peer that never stops must not hold up the end

// What transports call a link: its id, since ids are never used twice and addresses are.
void *name_of(const Peer &peer) {
    return reinterpret_cast<void *>(static_cast<uintptr_t>(peer.id));
}
uint64_t id_of(void *link) {
    return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(link));
}

bool readable(const Peer &peer) {
    pollfd wire{peer.wire.get(), POLLIN, 0};
    return peer.wire_open && poll(&wire, 1, 0) > 0;
}

}  // namespace

// --------------------------------------------------------------------------------------------------------- nodes

std::shared_ptr<Node> Engine::open_node(uint64_t cluster_id, std::shared_ptr<Ring> ring, uint64_t drain_ns,
                                        uint64_t heartbeat_limit_ns, uint64_t inline_bytes, uint64_t populate_bytes) {
    auto node = std::make_shared<Node>();
    node->cluster_id = cluster_id;
    node->ring = std::move(ring);
    // Timers repeat at fractions of these: at 0 they would keep the progress thread in one endless turn.
    node->drain_ns = std::max(drain_ns, kLeastLimit);
    node->heartbeat_limit_ns = std::max(heartbeat_limit_ns, kLeastLimit);
    node->inline_bytes = inline_bytes;
    node->populate_bytes = populate_bytes;
    const std::lock_guard<std::mutex> lock(mu_);
    node->id = next_id_++;
    nodes_.emplace(node->id, node);
    return node;
}

void Engine::use_rdma(Node &node, const adt_rdma_t &rdma) {
    node.rdma_device = rdma.device;
    node.rdma = rdma;
    node.rdma.device = node.rdma_device.c_str();
}

void Engine::use_hixl(Node &node, std::shared_ptr<HixlAgent> agent) {
    for (const Transport &t : transports_) {
        if (t.ops == &kHixlOps) adopt_hixl(t.handle, agent);
    }
    node.hixl = std::move(agent);
}

void Engine::abort_node(const std::shared_ptr<Node> &node) {
    if (in_forked_child()) return;
    Section s(*this);
    node->closed = true;
    std::vector<std::shared_ptr<Peer>> peers;
    for (const auto &[id, peer] : node->peers) peers.push_back(peer);
    if (node->self) peers.push_back(node->self);
    for (const std::shared_ptr<Peer> &peer : peers) end_peer(s, *peer, ADT_ERR_CLOSED, false);
    end_leases(s, *node, 0);
}

// No peer can touch the node's memory, and no operation is unfinished.
bool Engine::nothing_left(const Node &node) {
    return node.peers.empty() && (!node.self || (node.self->ops.empty() && node.self->inline_active == 0));
}

bool Engine::node_quiet(const std::shared_ptr<Node> &node) {
    if (in_forked_child()) return true;
    const std::lock_guard<std::mutex> lock(mu_);
    return nothing_left(*node);
}

bool Engine::wait_node_quiet(const std::shared_ptr<Node> &node, uint64_t timeout_ns) {
    if (in_forked_child()) return true;
    std::unique_lock<std::mutex> lock(mu_);
    return quiet_cv_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return nothing_left(*node); });
}

void Engine::tell(const std::shared_ptr<Node> &node, bool peers, bool layers) {
    if (in_forked_child()) return;
    Section s(*this);
    node->hears_peers = peers;
    if (!std::exchange(node->wakes_for_layers, layers) && layers) node->ring->wake();  // for those that wait
}

void Engine::close_node(const std::shared_ptr<Node> &node) {
    if (in_forked_child()) return;
    Section s(*this);
    node->closed = true;
    std::vector<std::shared_ptr<LocalCache>> caches;
    for (const auto &[id, cache] : node->caches) caches.push_back(cache);
    for (const std::shared_ptr<LocalCache> &cache : caches) close_local(s, node, cache);
    end_leases(s, *node, 0);
    if (const std::shared_ptr<Peer> self = node->self) {
        s.defer([self] {});
        end_peer(s, *self, ADT_ERR_CLOSED, false);
    }
    nodes_.erase(node->id);
    if (node->hixl) node->hixl->retire();
}

// -------------------------------------------------------------------------------------------------------- caches

bool Engine::pins_for(const Node &node, const Transport &transport) {
    return transport.ops == &kHixlOps ? node.hixl != nullptr : !node.rdma_device.empty();
}

adt_status_t Engine::register_cache(const std::shared_ptr<Node> &node, const adt_memory_t &memory,
                                    std::shared_ptr<LocalCache> &out, std::string &error) {
    if (in_forked_child()) return ADT_ERR_CLOSED;
    if (!valid_geometry(memory.geometry)) return ADT_ERR_GEOMETRY;
    if (memory.cache_id == 0) {
        error = "cache id 0 stands for all caches";
        return ADT_ERR_INVALID;
    }
    {
        // Nobody would hear of the quiet of a cache that came after the end, and let go of its memory.
        const std::lock_guard<std::mutex> lock(mu_);
        if (node->closed) return ADT_ERR_CLOSED;
    }
    auto cache = std::make_shared<LocalCache>();
    cache->id = memory.cache_id;
    cache->geometry = memory.geometry;
    cache->access = memory.access;
    cache->placement = memory.placement;
    for (uint32_t i = 0; i < memory.geometry.num_tensors; ++i) {
        cache->tensors.push_back(static_cast<char *>(memory.tensors[i]));
    }
    adt_memory_t known = memory;
    known.rdma = node->rdma_device.empty() ? nullptr : &node->rdma;
    known.hixl = reinterpret_cast<adt_hixl_h>(node->hixl.get());
    for (unsigned i = 0; i < kTransportCount; ++i) {
        const Transport &t = transports_[i];
        if ((t.ops->flags & ADT_TRANSPORT_PINS) != 0 && !pins_for(*node, t)) continue;
        if (memory.placement != ADT_PLACEMENT_HOST && (t.ops->flags & ADT_TRANSPORT_DEVICE) == 0) continue;
        const adt_status_t status = t.ops->reg_mem(t.handle, &known, &cache->mems[i]);
        if (status == ADT_OK) {
            cache->registered[i] = true;
            continue;
        }
        // The others serve it, and peers get no key for this one.
        if (status == ADT_ERR_UNSUPPORTED && t.ops == &kHixlOps && memory.placement == ADT_PLACEMENT_HOST) continue;
        error = std::string(t.ops->name) + ": " + last_error(i);
        deregister(*cache, nullptr, {});
        return status;
    }
    if (std::find(cache->registered.begin(), cache->registered.end(), true) == cache->registered.end()) {
        error = "no transport of this DataDist reaches device memory";
        return ADT_ERR_UNSUPPORTED;
    }
    Section s(*this);
    if (!node->caches.emplace(cache->id, cache).second) {
        error = "a cache with this id is registered already";
        s.defer([this, cache] { deregister(*cache, nullptr, {}); });
        return ADT_ERR_INVALID;
    }
    out = cache;
    // Closed while the transports registered it, which may take long: taken back in the ordinary way.
    if (node->closed) close_local(s, node, cache);
    return ADT_OK;
}

namespace {

// A cache that is told to be quiet when the last transport has let go of its memory.
struct Going {
    std::shared_ptr<Ring> ring;
    Event event;
    std::atomic<uint32_t> left{1};

    void one_less() {
        if (left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        if (ring) ring->push(event);
        delete this;
    }
};

}  // namespace

// Takes a cache back from all transports, and then pushes the event, if there is a ring.
void Engine::deregister(LocalCache &cache, std::shared_ptr<Ring> ring, const Event &event) {
    auto *const going = new Going{std::move(ring), event};
    for (unsigned i = 0; i < kTransportCount; ++i) {
        if (!std::exchange(cache.registered[i], false)) continue;
        going->left.fetch_add(1, std::memory_order_relaxed);
        const Transport &t = transports_[i];
        if (t.ops->dereg_mem(t.handle, cache.mems[i], going) != ADT_PENDING) going->one_less();
    }
    going->one_less();
}

void Engine::host_mem_gone(void *, void *token) {
    static_cast<Going *>(token)->one_less();
}

bool Engine::pinned(const LocalCache &cache) const {
    for (unsigned i = 0; i < kTransportCount; ++i) {
        if (cache.registered[i] && (transports_[i].ops->flags & ADT_TRANSPORT_PINS) != 0) return true;
    }
    return false;
}

std::string Engine::export_key(const std::shared_ptr<LocalCache> &cache, unsigned transport) {
    if (!cache->registered[transport]) return {};
    const Transport &t = transports_[transport];
    size_t size = 0;
    t.ops->export_key(t.handle, cache->mems[transport], nullptr, 0, &size);
    std::string key(size, '\0');
    if (t.ops->export_key(t.handle, cache->mems[transport], key.data(), key.size(), &size) != ADT_OK) return {};
    return key;
}

void Engine::close_cache(const std::shared_ptr<Node> &node, const std::shared_ptr<LocalCache> &cache) {
    if (in_forked_child()) return;
    Section s(*this);
    close_local(s, node, cache);
}

void Engine::close_local(Section &s, const std::shared_ptr<Node> &node, const std::shared_ptr<LocalCache> &cache) {
    if (cache->closed) return;
    cache->closed = true;
    end_leases(s, *node, cache->id);
    // Every peer is asked, whether or not it was told of the cache: it may have imported it a moment ago.
    for (const auto &[id, peer] : node->peers) cache->waiting_for.insert(id);
    std::vector<std::shared_ptr<Peer>> peers;
    for (const auto &[id, peer] : node->peers) peers.push_back(peer);
    for (const std::shared_ptr<Peer> &peer : peers) {
        stop_at_gates(s, *peer, cache.get(), 0, ADT_ERR_CLOSED);
        start_fence(s, *peer, 0, cache);
        take_over(s, *peer);
    }
    if (node->self) close_imports(s, *node->self, cache->id);
    settle_cache(s, *node, *cache);
}

void Engine::settle_cache(Section &s, Node &node, LocalCache &cache) {
    if (!cache.closed || cache.quiet || cache.operations > 0 || cache.serving > 0 || !cache.waiting_for.empty()) return;
    cache.quiet = true;
    Event event;
    event.kind = EventKind::cache_quiet;
    event.node = node.id;
    event.cache = cache.id;
    event.token = cache.id;
    const auto found = node.caches.find(cache.id);
    // Whoever hears of it may give the memory away: not while a device still has it.
    std::shared_ptr<Ring> later = found != node.caches.end() && pinned(cache) ? node.ring : nullptr;
    if (!later) emit(node, event);
    if (found == node.caches.end()) return;
    s.defer([this, keep = found->second, later, event] { deregister(*keep, later, event); });
    node.caches.erase(found);
}

adt_status_t Engine::import_cache(const std::shared_ptr<Peer> &peer, uint64_t cache_id, const adt_geometry_t &geometry,
                                  unsigned transport, const adt_key_t &key, std::shared_ptr<RemoteCache> &out,
                                  std::string &error) {
    if (in_forked_child()) return ADT_ERR_CLOSED;
    if (!valid_geometry(geometry)) {
        error = "impossible geometry";
        return ADT_ERR_GEOMETRY;
    }
    const auto refused = [&] {
        if (peer->state != Peer::State::active) return ADT_ERR_PEER_LOST;
        return peer->closed_caches.contains(cache_id) ? ADT_ERR_NOT_FOUND : ADT_OK;
    };
    adt_status_t status = ADT_OK;
    {
        // Asked first: after the end of a link or of the cache a transport would name some other reason.
        const std::lock_guard<std::mutex> lock(mu_);
        status = refused();
    }
    if (status != ADT_OK) return status;
    auto cache = std::make_shared<RemoteCache>();
    cache->id = cache_id;
    cache->geometry = geometry;
    cache->transport = transport;
    cache->peer = peer;
    status = ADT_ERR_UNSUPPORTED;
    error = "not agreed for this link";
    with_endpoint(
        peer, transport, [&](const adt_transport_ops_t *ops, adt_transport_h handle, adt_endpoint_h endpoint) {
            status = ops->import_key(handle, endpoint, cache_id, &geometry, &key, &cache->handle, &cache->path);
            if (status != ADT_OK) error = last_error(transport);
        });
    if (status != ADT_OK) return status;
    Section s(*this);
    cache->released = true;  // until it is handed out, so that both refusals below give the key back
    status = refused();
    if (status != ADT_OK) {
        release_remote(s, *cache);
        return status;
    }
    cache->released = false;
    for (auto [at, end] = peer->imports.equal_range(cache_id); at != end;) {
        at = at->second.expired() ? peer->imports.erase(at) : std::next(at);
    }
    peer->imports.emplace(cache_id, cache);
    out = std::move(cache);
    return ADT_OK;
}

adt_status_t Engine::import_local(const std::shared_ptr<Node> &node, const std::shared_ptr<LocalCache> &source,
                                  std::shared_ptr<RemoteCache> &out, std::string &error) {
    if (in_forked_child()) return ADT_ERR_CLOSED;
    auto cache = std::make_shared<RemoteCache>();
    cache->id = source->id;
    cache->geometry = source->geometry;
    cache->here = source;
    {
        const std::lock_guard<std::mutex> lock(mu_);
        if (node->closed || source->closed) return ADT_ERR_CLOSED;
        if (!node->self) {
            auto self = std::make_shared<Peer>();
            self->id = next_id_++;
            self->node = node;
            self->self = true;
            self->endpoints_gone = true;
            self->wire_open = false;
            node->self = std::move(self);
        }
        cache->peer = node->self;
        ++source->operations;  // keeps its registrations until the transports have read them
    }
    adt_status_t status = ADT_ERR_UNSUPPORTED;
    for (unsigned i = 0; i < kTransportCount && status == ADT_ERR_UNSUPPORTED; ++i) {
        if (!source->registered[i]) continue;
        const Transport &t = transports_[i];
        status = t.ops->import_local(t.handle, source->mems[i], &cache->geometry, &cache->handle, &cache->path);
        cache->transport = i;
    }
    Section s(*this);
    --source->operations;
    settle_cache(s, *node, *source);
    if (status != ADT_OK) {
        error = "no transport copies within this process";
        return status;
    }
    if (source->closed || cache->peer->state != Peer::State::active) {
        cache->released = true;
        release_remote(s, *cache);
        return ADT_ERR_CLOSED;
    }
    cache->peer->imports.emplace(cache->id, cache);
    out = std::move(cache);
    return ADT_OK;
}

void Engine::release_cache(const std::shared_ptr<RemoteCache> &cache) {
    if (in_forked_child()) return;
    Section s(*this);
    if (cache->released) return;
    cache->released = true;
    cache->closed = true;
    release_remote(s, *cache);
}

// The owner took the cache back or the link ended: whoever still holds it finds it closed, and its key goes with the
// last operation, so that no forgotten handle keeps a peer's memory mapped.
void Engine::close_remote(Section &s, const std::weak_ptr<RemoteCache> &import) {
    const std::shared_ptr<RemoteCache> cache = import.lock();
    if (!cache) return;
    cache->closed = true;
    cache->released = true;
    release_remote(s, *cache);
    s.defer([cache] {});
}

void Engine::close_imports(Section &s, Peer &peer, uint64_t cache) {
    const auto [first, last] = peer.imports.equal_range(cache);
    for (auto at = first; at != last; ++at) close_remote(s, at->second);
    peer.imports.erase(first, last);
}

void Engine::release_remote(Section &s, RemoteCache &cache) {
    if (!cache.released || cache.operations > 0 || cache.handle == nullptr) return;
    s.defer([this, transport = cache.transport, handle = std::exchange(cache.handle, nullptr)] {
        transports_[transport].ops->release_key(transports_[transport].handle, handle);
    });
}

// --------------------------------------------------------------------------------------------------------- peers

adt_status_t Engine::connect(const std::shared_ptr<Node> &node, const ConnectRequest &request,
                             std::shared_ptr<Peer> &out, std::string &error) {
    auto peer = std::make_shared<Peer>();
    peer->wire = Fd(request.wire);
    peer->pidfd = Fd(request.pidfd);
    std::vector<Fd> data;
    for (const int fd : request.data) data.emplace_back(fd);
    if (in_forked_child()) return ADT_ERR_CLOSED;
    if (!peer->wire) {
        error = "no engine connection";
        return ADT_ERR_INVALID;
    }
    peer->node = node;
    peer->cluster = request.cluster;
    peer->same_host = request.pid > 0;
    peer->pid = request.pid;
    peer->secret_address = request.secret_address;
    peer->secret = request.secret;
    peer->exposed = peer->same_host && request.exposed;
    peer->layers_told = request.layers_told;
    peer->shorter_limit_ns = node->heartbeat_limit_ns;
    // The peer names its limit, and the timer comes again after a fraction of it: at nearly 0 it would never rest.
    if (request.peer_limit_ns > 0) {
        peer->shorter_limit_ns = std::min(peer->shorter_limit_ns, std::max(request.peer_limit_ns, kLeastLimit));
    }
    for (unsigned i = 0; i < kTransportCount; ++i) {
        peer->lanes[i].depth = transports_[i].ops->queue_depth;
        peer->short_lanes[i].depth = ADT_SHORT_DEPTH;
        // By HIXL the peer comes to memory by itself, and no call of this side's keeps it away.
        if (request.use[i] && transports_[i].ops == &kHixlOps) peer->unstoppable = true;
    }
    const int flags = fcntl(peer->wire.get(), F_GETFL);
    fcntl(peer->wire.get(), F_SETFL, flags | O_NONBLOCK);
    {
        // Known before its wires work: a request or a loss may arrive while the transports still connect.
        const std::lock_guard<std::mutex> lock(mu_);
        if (node->closed) return ADT_ERR_CLOSED;
        peer->id = next_id_++;
        peer->last_heard = peer->last_sent = clock_.now_ns();
        peers_.emplace(peer->id, peer);
        node->peers.emplace(peer->id, peer);
    }
    adt_status_t status = ADT_OK;
    {
        const std::lock_guard<std::recursive_mutex> endpoints(endpoints_mu_);
        for (unsigned i = 0; i < kTransportCount && status == ADT_OK; ++i) {
            if (!request.use[i]) continue;
            const Transport &t = transports_[i];
            adt_connect_params_t params{};
            params.struct_size = sizeof(params);
            params.link = name_of(*peer);
            params.peer_pid = request.pid;
            params.peer_pidfd = peer->pidfd.get();
            params.process_vm = request.process_vm ? 1 : 0;
            params.dialed = request.dialed ? 1 : 0;
            params.populate_bytes = node->populate_bytes;
            params.wire = peer->wire.get();
            params.rdma = node->rdma_device.empty() ? nullptr : &node->rdma;
            params.hixl = reinterpret_cast<adt_hixl_h>(node->hixl.get());
            std::vector<int> taken;
            if (t.ops == &kTcpOps) {
                taken.reserve(data.size());
                for (Fd &fd : data) taken.push_back(fd.release());
            }
            params.num_fds = static_cast<uint32_t>(taken.size());
            params.fds = taken.data();
            status = t.ops->connect(t.handle, &params, &peer->endpoints[i]);
            if (status != ADT_OK) error = std::string(t.ops->name) + ": " + last_error(i);
        }
    }
    Section s(*this);
    epoll_event interest{};
    interest.events = EPOLLIN;
    interest.data.u64 = tag(Ready::wire, peer->id);
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, peer->wire.get(), &interest);
    if (peer->pidfd) {
        interest.data.u64 = tag(Ready::process, peer->id);
        epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, peer->pidfd.get(), &interest);
    }
    if (status != ADT_OK) {
        peer->exposed = false;  // it never got a key
        end_peer(s, *peer, ADT_ERR_CLOSED, false);
        return status;
    }
    add_timer(clock_.now_ns() + peer->shorter_limit_ns / 4, TimerKind::heartbeat, peer->id);
    out = std::move(peer);
    return ADT_OK;
}

bool Engine::expose(const std::shared_ptr<Peer> &peer) {
    if (in_forked_child()) return false;
    const std::lock_guard<std::mutex> lock(mu_);
    if (peer->state != Peer::State::active) return false;
    peer->exposed = peer->same_host;
    return true;
}

void Engine::disconnect(const std::shared_ptr<Peer> &peer, adt_status_t status) {
    if (in_forked_child()) return;
    Section s(*this);
    // The peer's farewell comes over another connection. What it said here before, such as the release of a lease, may
    // still lie in the socket, and after the end nobody would listen to it.
    for (int turn = 0; turn < kLastTurns && peer->state == Peer::State::active && readable(*peer); ++turn) {
        read_wire(s, *peer);
    }
    end_peer(s, *peer, status, false);
}

void Engine::with_endpoint(
    const std::shared_ptr<Peer> &peer, unsigned transport,
    const std::function<void(const adt_transport_ops_t *, adt_transport_h, adt_endpoint_h)> &use) {
    const std::lock_guard<std::recursive_mutex> lock(endpoints_mu_);
    if (peer->endpoints_gone || peer->endpoints[transport] == nullptr) return;
    use(transports_[transport].ops, transports_[transport].handle, peer->endpoints[transport]);
}

void Engine::end_peer(Section &s, Peer &peer, adt_status_t status, bool told) {
    if (peer.state != Peer::State::active) return;
    peer.state = Peer::State::ending;
    peer.end_status = status;
    if (told) {
        Event event;
        event.kind = EventKind::peer_lost;
        event.status = status;
        event.node = peer.node->id;
        event.peer = peer.id;
        emit(*peer.node, event);
    }
    leave_leases(peer);
    for (const auto &[id, import] : peer.imports) close_remote(s, import);
    peer.imports.clear();
    const std::vector<Op *> ops(peer.ops.begin(), peer.ops.end());
    // ClosedError is for those who closed their own DataDist; an unlink by either side is the end of a link.
    for (Op *op : ops) stop_op(s, *op, peer.node->closed ? ADT_ERR_CLOSED : ADT_ERR_PEER_LOST);
    const auto found = peers_.find(peer.id);
    if (found != peers_.end()) {
        s.defer([this, keep = found->second] { disconnect_endpoints(keep); });
    }
    send(s, peer, {static_cast<uint8_t>(Say::disconnect), 0, 0, status, 0, 0, 0});
    if (!peer.exposed && !peer.self) add_timer(clock_.now_ns() + peer.node->drain_ns, TimerKind::linger, peer.id);
    settle_peer(s, peer);
}

void Engine::disconnect_endpoints(const std::shared_ptr<Peer> &peer) {
    {
        const std::lock_guard<std::recursive_mutex> lock(endpoints_mu_);
        if (peer->endpoints_gone) return;
        int32_t going = 0;
        for (unsigned i = 0; i < kTransportCount; ++i) {
            if (peer->endpoints[i] == nullptr) continue;
            if (transports_[i].ops->disconnect(transports_[i].handle, peer->endpoints[i]) == ADT_PENDING) ++going;
        }
        const std::lock_guard<std::mutex> state(mu_);
        peer->endpoints_gone = true;
        // One may have called back already.
        peer->endpoints_going += going;
    }
    Section s(*this);
    settle_peer(s, *peer);
}

// Looks whether an ending link is quiet: nothing of ours is left on the peer's memory, nothing of the peer's on ours.
void Engine::settle_peer(Section &s, Peer &peer) {
    if (peer.state == Peer::State::active) return;
    const bool ours_done =
        peer.ops.empty() && peer.inline_active == 0 && peer.endpoints_gone && peer.endpoints_going == 0;
    if (ours_done && !peer.goodbye_sent) {
        peer.goodbye_sent = true;
        send(s, peer, {static_cast<uint8_t>(Say::goodbye), 0, 0, 0, 0, 0, 0});
    }
    const bool theirs_done = !peer.exposed || peer.goodbye_received || peer.process_gone;
    if (ours_done && theirs_done && peer.state == Peer::State::ending) {
        peer.state = Peer::State::quiet;
        const std::vector<FenceOnPeer> fences = std::exchange(peer.fences_on_peer, {});
        for (const FenceOnPeer &fence : fences) finish_fence(s, peer, fence, ADT_OK);
        // Caches that were closed after the link broke waited for this.
        std::vector<std::shared_ptr<LocalCache>> caches;
        for (const auto &[id, cache] : peer.node->caches) caches.push_back(cache);
        for (const std::shared_ptr<LocalCache> &cache : caches) {
            if (cache->waiting_for.erase(peer.id) > 0) settle_cache(s, *peer.node, *cache);
        }
        if (peer.self) {
            s.defer([keep = std::exchange(peer.node->self, nullptr)] {});
            quiet_cv_.notify_all();
            return;
        }
        Event event;
        event.kind = EventKind::peer_quiet;
        event.status = peer.end_status;
        event.node = peer.node->id;
        event.peer = peer.id;
        emit(*peer.node, event);
        peer.node->peers.erase(peer.id);
        quiet_cv_.notify_all();
    }
    if (peer.state != Peer::State::quiet || peer.self) return;
    // Closing a socket with unread input resets it and could swallow our goodbye: wait for the peer's, within reason.
    if (peer.wire_open && !peer.goodbye_received && !peer.process_gone && !peer.lingered) return;
    close_wire(peer);
    const auto found = peers_.find(peer.id);
    if (found == peers_.end()) return;
    s.defer([keep = found->second] {});
    peers_.erase(found);
    quiet_cv_.notify_all();
}

void Engine::close_wire(Peer &peer) {
    peer.wire_open = false;
    peer.wire.reset();
    peer.pidfd.reset();
}

// ----------------------------------------------------------------------------------------------- engine connection

void Engine::send(Section &s, Peer &peer, const WireMessage &message) {
    if (!peer.wire_open) return;
    if (peer.out.size() > kMaxUnsent) {
        peer.out.clear();
        ::shutdown(peer.wire.get(), SHUT_RDWR);  // the read side hears of it and ends the link
        return;
    }
    peer.out.append(reinterpret_cast<const char *>(&message), sizeof(message));
    peer.last_sent = clock_.now_ns();
    if (!peer.wants_write) flush(s, peer);
}

void Engine::tell_end(Section &s, Peer &peer, Say type, uint64_t op, uint64_t cache, uint64_t bytes,
                      adt_status_t status, uint32_t opcode) {
    send(s, peer, {static_cast<uint8_t>(type), 0, static_cast<uint16_t>(opcode), status, op, cache, bytes});
}

void Engine::flush(Section &, Peer &peer) {
    if (!peer.wire_open) return;
    while (!peer.out.empty()) {
        const ssize_t n = ::send(peer.wire.get(), peer.out.data(), peer.out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN) peer.out.clear();  // broken: the read side hears of it and ends the link
            break;
        }
        peer.out.erase(0, static_cast<size_t>(n));
    }
    const bool wants_write = !peer.out.empty();
    if (wants_write == peer.wants_write) return;
    peer.wants_write = wants_write;
    epoll_event interest{};
    interest.events = wants_write ? EPOLLIN | EPOLLOUT : EPOLLIN;
    interest.data.u64 = tag(Ready::wire, peer.id);
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, peer.wire.get(), &interest);
}

namespace {

// Whether exec has replaced the memory of the peer's process, whose pidfd stays silent then. Exec does so before it
// closes the connections. Where process_vm is refused nothing is known.
bool became_another_program(const Peer &peer) {
    if (!peer.same_host || peer.secret_address == 0 || peer.goodbye_received) return false;
    const int code = probe_process_vm(peer.pid, peer.secret_address, peer.secret.data(), peer.secret.size());
    return code == EFAULT || code == EBADMSG;
}

}  // namespace

void Engine::read_wire(Section &s, Peer &peer) {
    const std::shared_ptr<Peer> keep = peers_.count(peer.id) != 0 ? peers_[peer.id] : nullptr;
    for (int messages = 0; peer.wire_open && messages < kMessagesATurn;) {
        const ssize_t n =
            ::recv(peer.wire.get(), peer.in.data() + peer.in_size, peer.in.size() - peer.in_size, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) {
            epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer.wire.get(), nullptr);
            peer.wire_open = false;
            peer.wire.reset();
            if (became_another_program(peer)) peer.process_gone = true;
            end_peer(s, peer, ADT_ERR_PEER_LOST, true);
            settle_peer(s, peer);
            return;
        }
        peer.in_size += static_cast<size_t>(n);
        if (peer.in_size < peer.in.size()) continue;
        peer.in_size = 0;
        ++messages;
        peer.last_heard = clock_.now_ns();
        WireMessage message;
        std::memcpy(&message, peer.in.data(), sizeof(message));
        handle(s, peer, message);
    }
}

// Passes on to the loop what a peer did to local memory, if it hears that, unless so much waits there that it is
// behind.
void Engine::inform(const Peer &peer, EventKind kind, const WireMessage &message) {
    if (!peer.node->hears_peers || peer.node->ring->crowded()) return;
    Event event;
    event.kind = kind;
    event.status = message.status;
    event.node = peer.node->id;
    event.peer = peer.id;
    event.token = message.a;
    event.cache = message.b;
    event.bytes = message.c;
    event.opcode = message.opcode;
    emit(*peer.node, event);
}

void Engine::handle(Section &s, Peer &peer, const WireMessage &message) {
    switch (static_cast<Say>(message.type)) {
        case Say::heartbeat:
        case Say::abort:  // the bytes end by themselves; `ended` follows when they have
            return;
        case Say::ping:
            send(s, peer, {static_cast<uint8_t>(Say::pong), 0, 0, 0, message.a, 0, 0});
            return;
        case Say::pong: {
            if (peer.pings.erase(message.a) == 0) return;  // nobody waits for it
            Event event;
            event.kind = EventKind::pong;
            event.node = peer.node->id;
            event.peer = peer.id;
            event.token = message.a;
            emit(*peer.node, event);
            return;
        }
        case Say::ended: {
            inform(peer, EventKind::transfer_ended, message);
            return;
        }
        case Say::fence:
            peer.epoch = std::max(peer.epoch, static_cast<uint32_t>(message.a));
            if ((message.flags & kClosing) != 0) {
                peer.closed_caches.insert(message.b);
                if (peer.closed_caches.runs() > kMaxRuns) break;
                close_imports(s, peer, message.b);
                stop_at_gates(s, peer, nullptr, message.b, ADT_ERR_NOT_FOUND);
            }
            if (peer.fences_from_peer.size() >= kMaxFences) break;
            peer.fences_from_peer.push_back({message.a, message.b});
            take_over(s, peer);
            answer_fences(s, peer, peer.fences_from_peer.size() - 1);
            return;
        case Say::fence_done: {
            const auto found = std::find_if(peer.fences_on_peer.begin(), peer.fences_on_peer.end(),
                                            [&](const FenceOnPeer &fence) { return fence.seq == message.a; });
            if (found == peer.fences_on_peer.end()) return;
            // The peer's word is that nothing older is left: a request that says otherwise is refused.
            if (!found->closing) peer.min_epoch = std::max(peer.min_epoch, static_cast<uint32_t>(found->seq));
            found->answered_ns = clock_.now_ns();
            finish_answered(s, peer);
            return;
        }
        case Say::disconnect:
            end_peer(s, peer, message.status == ADT_ERR_PEER_LOST ? ADT_ERR_PEER_LOST : ADT_ERR_CLOSED, true);
            return;
        case Say::goodbye:
            peer.goodbye_received = true;
            end_peer(s, peer, ADT_ERR_CLOSED, true);
            settle_peer(s, peer);
            return;
        case Say::adopt:
        case Say::release:
        case Say::lease_answer:
        case Say::renew:
        case Say::lease_over:
            if (handle_lease(s, peer, message)) return;
            break;
        case Say::layer: {
            const auto found = peer.node->caches.find(message.b);
            // The cache may have been taken back meanwhile.
            if (found == peer.node->caches.end() || found->second->closed) return;
            const LocalCache &cache = *found->second;
            if (message.c >= cache.geometry.num_tensors || message.status < 0 ||
                (cache.access & ADT_REMOTE_WRITE) == 0) {
                break;
            }
            inform(peer, EventKind::layer_arrived, message);
            return;
        }
        case Say::endpoint: {
            const auto found = peers_.find(peer.id);
            if (found == peers_.end()) return;
            s.defer([this, keep = found->second,
                     told = adt_message_t{message.flags, 0, message.opcode, message.status, message.a, message.b,
                                          message.c}] {
                bool heard = false;
                for (unsigned i = 0; i < kTransportCount; ++i) {
                    with_endpoint(keep, i,
                                  [&](const adt_transport_ops_t *ops, adt_transport_h handle, adt_endpoint_h endpoint) {
                                      if (ops->hear == adt_no_hear) return;
                                      heard = true;
                                      ops->hear(handle, endpoint, &told);
                                  });
                }
                if (heard) return;
                Section after(*this);
                end_peer(after, *keep, ADT_ERR_PROTOCOL, true);  // nobody here talks; nothing if the link has ended
            });
            return;
        }
    }
    end_peer(s, peer, ADT_ERR_PROTOCOL, true);
}

// -------------------------------------------------------------------------------------------------------- fences

uint64_t Engine::fence(const std::shared_ptr<Peer> &peer) {
    if (in_forked_child()) return 0;
    Section s(*this);
    const uint64_t token = next_id_++;
    start_fence(s, *peer, token, nullptr);
    return token;
}

uint64_t Engine::ping(const std::shared_ptr<Peer> &peer) {
    if (in_forked_child()) return 0;
    Section s(*this);
    const uint64_t token = next_id_++;
    peer->pings.insert(token);
    send(s, *peer, {static_cast<uint8_t>(Say::ping), 0, 0, 0, token, 0, 0});
    return token;
}

// Something waits for short answers that the loop's thread should receive, and the loop may be busy.
void Engine::take_over(Section &s, Peer &peer) {
    const auto found = peers_.find(peer.id);
    if (found == peers_.end()) return;
    s.defer([this, keep = found->second] {
        for (unsigned i = 0; i < kTransportCount; ++i) {
            with_endpoint(keep, i, [](const adt_transport_ops_t *ops, adt_transport_h handle, adt_endpoint_h endpoint) {
                ops->take_over(handle, endpoint);
            });
        }
    });
}

int Engine::loop_fd(const std::shared_ptr<Peer> &peer) {
    int result = -1;
    for (unsigned i = 0; i < kTransportCount && result < 0; ++i) {
        with_endpoint(peer, i, [&](const adt_transport_ops_t *ops, adt_transport_h handle, adt_endpoint_h endpoint) {
            const int fd = ops->loop_fd(handle, endpoint);
            if (fd >= 0) result = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        });
    }
    return result;
}

bool Engine::loop_progress(const std::shared_ptr<Peer> &peer) {
    if (in_forked_child()) return false;
    peer->node->ring->expect_take();
    bool useful = false;
    for (unsigned i = 0; i < kTransportCount && !useful; ++i) {
        with_endpoint(peer, i, [&](const adt_transport_ops_t *ops, adt_transport_h handle, adt_endpoint_h endpoint) {
            useful = ops->loop_progress(handle, endpoint) == ADT_OK;
        });
    }
    return useful;
}

void Engine::start_fence(Section &s, Peer &peer, uint64_t token, std::shared_ptr<LocalCache> closing,
                         std::vector<uint64_t> leases) {
    const uint64_t cache = closing ? closing->id : 0;
    const FenceOnPeer fence{token, ++peer.fence_seq, std::move(closing), std::move(leases)};
    if (peer.state == Peer::State::quiet || (options_.left_out & kNoFence) != 0) {
        finish_fence(s, peer, fence, ADT_OK);
        return;
    }
    peer.fences_on_peer.push_back(fence);
    // On an ending link the peer's goodbye, or its exit, is the answer.
    if (peer.state != Peer::State::active) return;
    send(s, peer, {static_cast<uint8_t>(Say::fence), cache != 0 ? kClosing : uint8_t{0}, 0, 0, fence.seq, cache, 0});
    // Answered at once, so that a peer that is busy with a long transfer is told from one that is silent.
    send(s, peer, {static_cast<uint8_t>(Say::ping), 0, 0, 0, 0, 0, 0});
    if (peer.fence_timer) return;
    peer.fence_since = clock_.now_ns();
    peer.fence_timer = true;
    add_timer(clock_.now_ns() + peer.node->drain_ns / 4, TimerKind::fence, peer.id);
}

void Engine::finish_fence(Section &s, Peer &peer, const FenceOnPeer &fence, adt_status_t status) {
    if (fence.closing) {
        fence.closing->waiting_for.erase(peer.id);
        settle_cache(s, *peer.node, *fence.closing);
        return;
    }
    if (!fence.leases.empty()) {
        leases_fenced(s, peer, fence.leases);
        return;
    }
    Event event;
    event.kind = EventKind::fenced;
    event.status = status;
    event.node = peer.node->id;
    event.peer = peer.id;
    event.token = fence.token;
    emit(*peer.node, event);
}

void Engine::answer_fences(Section &s, Peer &peer, size_t from) {
    auto &fences = peer.fences_from_peer;
    for (size_t i = from; i < fences.size();) {
        const FenceFromPeer fence = fences[i];
        const bool busy = peer.inline_active > 0 || std::any_of(peer.ops.begin(), peer.ops.end(), [&](const Op *op) {
                              return op->epoch < fence.seq && (fence.cache == 0 || op->remote->id == fence.cache);
                          });
        if (busy) {
            ++i;
            continue;
        }
        fences.erase(fences.begin() + static_cast<std::ptrdiff_t>(i));
        send(s, peer, {static_cast<uint8_t>(Say::fence_done), 0, 0, 0, fence.seq, fence.cache, 0});
    }
}

// Ends the fences that the peer has answered. Its word is not enough: of a request whose connection broke over there,
// or of one that it lies about, bytes may still be on their way into local memory. After the end of a link, quiet ends
// them.
void Engine::finish_answered(Section &s, Peer &peer) {
    if (peer.state != Peer::State::active) return;
    auto &fences = peer.fences_on_peer;
    for (size_t i = 0; i < fences.size();) {
        const FenceOnPeer &fence = fences[i];
        const bool served = std::any_of(peer.serving.begin(), peer.serving.end(), [&](const Served *request) {
            return fence.closing ? request->cache == fence.closing : request->epoch < fence.seq;
        });
        if (fence.answered_ns == 0 || served) {
            ++i;
            continue;
        }
        const FenceOnPeer done = fence;
        fences.erase(fences.begin() + static_cast<std::ptrdiff_t>(i));
        finish_fence(s, peer, done, ADT_OK);
    }
}

bool Engine::answers_late(const Peer &peer, uint64_t now) {
    const uint64_t since = std::max(peer.last_heard, peer.fence_since);
    return now > since && now - since > peer.node->drain_ns;
}

// The peer is silent, or has not finished what it said was done; but every byte that is missing passes through this
// engine: shut it out instead of waiting.
void Engine::force_fences(Section &s, Peer &peer, bool silent) {
    const auto found = peers_.find(peer.id);
    if (found == peers_.end()) return;
    const uint64_t now = clock_.now_ns();
    std::vector<FenceOnPeer> forced;
    std::vector<FenceOnPeer> kept;
    for (FenceOnPeer &fence : peer.fences_on_peer) {
        const bool stuck = fence.answered_ns != 0 && now > fence.answered_ns + peer.node->drain_ns;
        (silent || stuck ? forced : kept).push_back(std::move(fence));
    }
    peer.fences_on_peer = std::move(kept);
    if (forced.empty()) return;
    for (const FenceOnPeer &fence : forced) {
        if (!fence.closing) peer.min_epoch = std::max(peer.min_epoch, static_cast<uint32_t>(fence.seq));
    }
    s.defer([this, keep = found->second, fences = std::move(forced)] {
        std::vector<bool> again(fences.size());
        for (unsigned t = 0; t < kTransportCount; ++t) {
            for (size_t i = 0; i < fences.size(); ++i) {
                const FenceOnPeer &fence = fences[i];
                with_endpoint(
                    keep, t, [&](const adt_transport_ops_t *ops, adt_transport_h handle, adt_endpoint_h endpoint) {
                        const adt_status_t status = ops->revoke(handle, endpoint, fence.closing ? fence.closing->id : 0,
                                                                fence.closing ? 0 : static_cast<uint32_t>(fence.seq));
                        if (status == ADT_ERR_AGAIN) again[i] = true;
                    });
            }
        }
        Section section(*this);
        for (size_t i = 0; i < fences.size(); ++i) {
            if (again[i] && keep->state != Peer::State::quiet) {
                keep->fences_on_peer.push_back(fences[i]);
            } else {
                finish_fence(section, *keep, fences[i], ADT_OK);
            }
        }
    });
}

// ----------------------------------------------------------------------------------- what transports ask the engine

void Engine::host_notify(void *ctx, adt_transport_h transport) {
    Engine &engine = *static_cast<Engine *>(ctx);
    for (unsigned i = 0; i < kTransportCount; ++i) {
        if (engine.transports_[i].handle == transport) engine.poll_transport(i);
    }
}

uint64_t Engine::host_now(void *ctx) {
    return static_cast<Engine *>(ctx)->clock_.now_ns();
}

adt_status_t Engine::host_begin_serve(void *ctx, void *link, adt_request_t *request, void **token) {
    Engine &engine = *static_cast<Engine *>(ctx);
    const std::lock_guard<std::mutex> lock(engine.mu_);
    const auto known = engine.peers_.find(id_of(link));
    if (known == engine.peers_.end()) return ADT_ERR_PEER_LOST;
    Peer &peer = *known->second;
    if (peer.state != Peer::State::active) return ADT_ERR_PEER_LOST;
    if (request->epoch < peer.min_epoch && (engine.options_.left_out & kNoEpoch) == 0) return ADT_ERR_FENCED;
    const auto found = peer.node->caches.find(request->cache_id);
    if (found == peer.node->caches.end() || found->second->closed) return ADT_ERR_NOT_FOUND;
    LocalCache &cache = *found->second;
    const uint32_t needed = request->opcode == ADT_READ ? ADT_REMOTE_READ : ADT_REMOTE_WRITE;
    if ((cache.access & needed) == 0) return ADT_ERR_PERMISSION;
    if (cache.placement != ADT_PLACEMENT_HOST) return ADT_ERR_UNSUPPORTED;  // it got no key that leads here
    for (uint32_t i = 0; i < request->count; ++i) {
        adt_chunk_t &chunk = request->chunks[i];
        if (chunk.remote_tensor >= cache.geometry.num_tensors ||
            !inside_blocks(cache.geometry, chunk.remote_offset, chunk.length)) {
            return ADT_ERR_BOUNDS;
        }
        chunk.local = cache.tensors[chunk.remote_tensor] + chunk.remote_offset;
    }
    auto served = std::make_unique<Served>();
    served->peer = known->second;
    served->cache = found->second;
    served->epoch = request->epoch;
    peer.serving.push_back(served.get());
    ++cache.serving;
    *token = served.release();
    return ADT_OK;
}

void Engine::host_end_serve(void *ctx, void *token) {
    Engine &engine = *static_cast<Engine *>(ctx);
    const std::unique_ptr<Served> served(static_cast<Served *>(token));
    Section s(engine);
    Peer &peer = *served->peer;
    peer.serving.erase(std::find(peer.serving.begin(), peer.serving.end(), served.get()));
    --served->cache->serving;
    engine.settle_cache(s, *peer.node, *served->cache);
    engine.finish_answered(s, peer);
}

void Engine::host_endpoint_lost(void *ctx, void *link, adt_status_t status, const char *) {
    Engine &engine = *static_cast<Engine *>(ctx);
    Section s(engine);
    const auto known = engine.peers_.find(id_of(link));
    if (known == engine.peers_.end()) return;
    const std::shared_ptr<Peer> peer = known->second;
    // An orderly end closes the data connections as well; its word on the engine connection was sent before.
    engine.read_wire(s, *peer);
    engine.end_peer(s, *peer, status, true);
}

void Engine::host_endpoint_settled(void *ctx, void *link, adt_transport_h transport, adt_status_t status,
                                   const char *reason) {
    Engine &engine = *static_cast<Engine *>(ctx);
    const std::lock_guard<std::mutex> lock(engine.mu_);
    const auto known = engine.peers_.find(id_of(link));
    if (known == engine.peers_.end()) return;
    Peer &peer = *known->second;
    const auto which = std::find_if(engine.transports_.begin(), engine.transports_.end(),
                                    [transport](const Transport &t) { return t.handle == transport; });
    const auto index = static_cast<size_t>(which - engine.transports_.begin());
    peer.unsettled[index] = status == ADT_OK ? "" : reason;
    Event event;
    event.kind = EventKind::endpoint_settled;
    event.status = status;
    event.node = peer.node->id;
    event.peer = peer.id;
    event.token = index;
    engine.emit(*peer.node, event);
}

std::string Engine::unsettled(const std::shared_ptr<Peer> &peer, unsigned transport) {
    const std::lock_guard<std::mutex> lock(mu_);
    return peer->unsettled[transport];
}

void Engine::host_endpoint_gone(void *ctx, void *link) {
    Engine &engine = *static_cast<Engine *>(ctx);
    Section s(engine);
    const auto known = engine.peers_.find(id_of(link));
    if (known == engine.peers_.end()) return;
    const std::shared_ptr<Peer> peer = known->second;
    --peer->endpoints_going;
    engine.settle_peer(s, *peer);
}

void Engine::host_tell(void *ctx, void *link, const adt_message_t *message) {
    Engine &engine = *static_cast<Engine *>(ctx);
    Section s(engine);
    const auto known = engine.peers_.find(id_of(link));
    if (known == engine.peers_.end() || known->second->state != Peer::State::active) return;
    engine.send(s, *known->second,
                {static_cast<uint8_t>(Say::endpoint), message->kind, message->small, message->number, message->a,
                 message->b, message->c});
}

}  // namespace adt
