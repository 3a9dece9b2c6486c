// SPDX-License-Identifier: Apache-2.0
// Gates, and what the engine does with them: an operation at a gate is cut layer by layer, in the order of recording.
#include "layers.hpp"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cassert>
#include <unordered_map>
#include <utility>

#include "engine.hpp"

namespace adt {
namespace {

uint64_t monotonic_ns() {
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(t.tv_nsec);
}

struct Signals {
    struct Signal {
        std::shared_ptr<Recorder> recorder;
        uint32_t layer;
    };
    std::mutex mu;
    std::unordered_map<uint64_t, Signal> pending;
    uint64_t next = 1;

    std::shared_ptr<Recorder> take(uint64_t context, uint32_t *layer) {
        const std::lock_guard<std::mutex> lock(mu);
        const auto found = pending.find(context);
        if (found == pending.end()) return nullptr;
        std::shared_ptr<Recorder> recorder = std::move(found->second.recorder);
        *layer = found->second.layer;
        pending.erase(found);
        return recorder;
    }
};

// Never destroyed: a device's callback may come at the very end of the process.
Signals &signals() {
    static Signals *const instance = new Signals;
    return *instance;
}

}  // namespace

bool Gate::recorded(uint32_t layer) {
    const std::lock_guard<std::mutex> lock(mu_);
    return layer < state_.size() && state_[layer] == State::recorded;
}

uint32_t Gate::count() {
    const std::lock_guard<std::mutex> lock(mu_);
    return static_cast<uint32_t>(std::count(state_.begin(), state_.end(), State::recorded));
}

Gate::Outcome Gate::record(uint32_t layer) {
    const Outcome outcome = log(layer, false);
    if (outcome == Outcome::ok) tell();
    return outcome;
}

Gate::Outcome Gate::fail(uint32_t layer) {
    const Outcome outcome = log(layer, true);
    if (outcome == Outcome::ok) tell();
    return outcome;
}

void Gate::drop() {
    {
        const std::lock_guard<std::mutex> lock(mu_);
        dropped_ = true;
        const uint64_t now = monotonic_ns();
        for (uint32_t i = 0; i < state_.size(); ++i) {
            if (state_[i] != State::open) continue;
            state_[i] = State::failed;
            log_.push_back({i, true, now, -1});
        }
    }
    tell();
}

Gate::Outcome Gate::log(uint32_t layer, bool failed) {
    const uint64_t now = monotonic_ns();
    const std::lock_guard<std::mutex> lock(mu_);
    if (layer >= state_.size()) return Outcome::range;
    if (dropped_) return Outcome::dropped;
    if (state_[layer] != State::open) return Outcome::repeated;
    state_[layer] = failed ? State::failed : State::recorded;
    log_.push_back({layer, failed, now, sched_getcpu()});
    return Outcome::ok;
}

// Has every waiting operation look at the log. It may hear of several layers at once, and of one twice: the place up to
// which it has read decides.
void Gate::tell() {
    std::vector<std::pair<uint64_t, std::weak_ptr<Engine>>> waiters;
    {
        const std::lock_guard<std::mutex> lock(mu_);
        waiters.reserve(waiters_.size());
        for (const auto &[waiter, engine] : waiters_) waiters.emplace_back(waiter.second, engine);
    }
    for (const auto &[op, weak] : waiters) {
        if (const std::shared_ptr<Engine> engine = weak.lock()) engine->read_gate(op);
    }
}

void Gate::subscribe(const std::shared_ptr<Engine> &engine, uint64_t op) {
    const std::lock_guard<std::mutex> lock(mu_);
    waiters_.insert_or_assign({engine.get(), op}, engine);
}

void Gate::leave(const Engine *engine, uint64_t op) {
    const std::lock_guard<std::mutex> lock(mu_);
    waiters_.erase({engine, op});
}

size_t Gate::waiting() {
    const std::lock_guard<std::mutex> lock(mu_);
    return waiters_.size();
}

void Gate::read(size_t from, std::vector<Entry> &out) {
    const std::lock_guard<std::mutex> lock(mu_);
    out.assign(log_.begin() + static_cast<std::ptrdiff_t>(std::min(from, log_.size())), log_.end());
}

uint64_t make_layer_signal(const std::shared_ptr<Recorder> &recorder, uint32_t layer) {
    Signals &all = signals();
    const std::lock_guard<std::mutex> lock(all.mu);
    const uint64_t context = all.next++;
    all.pending.emplace(context, Signals::Signal{recorder, layer});
    return context;
}

void release_layer_signal(uint64_t context) {
    uint32_t layer = 0;
    const std::shared_ptr<Recorder> gone = signals().take(context, &layer);  // let go of without the lock
}

bool layer_signal_pending(uint64_t context) {
    Signals &all = signals();
    const std::lock_guard<std::mutex> lock(all.mu);
    return all.pending.count(context) != 0;
}

namespace {

void fire_layer_signal(void *context) {
    if (in_forked_child()) return;
    uint32_t layer = 0;
    const auto number = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(context));
    if (const std::shared_ptr<Recorder> recorder = signals().take(number, &layer)) recorder->gate()->record(layer);
}

}  // namespace

