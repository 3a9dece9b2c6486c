// SPDX-License-Identifier: Apache-2.0
// Operations: submit, cut into batches, rotate, complete, stop, report. Links are in link.cpp.
#include "engine.hpp"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include "sim.hpp"
#include "threads.hpp"

extern "C" {
adt_status_t adt_unsupported_import_local(adt_transport_h, adt_mem_h, const adt_geometry_t *, adt_remote_h *,
                                          adt_path_t *) {
    return ADT_ERR_UNSUPPORTED;
}
adt_status_t adt_unsupported_execute(adt_transport_h, const adt_batch_t *) {
    return ADT_ERR_UNSUPPORTED;
}
adt_status_t adt_unsupported_cancel(adt_transport_h, adt_endpoint_h, uint64_t) {
    return ADT_ERR_UNSUPPORTED;
}
adt_status_t adt_unsupported_revoke(adt_transport_h, adt_endpoint_h, uint64_t, uint32_t) {
    return ADT_ERR_UNSUPPORTED;
}
void adt_no_hear(adt_transport_h, adt_endpoint_h, const adt_message_t *) {}
int adt_no_event_fd(adt_transport_h) {
    return -1;
}
adt_status_t adt_always_armed(adt_transport_h) {
    return ADT_OK;
}
int adt_no_loop_fd(adt_transport_h, adt_endpoint_h) {
    return -1;
}
adt_status_t adt_no_loop_progress(adt_transport_h, adt_endpoint_h) {
    return ADT_ERR_CLOSED;
}
void adt_no_take_over(adt_transport_h, adt_endpoint_h) {}
}

namespace adt {
namespace {

// What the loop's own thread may receive where a transport offers it: a hop to another thread costs more than the
// bytes.
constexpr uint64_t kShortBytes = 64 * 1024;
constexpr std::chrono::milliseconds kLastGoodbyes{200};
constexpr size_t kCrowded = 65536;    // events that wait for one loop
constexpr size_t kSpare = 64;         // batches kept for the next transfer
constexpr size_t kLongChunks = 2048;  // of an operation: beyond, another thread posts its first batches
constexpr size_t kSpareRuns = 8;      // lists of runs, of at most so many:
constexpr size_t kMostSpareRuns = 65536;

struct Shared {
    std::mutex mu;
    std::shared_ptr<Engine> engine;
    unsigned users = 0;
};

// Never destroyed: its engine may be needed until the very end of the process, and a forked child must not join.
Shared &shared() {
    static Shared *const instance = new Shared;
    return *instance;
}

}  // namespace

uint64_t Clock::now_ns() const {
    if (source_ != nullptr) return source_->now_ns();
    if (manual_) return at_.load(std::memory_order_relaxed);
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(t.tv_nsec);
}

Ring::Ring() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!fd_) throw std::system_error(errno, std::generic_category(), "eventfd");
}

void Ring::push(const Event &event, bool wakes) {
    bool first = false;
    {
        const std::lock_guard<std::mutex> lock(mu_);
        waiting_.push_back(event);
        if (wakes) first = std::exchange(armed_, false);
    }
    if (first) wake();
}

void Ring::wake() {
    const uint64_t one = 1;
    // Cannot fail for want of room: the counter is read before each arming.
    [[maybe_unused]] const ssize_t n = ::write(fd_.get(), &one, sizeof(one));
    woken_.store(true, std::memory_order_release);  // last: a `take` in between finds it readable again
}

bool Ring::crowded() {
    const std::lock_guard<std::mutex> lock(mu_);
    return waiting_.size() >= kCrowded;
}

void Ring::expect_take() {
    const std::lock_guard<std::mutex> lock(mu_);
    armed_ = false;
}

void Ring::take(std::vector<Event> &out) {
    out.clear();
    if (woken_.exchange(false, std::memory_order_acquire)) {
        uint64_t count = 0;
        [[maybe_unused]] const ssize_t n = ::read(fd_.get(), &count, sizeof(count));
    }
    const std::lock_guard<std::mutex> lock(mu_);
    out.swap(waiting_);
    armed_ = true;
}