uint64_t layer_signal_function() {
    const adt_layer_signal_t function = fire_layer_signal;
    return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(function));
}

// ----------------------------------------------------------------------------------- operations that wait at a gate

SubmitResult Engine::submit_layers(const TransferRequest &request, const LayerRequest &wanted) {
    static thread_local std::vector<Run> runs;
    SubmitResult result;
    if (in_forked_child()) {
        result.status = ADT_ERR_CLOSED;
        return result;
    }
    const adt_geometry_t &lg = request.local->geometry;
    const adt_geometry_t &rg = request.remote->geometry;
    const uint64_t bytes_each =
        bytes_a_tensor(request.local_side, request.remote_side, request.count, request.size, lg, wanted.remote_view);
    result.fault = make_runs(request.local_side, request.remote_side, request.count, bytes_each, lg, wanted.remote_view,
                             request.opcode == ADT_READ, false, runs);
    if (result.fault.kind != BlockFault::none) {
        result.status = ADT_ERR_BOUNDS;
        return result;
    }
    if (wanted.per_layer == 0 || wanted.starts.empty() || wanted.starts.front() != 0 ||
        !std::is_sorted(wanted.starts.begin(), wanted.starts.end()) || wanted.starts.back() != wanted.tensors.size()) {
        result.status = ADT_ERR_GEOMETRY;
        return result;
    }
    uint64_t checked = 0;  // tensors share their few bases: each is compared with the runs once in a row
    bool any = false;
    for (const LayerTensor &tensor : wanted.tensors) {
        if (tensor.local >= lg.num_tensors || tensor.remote >= rg.num_tensors) {
            result.status = ADT_ERR_GEOMETRY;
            return result;
        }
        if (std::exchange(any, true) && tensor.base == checked) continue;
        checked = tensor.base;
        for (const Run &run : runs) {
            if (tensor.base <= tensor_extent(rg) && inside_blocks(rg, tensor.base + run.remote, run.length)) continue;
            result.status = ADT_ERR_BOUNDS;
            result.fault.kind = BlockFault::size;
            return result;
        }
    }

    auto work = std::make_unique<LayerWork>();
    work->gate = wanted.gate;
    work->first_layer = wanted.first_layer;
    work->per_layer = wanted.per_layer;
    work->tensors = wanted.tensors;
    const size_t layers = wanted.starts.size() - 1;
    work->layers.resize(layers);
    for (size_t i = 0; i < layers; ++i) {
        work->layers[i].first = wanted.starts[i];
        work->layers[i].last = wanted.starts[i + 1];
        if (wanted.starts[i] != wanted.starts[i + 1]) ++work->untold;
    }

    Section s(*this);
    result.status = usable(request);
    if (result.status != ADT_OK) return result;
    Op &op = admit(request, bytes_each * wanted.tensors.size(), runs);
    op.layers = std::move(work);
    op.exhausted = layers == 0;
    result.op = op.id;
    result.bytes = op.bytes_total;
    result.status = ADT_PENDING;
    if (op.exhausted) {
        settle(s, op);
        return result;
    }
    // Before it looks, so that nothing is logged in between unheard.
    op.layers->waiting = true;
    wanted.gate->subscribe(shared_from_this(), op.id);
    follow_gate(s, op);
    return result;
}

void Engine::read_gate(uint64_t op_id) {
    if (in_forked_child()) return;
    {
        const std::lock_guard<std::mutex> lock(heard_mu_);
        heard_.push_back(op_id);
    }
    // The recording thread does not wait for `mu_`: whoever holds it may have lost its core, for milliseconds where all
    // are busy. The progress thread waits instead.
    std::unique_lock<std::mutex> lock(mu_, std::try_to_lock);
    if (!lock) {
        kick();
        return;
    }
    Section s(std::move(lock));
    follow_heard(s);
}