Engine::Engine(const Options &options)
    : options_(options), clock_(options.stepped, options.network ? &options.network->clock() : nullptr) {
    epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
    kick_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!epoll_ || !kick_) throw std::system_error(errno, std::generic_category(), "epoll or eventfd");
    epoll_event interest{};
    interest.events = EPOLLIN;
    interest.data.u64 = tag(Ready::kick, 0);
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, kick_.get(), &interest);

    host_ = {this,
             host_notify,
             host_now,
             host_begin_serve,
             host_end_serve,
             host_endpoint_lost,
             host_endpoint_settled,
             host_endpoint_gone,
             host_mem_gone,
             host_tell};
    const unsigned threads[kTransportCount] = {options.copy_threads, options.io_threads, 1, 1, 0};
    for (unsigned i = 0; i < kTransportCount; ++i) {
        Transport &t = transports_[i];
        t.ops = kTransports[i];
        assert(t.ops->abi_version == ADT_ABI_VERSION);
        t.lane.depth = t.ops->queue_depth;
        // All copy threads at once would take the model's core in turn, and what they win it loses.
        if ((t.ops->flags & ADT_TRANSPORT_SHARED_QUEUE) != 0 && threads[i] > 1 && threads[i] >= usable_cores()) {
            t.lane.most_beside_model = std::max(1U, usable_cores() - 1);
        }
        const adt_open_params_t params{sizeof(params), options.stepped ? 0 : threads[i], &host_, options.network.get(),
                                       options.place};
        const adt_status_t status = t.ops->open(&params, &t.handle);
        if (status != ADT_OK) {
            for (unsigned k = 0; k < i; ++k) transports_[k].ops->close(transports_[k].handle);
            throw std::system_error(ENOMEM, std::generic_category(), t.ops->name);
        }
        const int fd = t.ops->event_fd(t.handle);
        if (fd >= 0) {
            interest.data.u64 = tag(Ready::transport, i);
            epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &interest);
        }
    }
    if (options_.stepped) return;
    try {
        thread_ = start_thread("adt-progress", [this] { run(); });
    } catch (...) {
        for (Transport &t : transports_) t.ops->close(t.handle);
        throw;
    }
}

Engine::~Engine() {
    {
        const std::lock_guard<std::mutex> lock(mu_);
        stopping_ = true;
    }
    kick();
    if (thread_.joinable()) thread_.join();
    std::vector<std::shared_ptr<Peer>> peers;
    {
        Section s(*this);
        for (auto &[id, peer] : peers_) peers.push_back(peer);
        for (auto &[id, node] : nodes_) {
            if (node->self) peers.push_back(node->self);
        }
        for (const std::shared_ptr<Peer> &peer : peers) end_peer(s, *peer, ADT_ERR_CLOSED, false);
    }
    if (options_.stepped) {
        // Nothing else polls there, and peers wait for the goodbye that the last operation's end sends.
        for (unsigned i = 0; i < kTransportCount; ++i) poll_transport(i);
    }
    for (Transport &t : transports_) t.ops->close(t.handle);  // joins: after this nothing touches caller memory
    {
        // Nothing here may go round in circles: operations and links refer to each other.
        Section s(*this);
        for (const std::shared_ptr<Peer> &peer : peers) {
            close_wire(*peer);  // somebody may still hold the link, and with it the descriptors
            peer->ops.clear();
            peer->fences_on_peer.clear();
            peer->node->peers.clear();
            peer->node->self.reset();
        }
        ops_.clear();
        leases_.clear();
        peers_.clear();
        nodes_.clear();
    }
}

std::shared_ptr<Engine> Engine::acquire(const Options &options) {
    Shared &s = shared();
    const std::lock_guard<std::mutex> lock(s.mu);
    if (!s.engine) s.engine = std::make_shared<Engine>(options);
    ++s.users;
    return s.engine;
}

void Engine::release(std::shared_ptr<Engine> &engine) {
    Shared &s = shared();
    std::shared_ptr<Engine> last;
    {
        const std::lock_guard<std::mutex> lock(s.mu);
        engine.reset();
        if (--s.users > 0) return;
        last = s.engine;
    }
    const auto open = [&last] {
        return std::any_of(last->peers_.begin(), last->peers_.end(),
                           [](const auto &entry) { return entry.second->state != Peer::State::quiet; });
    };
    {
        // Links that are quiet here linger until the peer's goodbye is read, which is a matter of a round trip.
        std::unique_lock<std::mutex> state(last->mu_);
        last->quiet_cv_.wait_for(state, kLastGoodbyes, [&] { return last->peers_.empty() || open(); });
    }
    const std::lock_guard<std::mutex> lock(s.mu);
    if (s.users > 0 || s.engine != last) return;
    {
        const std::lock_guard<std::mutex> state(last->mu_);
        // A stopped same-host peer may still wake and write: someone must listen for its goodbye or its exit.
        if (open()) return;
    }
    s.engine.reset();  // `last` ends it, after the lock
}

void Engine::step(uint64_t advance_ns) {
    if (in_forked_child()) return;
    clock_.advance(advance_ns);
    for (unsigned i = 0; i < kTransportCount; ++i) poll_transport(i);
    progress_once(0);
    for (unsigned i = 0; i < kTransportCount; ++i) poll_transport(i);
}

uint64_t Engine::next_due() {
    const std::lock_guard<std::mutex> lock(mu_);
    uint64_t due = timers_.empty() ? UINT64_MAX : timers_.begin()->first;
    for (const Transport &t : transports_) {
        if (t.ops != &kSimOps || !options_.network) continue;
        due = std::min(due, options_.network->next_due(options_.place, t.handle));
    }
    return due;
}

// ---------------------------------------------------------------------------------------------- progress thread

void Engine::kick() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(kick_.get(), &one, sizeof(one));
}

// Wakes the progress thread for a long transfer, and for that alone has it wait for its turn: a deadline or a fence may
// not come a slice late where all cores are busy.
void Engine::kick_to_start() {
    const pid_t thread = progress_thread_.load();
    if (thread != 0 && yield_to_whoever_wakes(thread)) yields_.store(true);
    kick();  // last: it takes the policy back
}

void Engine::run() {
    progress_thread_.store(static_cast<pid_t>(::syscall(SYS_gettid)));
    for (;;) {
        const int timeout = wait_ms();
        {
            const std::lock_guard<std::mutex> lock(mu_);
            if (stopping_) return;
        }
        progress_once(timeout);
    }
}

int Engine::wait_ms() {
    const std::lock_guard<std::mutex> lock(mu_);
    if (timers_.empty()) {
        waking_at_ = UINT64_MAX;
        return -1;
    }
    waking_at_ = timers_.begin()->first;
    const uint64_t now = clock_.now_ns();
    if (waking_at_ <= now) return 0;
    // Rounded up: waking early would spin until the timer is due.
    return static_cast<int>(std::min<uint64_t>((waking_at_ - now + 999'999) / 1'000'000, 3'600'000));
}

void Engine::progress_once(int timeout_ms) {
    constexpr int kEvents = 64;
    epoll_event events[kEvents];
    const int n = epoll_wait(epoll_.get(), events, kEvents, timeout_ms);
    for (int i = 0; i < n; ++i) {
        const uint64_t value = events[i].data.u64 & ((uint64_t{1} << 56) - 1);
        switch (static_cast<Ready>(events[i].data.u64 >> 56)) {
            case Ready::kick: {
                uint64_t count = 0;
                [[maybe_unused]] const ssize_t got = ::read(kick_.get(), &count, sizeof(count));
                if (yields_.exchange(false)) yield_no_more();
                pump_starting();
                break;
            }
            case Ready::transport:
                do {
                    poll_transport(static_cast<unsigned>(value));
                } while (transports_[value].ops->arm(transports_[value].handle) == ADT_ERR_AGAIN);
                break;
            case Ready::wire: {
                Section s(*this);
                const auto found = peers_.find(value);
                if (found == peers_.end()) break;
                const std::shared_ptr<Peer> peer = found->second;
                if ((events[i].events & EPOLLOUT) != 0) flush(s, *peer);
                if ((events[i].events & ~static_cast<uint32_t>(EPOLLOUT)) != 0) read_wire(s, *peer);
                break;
            }
            case Ready::process: {
                Section s(*this);
                const auto found = peers_.find(value);
                if (found == peers_.end()) break;
                const std::shared_ptr<Peer> peer = found->second;
                read_wire(s, *peer);  // its last words
                peer->process_gone = true;
                if (!peer->pidfd) break;
                epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer->pidfd.get(), nullptr);
                end_peer(s, *peer, ADT_ERR_PEER_LOST, true);
                settle_peer(s, *peer);
                break;
            }
        }
    }
    follow_heard();
    run_timers();
}

Timers::iterator Engine::add_timer(uint64_t at_ns, TimerKind kind, uint64_t id) {
    const auto place = timers_.emplace(at_ns, Timer{kind, id});
    if (at_ns < waking_at_) {
        waking_at_ = at_ns;
        kick();
    }
    return place;
}

void Engine::run_timers() {
    for (;;) {
        Section s(*this);
        if (timers_.empty() || timers_.begin()->first > clock_.now_ns()) return;
        const Timer timer = timers_.begin()->second;
        timers_.erase(timers_.begin());
        fire(s, timer);
    }
}

void Engine::fire(Section &s, const Timer &timer) {
    if (timer.kind == TimerKind::deadline || timer.kind == TimerKind::drain) {
        const auto found = ops_.find(timer.id);
        if (found == ops_.end()) return;
        Op &op = *found->second;
        if (timer.kind == TimerKind::deadline) {
            op.has_deadline = false;
            stop_op(s, op, ADT_ERR_TIMEOUT);
            return;
        }
        op.has_drain = false;
        // What was posted did not drain: take it off the local memory by force.
        s.defer([this, peer = op.peer, transport = op.remote->transport, id = op.id] {
            with_endpoint(peer, transport,
                          [id](const adt_transport_ops_t *ops, adt_transport_h handle, adt_endpoint_h endpoint) {
                              ops->cancel(handle, endpoint, id);
                          });
        });
        return;
    }
    if (timer.kind == TimerKind::lease) {
        expire_lease(s, timer.id);
        return;
    }
    const auto found = peers_.find(timer.id);
    if (found == peers_.end()) return;
    const std::shared_ptr<Peer> peer = found->second;
    const uint64_t now = clock_.now_ns();
    switch (timer.kind) {
        case TimerKind::heartbeat: {
            if (peer->state != Peer::State::active) return;
            // This process may have been stopped itself: what the peer sent meanwhile waits in the socket.
            read_wire(s, *peer);
            if (peer->state != Peer::State::active) return;
            const uint64_t limit = peer->node->heartbeat_limit_ns;
            if (now - peer->last_heard > limit && now > peer->last_heard) {
                end_peer(s, *peer, ADT_ERR_PEER_LOST, true);
                return;
            }
            if (now - peer->last_sent >= peer->shorter_limit_ns / 8)
                send(s, *peer, {static_cast<uint8_t>(Say::heartbeat), 0, 0, 0, 0, 0, 0});
            add_timer(now + peer->shorter_limit_ns / 4, TimerKind::heartbeat, peer->id);
            return;
        }
        case TimerKind::fence:
            peer->fence_timer = false;
            if (peer->fences_on_peer.empty() || peer->state != Peer::State::active) return;
            read_wire(s, *peer);
            if (peer->fences_on_peer.empty() || peer->state != Peer::State::active) return;
            force_fences(s, *peer, !peer->exposed && !peer->unstoppable && answers_late(*peer, now));
            if (peer->fences_on_peer.empty()) return;
            send(s, *peer, {static_cast<uint8_t>(Say::ping), 0, 0, 0, 0, 0, 0});
            peer->fence_timer = true;
            add_timer(now + peer->node->drain_ns / 4, TimerKind::fence, peer->id);
            return;
        case TimerKind::linger:
            peer->lingered = true;
            settle_peer(s, *peer);
            return;
        case TimerKind::renew:
            renew_leases(s, *peer);
            return;
        case TimerKind::deadline:
        case TimerKind::drain:
        case TimerKind::lease:
            return;
    }
}

// ---------------------------------------------------------------------------------------------------- operations

adt_status_t Engine::usable(const TransferRequest &request) {
    const RemoteCache &remote = *request.remote;
    if (request.local->closed || (remote.here && remote.here->closed)) return ADT_ERR_CLOSED;
    if (remote.peer->state != Peer::State::active) return remote.here ? ADT_ERR_CLOSED : ADT_ERR_PEER_LOST;
    if (remote.closed) return ADT_ERR_NOT_FOUND;
    // Such as device memory here, and a cache over there that a transport of host memory reaches.
    return request.local->registered[remote.transport] ? ADT_OK : ADT_ERR_UNSUPPORTED;
}

SubmitResult Engine::submit(const TransferRequest &request) {
    // The block lists are walked once per thread-local buffer: a transfer of one block allocates nothing.
    static thread_local std::vector<Run> runs;
    SubmitResult result;
    if (in_forked_child()) {
        result.status = ADT_ERR_CLOSED;
        return result;
    }
    const adt_geometry_t &lg = request.local->geometry;
    const adt_geometry_t &rg = request.remote->geometry;
    const bool slots = request.local_side.is_slot || request.remote_side.is_slot;
    if ((!slots && lg.block_bytes != rg.block_bytes) ||
        uint64_t{request.local_tensor} + request.num_tensors > lg.num_tensors ||
        uint64_t{request.remote_tensor} + request.num_tensors > rg.num_tensors) {
        result.status = ADT_ERR_GEOMETRY;
        return result;
    }
    const uint64_t bytes_each =
        bytes_a_tensor(request.local_side, request.remote_side, request.count, request.size, lg, rg);
    result.fault = make_runs(request.local_side, request.remote_side, request.count, bytes_each, lg, rg,
                             request.opcode == ADT_READ, request.remote->here == request.local, runs);
    if (result.fault.kind != BlockFault::none) {
        result.status = ADT_ERR_BOUNDS;
        return result;
    }
    const uint64_t bytes = bytes_each * request.num_tensors;
    const Node &node = *request.remote->peer->node;
    if (request.allow_inline && bytes <= node.inline_bytes && (bytes == 0 || request.remote->path.can_execute != 0)) {
        return execute_inline(request, bytes, runs);
    }

    Section s(*this);
    result.status = usable(request);
    if (result.status != ADT_OK) return result;
    Op &op = admit(request, bytes, runs);
    op.exhausted = bytes == 0;
    result.op = op.id;
    result.bytes = bytes;
    result.status = ADT_PENDING;
    if (op.exhausted) {
        settle(s, op);
    } else {
        enqueue(s, op, runs_long(op));
    }
    return result;
}

// Makes an operation of a request that may start, and takes its runs.
Op &Engine::admit(const TransferRequest &request, uint64_t bytes, std::vector<Run> &runs) {
    auto owned = std::make_unique<Op>();
    Op &op = *owned;
    op.id = next_id_++;
    op.opcode = request.opcode;
    op.peer = request.remote->peer;
    op.local = request.local;
    op.remote = request.remote;
    op.runs.swap(runs);
    if (!spare_runs_.empty()) {
        runs.swap(spare_runs_.back());  // for the next transfer that this thread submits
        spare_runs_.pop_back();
    }
    op.local_tensor = request.local_tensor;
    op.remote_tensor = request.remote_tensor;
    op.num_tensors = request.num_tensors;
    op.bytes_total = bytes;
    op.epoch = op.peer->epoch;
    op.started_ns = clock_.now_ns();
    op.cookie = request.cookie;
    ++op.local->operations;
    ++op.remote->operations;
    if (op.remote->here) ++op.remote->here->operations;
    op.peer->ops.insert(&op);
    if (request.timeout_ns > 0) {
        op.deadline = add_timer(op.started_ns + request.timeout_ns, TimerKind::deadline, op.id);
        op.has_deadline = true;
    }
    ops_.emplace(op.id, std::move(owned));
    return op;
}

// Whether cutting an operation's first batches, and waking a thread for each, would take the loop's thread longer than
// having the progress thread do it.
bool Engine::runs_long(const Op &op) const {
    return !options_.stepped && op.runs.size() * op.num_tensors > kLongChunks;
}

// Has an operation with something to cut wait for its turns; it may be gone afterwards. `later`: the progress thread
// posts its first batches.
void Engine::enqueue(Section &s, Op &op, bool later) {
    if (op.queued || op.held || hold_back(op)) return;
    Lane &lane = lane_of(op);
    op.place = lane.ready.insert(lane.ready.end(), &op);
    op.queued = true;
    if (!later) {
        pump(s, lane);
    } else if (lane.inflight < lane.depth) {
        starting_.push_back(op.id);
        s.defer([this] { kick_to_start(); });
    }
}

void Engine::pump_starting() {
    Section s(*this);
    for (const uint64_t id : starting_) {
        const auto found = ops_.find(id);
        if (found != ops_.end() && found->second->queued) pump(s, lane_of(*found->second));
    }
    starting_.clear();
}

// A write that was ended by force still has a frame on the wire, which fills the owner's blocks to its end. One that
// came to the same blocks over another connection in between would be lost after it had ended well.
bool Engine::hold_back(Op &op) {
    if (op.opcode != ADT_WRITE || op.peer->leftovers.count(op.remote->id) == 0) return false;
    op.held = true;
    op.peer->held.push_back(&op);
    return true;
}

// The last of a cache's writes that were ended by force has left the wire.
std::vector<Lane *> Engine::release_held(Peer &peer, uint64_t cache) {
    std::vector<Lane *> lanes;
    const auto kept = std::stable_partition(peer.held.begin(), peer.held.end(),
                                            [cache](const Op *op) { return op->remote->id != cache; });
    for (auto at = kept; at != peer.held.end(); ++at) {
        Op &op = **at;
        Lane &lane = lane_of(op);
        op.held = false;
        op.place = lane.ready.insert(lane.ready.end(), &op);
        op.queued = true;
        if (std::find(lanes.begin(), lanes.end(), &lane) == lanes.end()) lanes.push_back(&lane);
    }
    peer.held.erase(kept, peer.held.end());
    return lanes;
}

SubmitResult Engine::execute_inline(const TransferRequest &request, uint64_t bytes, const std::vector<Run> &runs) {
    static thread_local std::vector<adt_chunk_t> chunks;
    SubmitResult result;
    result.bytes = bytes;
    Peer &peer = *request.remote->peer;
    {
        const std::lock_guard<std::mutex> lock(mu_);
        result.status = usable(request);
        if (result.status != ADT_OK || bytes == 0) return result;
        // From here until the decrement a fence, a closing or the end of the link waits for this copy.
        ++peer.inline_active;
        ++request.remote->operations;
    }
    chunks.clear();
    for (uint32_t t = 0; t < request.num_tensors; ++t) {
        char *const base = request.local->tensors[request.local_tensor + t];
        for (const Run &run : runs) {
            chunks.push_back(
                {base + run.local, run.remote, request.remote_tensor + t, static_cast<uint32_t>(run.length)});
        }
    }
    adt_batch_t batch{};
    batch.opcode = request.opcode;
    batch.count = static_cast<uint32_t>(chunks.size());
    batch.chunks = chunks.data();
    batch.bytes = bytes;
    batch.remote = request.remote->handle;
    const Transport &transport = transports_[request.remote->transport];
    result.executed = true;
    result.status = transport.ops->execute(transport.handle, &batch);

    std::unique_lock<std::mutex> lock(mu_);
    --peer.inline_active;
    --request.remote->operations;
    if (result.status == ADT_OK && peer.fences_from_peer.empty() && peer.state == Peer::State::active) return result;
    lock.unlock();
    Section s(*this);
    release_remote(s, *request.remote);
    if (result.status != ADT_OK && peer.state == Peer::State::active) {
        tell_end(s, peer, Say::ended, 0, request.remote->id, 0, result.status, request.opcode);
    }
    answer_fences(s, peer);
    settle_peer(s, peer);
    return result;
}

Lane &Engine::lane_of(const Op &op) {
    const unsigned t = op.remote->transport;
    if ((transports_[t].ops->flags & ADT_TRANSPORT_SHARED_QUEUE) != 0) return transports_[t].lane;
    return is_short(op) && transports_[t].ops->loop_fd != adt_no_loop_fd ? op.peer->short_lanes[t] : op.peer->lanes[t];
}

bool Engine::is_short(const Op &op) {
    return op.bytes_total <= kShortBytes && !op.layers;
}

// Cuts the next batch off an operation, of one layer where there are layers. Returns true while more is left of that.
bool Engine::cut(Op &op, Batch &batch) {
    const adt_path_t &path = op.remote->path;
    LayerWork *const work = op.layers.get();
    LayerWork::Layer *layer = nullptr;
    uint32_t last = op.num_tensors;
    if (work != nullptr) {
        batch.layer = work->ready[work->next];
        layer = &work->layers[batch.layer];
        last = layer->last;
        if (!std::exchange(work->begun, true)) op.at_tensor = layer->first;
    }
    uint64_t bytes = 0;
    // Written by place, into storage that only grows: appending takes twice as long.
    const size_t pieces = op.runs.size() * (last - op.at_tensor) - op.at_run;
    const size_t most = std::min<size_t>(pieces, path.max_batch_chunks);
    if (batch.chunks.size() < most) batch.chunks.resize(most);
    adt_chunk_t *const first = batch.chunks.data();
    adt_chunk_t *const end = first + most;
    adt_chunk_t *chunk = first;
    while (op.at_tensor < last) {
        const LayerTensor tensor =
            work != nullptr ? work->tensors[op.at_tensor]
                            : LayerTensor{op.local_tensor + op.at_tensor, op.remote_tensor + op.at_tensor, 0};
        char *const base = op.local->tensors[tensor.local];
        const size_t runs = op.runs.size();
        size_t at = op.at_run;
        uint64_t skip = op.at_byte;  // of the run
        for (; at < runs && bytes < path.max_batch_bytes && chunk < end; ++chunk) {
            const Run &run = op.runs[at];
            const uint64_t left = run.length - skip;
            const uint64_t length = std::min(left, path.max_batch_bytes - bytes);
            *chunk = {base + run.local + skip, tensor.base + run.remote + skip, tensor.remote,
                      static_cast<uint32_t>(length)};
            bytes += length;
            skip += length;
            if (length < left) continue;
            ++at;
            skip = 0;
        }
        op.at_run = at;
        op.at_byte = skip;
        if (at < runs) break;
        op.at_run = 0;
        ++op.at_tensor;
    }
    batch.op = &op;
    batch.detached = false;
    adt_batch_t &post = batch.post;
    post.opcode = op.opcode;
    post.count = static_cast<uint32_t>(chunk - first);
    post.chunks = first;
    post.bytes = bytes;
    post.endpoint = op.peer->endpoints[op.remote->transport];
    post.local_mem = op.local->mems[op.remote->transport];
    post.remote = op.remote->handle;
    post.op_id = op.id;
    post.epoch = op.epoch;
    // Not while the peer waits for a fence: what is posted after take_over would wait for the loop, which may be busy.
    // Nor a layer: the loop may wait for a model that computes.
    post.loop_waits = is_short(op) && op.peer->fences_from_peer.empty() ? 1 : 0;
    if (work == nullptr) return op.at_tensor < last;
    ++layer->unfinished;
    if (op.at_tensor < last) return true;
    layer->all_cut = true;
    work->begun = false;
    ++work->next;
    return false;
}

void Engine::pump(Section &s, Lane &lane) {
    if (std::exchange(lane.pumping, true)) return;
    const auto waits_for_model = [](const Op *op) { return op->layers && op->layers->waiting; };
    while (lane.inflight < lane.depth) {
        auto at = lane.ready.begin();
        if (lane.beside_model >= lane.most_beside_model) {
            at = std::find_if_not(at, lane.ready.end(), waits_for_model);
        }
        if (at == lane.ready.end()) break;
        Op &op = **at;
        // Its timer may come late: completions are handled before timers, and the thread has to get a processor.
        if (op.has_deadline && op.deadline->first <= clock_.now_ns()) {
            stop_op(s, op, ADT_ERR_TIMEOUT);
            continue;
        }
        // A layer may have been recorded after the end by force of a write that began after this operation.
        if (op.layers && !op.layers->begun && hold_back(op)) {
            lane.ready.erase(op.place);
            op.queued = false;
            continue;
        }
        const Transport &transport = transports_[op.remote->transport];
        Batch *batch = take_batch();
        batch->beside_model = waits_for_model(&op);
        batch->post.model_cpu = batch->beside_model ? op.layers->model_cpu : -1;
        if (batch->beside_model) ++lane.beside_model;
        bool more = cut(op, *batch);
        if (op.layers && !more) {
            land_empty(s, op);
            more = op.layers->next < op.layers->ready.size();
        }
        if (more) {
            lane.ready.splice(lane.ready.end(), lane.ready, op.place);  // the next operation's turn
        } else {
            lane.ready.erase(op.place);
            op.queued = false;
            op.exhausted = !op.layers || op.layers->next == op.layers->layers.size();
        }
        ++op.inflight;
        ++lane.inflight;
        adt_batch_t *post = &batch->post;
        size_t posted = 0;
        const adt_status_t status = transport.ops->post(transport.handle, &post, 1, &posted);
        if (posted == 1) continue;
        // The engine keeps within the queue's depth, so AGAIN is a transport's mistake like any other failure here.
        complete_batch(s, {post, status == ADT_ERR_AGAIN ? ADT_ERR_INTERNAL : status, 0});
    }
    lane.pumping = false;
}

void Engine::complete_batch(Section &s, const adt_completion_t &completion) {
    auto *batch = reinterpret_cast<Batch *>(completion.batch);
    Op &op = *batch->op;
    if (completion.detached != 0) {
        batch->detached = true;
        ++op.detached;
        if (op.opcode == ADT_WRITE) ++op.peer->leftovers[op.remote->id];
        // One that failed by itself may still be on the wire as well.
        if (op.stop == ADT_OK) {
            stop_op(s, op, completion.status);
        } else {
            settle(s, op);
        }
        return;
    }
    Lane &lane = lane_of(op);
    std::vector<Lane *> released;
    std::shared_ptr<Peer> keeper;  // of those lanes: the operation may end here
    --op.inflight;
    --lane.inflight;
    if (batch->beside_model) --lane.beside_model;
    if (batch->detached) {
        --op.detached;
        Peer &peer = *op.peer;
        const uint64_t cache = op.remote->id;
        if (op.opcode == ADT_WRITE && --peer.leftovers[cache] == 0) {
            peer.leftovers.erase(cache);
            released = release_held(peer, cache);
            keeper = op.peer;
        }
    }
    if (completion.status == ADT_OK) {
        op.bytes_done += batch->post.bytes;
        if (op.layers) {
            LayerWork::Layer &layer = op.layers->layers[batch->layer];
            if (--layer.unfinished == 0 && layer.all_cut) land_layer(s, op, batch->layer);
        }
    }
    give_batch(batch);
    if (completion.status != ADT_OK && op.stop == ADT_OK) {
        stop_op(s, op, completion.status);
    } else {
        settle(s, op);
    }
    pump(s, lane);
    // A short operation waits in another lane than the long one that held it up, and the other way round.
    for (Lane *other : released) pump(s, *other);
}

void Engine::poll_transport(unsigned index) {
    Transport &transport = transports_[index];
    constexpr size_t kBatch = 32;
    adt_completion_t done[kBatch];
    for (;;) {
        std::unique_lock<std::mutex> in_order(transport.poll_mu);
        const size_t n = transport.ops->poll(transport.handle, done, kBatch);
        if (n == 0) return;
        Section s(*this);
        for (size_t i = 0; i < n; ++i) complete_batch(s, done[i]);
        in_order.unlock();  // before what was deferred, which takes locks that come first
    }
}

void Engine::stop_op(Section &s, Op &op, adt_status_t status) {
    if (op.stop != ADT_OK || op.reported) return;
    op.stop = status;
    leave_gate(op);
    if (op.queued) {
        lane_of(op).ready.erase(op.place);
        op.queued = false;
    }
    Peer &peer = *op.peer;
    if (std::exchange(op.held, false)) peer.held.erase(std::find(peer.held.begin(), peer.held.end(), &op));
    if (peer.state == Peer::State::active) tell_end(s, peer, Say::abort, op.id, op.remote->id, 0, status, op.opcode);
    if (op.inflight > op.detached) {
        op.drain = add_timer(clock_.now_ns() + peer.node->drain_ns, TimerKind::drain, op.id);
        op.has_drain = true;
        take_over(s, peer);
    }
    settle(s, op);
}

// Looks whether an operation is quiet here (then its future hears of it), and whether it is over everywhere.
void Engine::settle(Section &s, Op &op) {
    if (!op.exhausted && op.stop == ADT_OK) return;
    const bool quiet = op.inflight == op.detached || (options_.left_out & kNoDrain) != 0;
    if (!op.reported && quiet) report(s, op);
    if (op.inflight == 0) retire(s, op);
}

void Engine::report(Section &s, Op &op) {
    op.reported = true;
    if (std::exchange(op.has_deadline, false)) timers_.erase(op.deadline);
    if (std::exchange(op.has_drain, false)) timers_.erase(op.drain);
    Event event;
    event.kind = EventKind::transfer_done;
    event.status = op.stop;
    event.node = op.peer->node->id;
    event.peer = op.peer->id;
    event.token = op.id;
    event.cache = op.remote->id;
    event.bytes = op.bytes_done;
    event.opcode = op.opcode;
    event.cookie = std::exchange(op.cookie, nullptr);
    emit(*op.peer->node, event);
    // Local memory is quiet, though a detached batch may be on the wire for long: its cache may be taken back.
    LocalCache *const source = op.remote->here.get();
    --op.local->operations;
    if (source != nullptr) --source->operations;
    settle_cache(s, *op.peer->node, *op.local);
    if (source != nullptr) settle_cache(s, *op.peer->node, *source);
}

void Engine::retire(Section &s, Op &op) {
    const auto found = ops_.find(op.id);
    assert(found != ops_.end());
    const std::unique_ptr<Op> owned = std::move(found->second);
    ops_.erase(found);
    const std::shared_ptr<Peer> peer = op.peer;
    peer->ops.erase(&op);
    --op.remote->operations;
    // The owner hears of every end that is not a success, once its memory is quiet as well.
    if (op.stop != ADT_OK && peer->state == Peer::State::active) {
        tell_end(s, *peer, Say::ended, op.id, op.remote->id, op.bytes_done, op.stop, op.opcode);
    }
    release_remote(s, *op.remote);
    answer_fences(s, *peer);
    settle_peer(s, *peer);
    // Fresh memory for the runs of a long list would cost a page fault for each 170 of them.
    if (spare_runs_.size() < kSpareRuns && op.runs.capacity() <= kMostSpareRuns) {
        spare_runs_.push_back(std::move(op.runs));
    }
    // What it held is let go outside the lock: a last reference may unmap memory.
    s.defer([local = std::move(op.local), remote = std::move(op.remote), keep = peer] {});
    op.peer.reset();
    op.local.reset();
    op.remote.reset();
}

void Engine::cancel(uint64_t op_id) {
    if (in_forked_child()) return;
    Section s(*this);
    const auto found = ops_.find(op_id);
    if (found != ops_.end()) stop_op(s, *found->second, ADT_ERR_CANCELLED);
}

bool Engine::progress(uint64_t op_id, uint64_t *done, uint64_t *total) {
    if (in_forked_child()) return false;
    const std::lock_guard<std::mutex> lock(mu_);
    const auto found = ops_.find(op_id);
    if (found == ops_.end()) return false;
    *done = found->second->bytes_done;
    *total = found->second->bytes_total;
    return true;
}

std::vector<PendingRow> Engine::pending(const std::shared_ptr<Node> &node) {
    std::vector<PendingRow> rows;
    const std::lock_guard<std::mutex> lock(mu_);
    const uint64_t now = clock_.now_ns();
    for (const auto &[id, op] : ops_) {
        if (op->peer->node != node) continue;
        const LayerWork *const work = op->layers.get();
        const bool at_gate = work != nullptr && work->waiting && work->next == work->ready.size() && op->inflight == 0;
        rows.push_back({id, op->peer->id, op->remote->id, op->opcode, op->stop, now - op->started_ns, op->bytes_done,
                        op->bytes_total, op->remote->path.name, at_gate, work != nullptr ? work->landed : 0,
                        work != nullptr ? static_cast<uint32_t>(work->layers.size()) : 0});
    }
    return rows;
}

Batch *Engine::take_batch() {
    if (spare_batches_.empty()) return new Batch;
    Batch *batch = spare_batches_.back().release();
    spare_batches_.pop_back();
    return batch;
}

void Engine::give_batch(Batch *batch) {
    std::unique_ptr<Batch> owned(batch);
    if (!kDebugBuild && spare_batches_.size() < kSpare) spare_batches_.push_back(std::move(owned));
}

std::string Engine::last_error(unsigned transport) {
    char text[512] = "";
    transports_[transport].ops->last_error(transports_[transport].handle, text, sizeof(text));
    return text;
}

}  // namespace adt