// Reads the gates that have said something.
void Engine::follow_heard(Section &s) {
    std::vector<uint64_t> heard;
    {
        const std::lock_guard<std::mutex> lock(heard_mu_);
        heard.swap(heard_);
    }
    for (const uint64_t op_id : heard) {
        const auto found = ops_.find(op_id);
        if (found != ops_.end()) follow_gate(s, *found->second);
    }
}

void Engine::follow_heard() {
    {
        const std::lock_guard<std::mutex> lock(heard_mu_);
        if (heard_.empty()) return;
    }
    Section s(*this);
    follow_heard(s);
}

// An operation wants no more of its gate: it has heard of every layer, or ends.
void Engine::leave_gate(const Op &op) {
    if (op.layers && std::exchange(op.layers->waiting, false)) op.layers->gate->leave(this, op.id);
}

// Takes in what the gate says; the operation may be gone afterwards.
void Engine::follow_gate(Section &s, Op &op) {
    LayerWork &work = *op.layers;
    if (!work.waiting) return;
    std::vector<Gate::Entry> entries;
    work.gate->read(work.entries_read, entries);
    work.entries_read += entries.size();
    for (const Gate::Entry &entry : entries) {
        if (entry.layer < work.first_layer || entry.layer - work.first_layer >= work.layers.size()) continue;
        if (entry.failed) {
            stop_op(s, op, ADT_ERR_LAYER);
            return;
        }
        const uint32_t layer = entry.layer - work.first_layer;
        work.layers[layer].recorded_ns = options_.stepped ? clock_.now_ns() : entry.at_ns;
        work.ready.push_back(layer);
        work.model_cpu = entry.cpu;
    }
    if (work.ready.size() == work.layers.size()) leave_gate(op);
    land_empty(s, op);
    if (work.next == work.layers.size()) {
        op.exhausted = true;
        settle(s, op);
    } else if (op.queued) {
        pump(s, lane_of(op));  // it may be held up no longer
    } else if (work.next < work.ready.size()) {
        enqueue(s, op);
    }
}

// Lands the layers of which nothing is to be moved, up to the next of which something is: no batch may be empty.
void Engine::land_empty(Section &s, Op &op) {
    LayerWork &work = *op.layers;
    while (work.next < work.ready.size()) {
        const uint32_t layer = work.ready[work.next];
        if (!op.runs.empty() && work.layers[layer].first != work.layers[layer].last) return;
        work.layers[layer].all_cut = true;
        ++work.next;
        land_layer(s, op, layer);
    }
}

// Every byte of a layer is visible at the peer.
void Engine::land_layer(Section &s, Op &op, uint32_t layer) {
    LayerWork &work = *op.layers;
    ++work.landed;
    Peer &peer = *op.peer;
    // Of a layer that has no tensor in this cache its owner has nothing to hear.
    const LayerWork::Layer &landed = work.layers[layer];
    if (landed.first != landed.last) {
        --work.untold;
        if (peer.state == Peer::State::active && peer.layers_told) {
            send(s, peer,
                 {static_cast<uint8_t>(Say::layer), 0, static_cast<uint16_t>(op.opcode),
                  static_cast<int32_t>(work.untold), op.id, op.remote->id,
                  work.tensors[landed.first].remote / work.per_layer});
        }
    }
    if (op.reported) return;
    Event event;
    event.kind = EventKind::layer_done;
    event.node = peer.node->id;
    event.peer = peer.id;
    event.token = layer;
    event.cache = op.remote->id;
    event.bytes = clock_.now_ns() - std::min(clock_.now_ns(), work.layers[layer].recorded_ns);
    event.opcode = op.opcode;
    event.cookie = op.cookie;
    emit(*peer.node, event, peer.node->wakes_for_layers);
}

// One side takes its cache back: whoever waits at a gate might wait for long, and the closing with it. Those that have
// heard of all their layers finish, as every other operation.
void Engine::stop_at_gates(Section &s, Peer &peer, const LocalCache *local, uint64_t remote, adt_status_t status) {
    const std::vector<Op *> ops(peer.ops.begin(), peer.ops.end());
    for (Op *op : ops) {
        if (op->layers && op->layers->waiting &&
            (local != nullptr ? op->local.get() == local : op->remote->id == remote)) {
            stop_op(s, *op, status);
        }
    }
}

}  // namespace adt
