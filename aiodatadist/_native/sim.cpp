// SPDX-License-Identifier: Apache-2.0
// sim: between stepped engines, over a SimNetwork. Built as a network card with remote access would be, with the
// owner's engine asked before its memory is touched: requests go to a numbered endpoint and carry the key of the
// memory, bytes go in fragments that arrive in any order, late, twice or never, and a write is answered when all its
// bytes are visible.
#include "sim.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <unordered_set>
#include <utility>

namespace adt {

// ------------------------------------------------------------------------------------------------------- network

void SimNetwork::set_way(uint64_t from, uint64_t to, const SimWay &way) {
    const std::pair<uint64_t, uint64_t> key{from, to};
    ways_[key] = way;
    if (way.blocked) {
        Queue &queue = places_[to].queue;
        for (auto at = queue.begin(); at != queue.end();) {
            if (at->second.from == from && at->second.kind < SimPacket::Kind::depart) {
                held_[key].push_back(std::move(at->second));
                at = queue.erase(at);
            } else {
                ++at;
            }
        }
        return;
    }
    std::vector<SimPacket> released = std::move(held_[key]);
    held_.erase(key);
    for (SimPacket &packet : released) {
        enqueue(std::move(packet), clock_.now_ns() + random_.between(way.latency_least, way.latency_most));
    }
}

const SimWay &SimNetwork::way(uint64_t from, uint64_t to) const {
    const auto found = ways_.find({from, to});
    return found == ways_.end() ? plain_ : found->second;
}

void SimNetwork::bind(int fd, uint64_t link, unsigned end, uint64_t peer_place) {
    bound_[fd] = {link, end, peer_place};
}

bool SimNetwork::take_bound(int fd, Bound &out) {
    const auto found = bound_.find(fd);
    if (found == bound_.end()) return false;
    out = found->second;
    bound_.erase(found);
    return true;
}

uint64_t SimNetwork::attach(SimTransport *transport, uint64_t place) {
    Place &there = places_[place];
    // What arrived while nobody was there is lost.
    there.queue.erase(there.queue.begin(), there.queue.upper_bound({clock_.now_ns(), UINT64_MAX}));
    there.transport = transport;
    return ++there.lives;
}

void SimNetwork::detach(SimTransport *transport, uint64_t place) {
    if (attached(transport, place)) crash(place);
}

bool SimNetwork::attached(const SimTransport *transport, uint64_t place) const {
    const auto found = places_.find(place);
    return found != places_.end() && found->second.transport == transport;
}

void SimNetwork::crash(uint64_t place) {
    Place &there = places_[place];
    there.transport = nullptr;
    for (auto at = there.queue.begin(); at != there.queue.end();) {
        at = at->second.kind >= SimPacket::Kind::depart ? there.queue.erase(at) : std::next(at);
    }
}

uint64_t SimNetwork::next_due(uint64_t place, adt_transport_h transport) const {
    const auto found = places_.find(place);
    if (found == places_.end() || found->second.queue.empty()) return UINT64_MAX;
    if (found->second.transport != reinterpret_cast<SimTransport *>(transport)) return UINT64_MAX;
    return found->second.queue.begin()->first.first;
}

void SimNetwork::enqueue(SimPacket packet, uint64_t at) {
    Queue &queue = places_[packet.to].queue;
    queue.emplace(std::pair<uint64_t, uint64_t>{at, order_++}, std::move(packet));
}

// When the last of these bytes has left, if they begin as soon as the way is free.
uint64_t SimNetwork::depart_at(uint64_t from, uint64_t to, uint64_t bytes) {
    const SimWay &path = way(from, to);
    const uint64_t now = clock_.now_ns();
    if (path.bytes_per_second == 0) return now;
    uint64_t &free_at = free_at_[{from, to}];
    free_at = std::max(free_at, now) +
              static_cast<uint64_t>(static_cast<double>(bytes) * 1e9 / static_cast<double>(path.bytes_per_second));
    return free_at;
}

void SimNetwork::send(SimPacket packet) {
    const SimWay &path = way(packet.from, packet.to);
    if (path.blocked) {
        held_[{packet.from, packet.to}].push_back(std::move(packet));
        return;
    }
    uint64_t delay = random_.between(path.latency_least, path.latency_most);
    for (uint64_t wait = path.resend; random_.chance(path.loss); wait *= 2) delay += wait;
    if (random_.chance(path.reorder)) delay += random_.between(0, path.reorder_most);
    if (random_.chance(path.duplicate)) {
        enqueue(packet, clock_.now_ns() + delay + random_.between(0, path.latency_most + path.reorder_most));
    }
    enqueue(std::move(packet), clock_.now_ns() + delay);
}

void SimNetwork::later(SimPacket packet, uint64_t delay) {
    enqueue(std::move(packet), clock_.now_ns() + delay);
}

bool SimNetwork::take_due(uint64_t place, SimPacket &out) {
    Queue &queue = places_[place].queue;
    if (queue.empty() || queue.begin()->first.first > clock_.now_ns()) return false;
    out = std::move(queue.begin()->second);
    queue.erase(queue.begin());
    return true;
}

// ----------------------------------------------------------------------------------------------------- transport

namespace {

constexpr uint64_t kBatchBytes = uint64_t{1} << 20;
constexpr uint32_t kBatchChunks = 1024;

struct Memory {
    uint64_t cache = 0;
    uint64_t key = 0;
    std::vector<char *> tensors;
    uint64_t extent = 0;
};

struct SimKey {
    static constexpr uint32_t kMagic = 0x4d495341;
    uint32_t magic;
    uint32_t num_tensors;
    uint64_t key;
};

struct Remote {
    uint64_t cache = 0;
    uint64_t key = 0;
};

// One of our batches, until its answer is here.
struct Posted {
    adt_batch_t *batch = nullptr;
    std::shared_ptr<const SimRequest> request;
    std::vector<bool> landed;  // fragments of a read
    uint32_t missing = 0;
    bool detached = false;
};

// A request of the peer.
struct Serving {
    std::shared_ptr<const SimRequest> request;
    std::vector<adt_chunk_t> chunks;  // `local` is here
    void *token = nullptr;            // null: refused or revoked
    std::vector<bool> arrived;        // fragments of a write
    uint32_t missing = 0;             // not in memory yet (of a write), not sent yet (of a read)
    adt_status_t status = ADT_OK;
};

struct Endpoint {
    uint32_t number = 0;
    void *link = nullptr;
    uint64_t name = 0;  // of the link, on the network
    unsigned end = 0;
    uint64_t peer = 0;
    uint64_t next_request = 0;
    std::map<uint64_t, Posted> posted;
    std::map<uint64_t, Serving> serving;
    std::unordered_set<uint64_t> served;  // requests that were answered: what comes of them is a duplicate
};

}  // namespace

class SimTransport {
  public:
    explicit SimTransport(const adt_open_params_t &params)
        : host_(*params.host), network_(static_cast<SimNetwork *>(params.network)), place_(params.place) {
        if (network_ != nullptr) life_ = network_->attach(this, place_);
    }
    ~SimTransport() {
        if (network_ != nullptr) network_->detach(this, place_);
    }
    SimTransport(const SimTransport &) = delete;
    SimTransport &operator=(const SimTransport &) = delete;

    adt_status_t fail(adt_status_t status, std::string text) {
        error_ = std::move(text);
        return status;
    }
    const std::string &error() const { return error_; }

    bool simulated() const { return network_ != nullptr; }
    uint64_t new_key() { return network_ == nullptr ? 0 : network_->random().next(); }

    adt_status_t connect(const adt_connect_params_t &params, adt_endpoint_h *out) {
        SimNetwork::Bound bound{};
        if (network_ == nullptr || !network_->take_bound(params.wire, bound)) {
            return fail(ADT_ERR_UNSUPPORTED, "the engine connection belongs to no simulated network");
        }
        auto made = std::make_unique<Endpoint>();
        made->number = ++endpoints_made_;
        made->link = params.link;
        made->name = bound.link;
        made->end = bound.end;
        made->peer = bound.peer_place;
        // Random, so that nobody's late answer passes for that of another's request.
        made->next_request = network_->random().next() >> 1;
        network_->endpoint_of(bound.link, bound.end) = made->number;
        *out = reinterpret_cast<adt_endpoint_h>(made.get());
        endpoints_.emplace(made->number, std::move(made));
        return ADT_OK;
    }

    void disconnect(Endpoint &ep) {
        for (auto &[number, serving] : ep.serving) end_serve(serving);
        for (auto &[number, posted] : ep.posted) complete(posted, ADT_ERR_ABORTED);
        endpoints_.erase(ep.number);
    }

    adt_status_t post(adt_batch_t *batch) {
        Endpoint &ep = *reinterpret_cast<Endpoint *>(batch->endpoint);
        const auto &memory = *reinterpret_cast<const Memory *>(batch->local_mem);
        const auto &remote = *reinterpret_cast<const Remote *>(batch->remote);
        auto request = std::make_shared<SimRequest>();
        request->number = ep.next_request++;
        request->opcode = batch->opcode;
        request->chunks.assign(batch->chunks, batch->chunks + batch->count);
        request->bytes = batch->bytes;
        request->cache = remote.cache;
        request->local_cache = memory.cache;
        request->key = remote.key;
        request->op = batch->op_id;
        request->epoch = batch->epoch;
        request->by = place_;
        request->by_life = life_;
        const bool write = batch->opcode == ADT_WRITE;
        const SimWay &path = write ? network_->way(place_, ep.peer) : network_->way(ep.peer, place_);
        request->fragment_bytes = std::max<uint64_t>(path.fragment_bytes, 1);
        request->fragments =
            static_cast<uint32_t>((batch->bytes + request->fragment_bytes - 1) / request->fragment_bytes);
        Posted &posted = ep.posted[request->number];
        posted.batch = batch;
        posted.request = request;
        posted.missing = request->fragments;
        posted.landed.resize(request->fragments);
        if (write) {
            start_sending(ep, request);
        } else {
            send(ep, SimPacket::Kind::request, request, 0, ADT_OK, nullptr);
        }
        return ADT_OK;
    }

    size_t poll(adt_completion_t *out, size_t capacity) {
        SimPacket packet;
        while (network_ != nullptr && network_->attached(this, place_) && network_->take_due(place_, packet)) {
            const auto found = endpoints_.find(packet.endpoint);
            if (found != endpoints_.end()) take(*found->second, packet);
        }
        const size_t n = std::min(capacity, done_.size());
        std::copy_n(done_.begin(), n, out);
        done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(n));
        return n;
    }

    // What is on its way to local memory finds no batch any more, and what has not left it stays there.
    adt_status_t cancel(Endpoint &ep, uint64_t op_id) {
        for (auto at = ep.posted.begin(); at != ep.posted.end();) {
            Posted &posted = at->second;
            if (posted.request->op != op_id || posted.detached) {
                ++at;
                continue;
            }
            if (posted.request->opcode == ADT_READ) {
                complete(posted, ADT_ERR_ABORTED);
                at = ep.posted.erase(at);
                continue;
            }
            posted.detached = true;
            done_.push_back({posted.batch, ADT_ERR_ABORTED, 1});
            ++at;
        }
        host_.notify(host_.ctx, reinterpret_cast<adt_transport_h>(this));
        return ADT_OK;
    }

    adt_status_t revoke(Endpoint &ep, uint64_t cache) {
        for (auto at = ep.serving.begin(); at != ep.serving.end();) {
            if (cache != 0 && at->second.request->cache != cache) {
                ++at;
                continue;
            }
            at->second.status = ADT_ERR_FENCED;
            at = answer(ep, at);
        }
        return ADT_OK;
    }

    uint64_t life() const { return life_; }

  private:
    using Served = std::map<uint64_t, Serving>::iterator;

    void send(const Endpoint &ep, SimPacket::Kind kind, std::shared_ptr<const SimRequest> request, uint32_t fragment,
              adt_status_t status, std::shared_ptr<std::string> bytes) {
        if (!network_->attached(this, place_)) return;
        SimPacket packet;
        packet.kind = kind;
        packet.from = place_;
        packet.to = ep.peer;
        packet.endpoint = network_->endpoint_of(ep.name, 1 - ep.end);
        packet.fragment = fragment;
        packet.status = status;
        packet.request = std::move(request);
        packet.bytes = std::move(bytes);
        network_->send(std::move(packet));
    }

    void here(const Endpoint &ep, SimPacket::Kind kind, std::shared_ptr<const SimRequest> request, uint32_t fragment,
              std::shared_ptr<std::string> bytes, uint64_t delay) {
        if (!network_->attached(this, place_)) return;
        SimPacket packet;
        packet.kind = kind;
        packet.from = packet.to = place_;
        packet.endpoint = ep.number;
        packet.fragment = fragment;
        packet.request = std::move(request);
        packet.bytes = std::move(bytes);
        network_->later(std::move(packet), delay);
    }

    void start_sending(const Endpoint &ep, const std::shared_ptr<const SimRequest> &request) {
        for (uint32_t i = 0; i < request->fragments; ++i) {
            const uint64_t bytes = std::min(request->fragment_bytes, request->bytes - i * request->fragment_bytes);
            const uint64_t at = network_->depart_at(place_, ep.peer, bytes);
            here(ep, SimPacket::Kind::depart, request, i, nullptr, at - network_->clock().now_ns());
        }
    }

    void take(Endpoint &ep, SimPacket &packet) {
        switch (packet.kind) {
            case SimPacket::Kind::request:
                begin(ep, packet.request);
                return;
            case SimPacket::Kind::depart:
                depart(ep, packet);
                return;
            case SimPacket::Kind::payload:
                arrive(ep, packet);
                return;
            case SimPacket::Kind::visible:
                land(ep, packet);
                return;
            case SimPacket::Kind::answer: {
                const auto found = ep.posted.find(packet.request->number);
                if (found == ep.posted.end()) return;
                complete(found->second, packet.status);
                ep.posted.erase(found);
                return;
            }
        }
    }

    // The owner's side: the first that is heard of a request. Null: it was answered before.
    Serving *begin(Endpoint &ep, const std::shared_ptr<const SimRequest> &request) {
        if (ep.served.count(request->number) != 0) return nullptr;
        const auto found = ep.serving.find(request->number);
        if (found != ep.serving.end()) return &found->second;
        Serving &serving = ep.serving[request->number];
        serving.request = request;
        serving.chunks = request->chunks;
        serving.missing = request->fragments;
        serving.arrived.resize(request->fragments);
        const auto key = keys_.find(request->cache);
        if (!network_->trusts_keys() && (key == keys_.end() || key->second != request->key)) {
            serving.status = ADT_ERR_PERMISSION;
        } else {
            adt_request_t asked{};
            asked.opcode = request->opcode;
            asked.count = static_cast<uint32_t>(serving.chunks.size());
            asked.chunks = serving.chunks.data();
            asked.bytes = request->bytes;
            asked.cache_id = request->cache;
            asked.op_id = request->op;
            asked.epoch = request->epoch;
            serving.status = host_.begin_serve(host_.ctx, ep.link, &asked, &serving.token);
        }
        if (serving.status != ADT_OK || request->fragments == 0) {
            answer(ep, ep.serving.find(request->number));
            return nullptr;
        }
        if (request->opcode == ADT_READ) start_sending(ep, request);
        return &serving;
    }

    // A fragment leaves the memory that it is read from, at the initiator of a write or the owner of what is read.
    void depart(Endpoint &ep, const SimPacket &packet) {
        const SimRequest &request = *packet.request;
        if (request.opcode == ADT_WRITE) {
            const auto found = ep.posted.find(request.number);
            if (found == ep.posted.end()) return;
            auto bytes = found->second.detached ? nullptr : std::make_shared<std::string>();
            if (bytes) move(request.chunks, packet, bytes.get(), request.local_cache);
            send(ep, SimPacket::Kind::payload, packet.request, packet.fragment, ADT_OK, std::move(bytes));
            return;
        }
        const auto found = ep.serving.find(request.number);
        if (found == ep.serving.end()) return;
        auto bytes = std::make_shared<std::string>();
        move(found->second.chunks, packet, bytes.get(), request.cache);
        send(ep, SimPacket::Kind::payload, packet.request, packet.fragment, ADT_OK, std::move(bytes));
        if (--found->second.missing > 0) return;
        end_serve(found->second);
        ep.served.insert(request.number);
        ep.serving.erase(found);
    }

    // A fragment has come.
    void arrive(Endpoint &ep, const SimPacket &packet) {
        const SimRequest &request = *packet.request;
        std::vector<bool> *seen = nullptr;
        if (request.opcode == ADT_WRITE) {
            Serving *const serving = begin(ep, packet.request);
            if (serving == nullptr) return;
            if (!packet.bytes) {
                serving->status = ADT_ERR_ABORTED;
                answer(ep, ep.serving.find(request.number));
                return;
            }
            seen = &serving->arrived;
        } else {
            const auto found = ep.posted.find(request.number);
            if (found == ep.posted.end()) return;
            seen = &found->second.landed;
        }
        if ((*seen)[packet.fragment]) return;  // a duplicate
        (*seen)[packet.fragment] = true;
        const SimWay &path = network_->way(ep.peer, place_);
        here(ep, SimPacket::Kind::visible, packet.request, packet.fragment, packet.bytes,
             network_->random().between(path.visible_least, path.visible_most));
    }

    // A fragment gets into memory, unless that was taken away from it.
    void land(Endpoint &ep, const SimPacket &packet) {
        const SimRequest &request = *packet.request;
        if (request.opcode == ADT_WRITE) {
            const auto found = ep.serving.find(request.number);
            if (found == ep.serving.end()) return;
            move(found->second.chunks, packet, nullptr, request.cache);
            if (--found->second.missing == 0) answer(ep, found);
            return;
        }
        const auto found = ep.posted.find(request.number);
        if (found == ep.posted.end()) return;
        move(request.chunks, packet, nullptr, request.local_cache);
        if (--found->second.missing > 0) return;
        complete(found->second, ADT_OK);
        ep.posted.erase(found);
    }

    // Copies the bytes of one fragment between memory (`local` of the chunks) and the packet: out of memory into
    // `into`, or from packet.bytes.
    void move(const std::vector<adt_chunk_t> &chunks, const SimPacket &packet, std::string *into, uint64_t cache) {
        const SimRequest &request = *packet.request;
        const uint64_t first = packet.fragment * request.fragment_bytes;
        const uint64_t last = std::min(first + request.fragment_bytes, request.bytes);
        const bool ours = (request.opcode == ADT_WRITE) == (into != nullptr);
        const auto memory = memories_.find(cache);
        uint64_t at = 0;
        for (const adt_chunk_t &chunk : chunks) {
            const uint64_t from = std::max(at, first);
            const uint64_t to = std::min(at + chunk.length, last);
            if (from < to) {
                char *const here = static_cast<char *>(chunk.local) + (from - at);
                if (into != nullptr) {
                    into->append(here, to - from);
                } else {
                    std::memcpy(here, packet.bytes->data() + (from - first), to - from);
                }
                SimAccess access{};
                access.at = network_->clock().now_ns();
                access.place = place_;
                access.life = life_;
                access.cache = cache;
                access.address = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(here));
                access.bytes = to - from;
                access.write = into == nullptr ? 1 : 0;
                access.by = request.by;
                access.by_life = request.by_life;
                access.op = request.op;
                access.tensor = chunk.remote_tensor;
                access.offset = chunk.remote_offset + (from - at);
                if (ours && memory != memories_.end()) locate(*memory->second, here, access);
                network_->note(access);
            }
            at += chunk.length;
            if (at >= last) break;
        }
    }

    static void locate(const Memory &memory, const char *here, SimAccess &access) {
        for (uint32_t i = 0; i < memory.tensors.size(); ++i) {
            if (here < memory.tensors[i] || here >= memory.tensors[i] + memory.extent) continue;
            access.tensor = i;
            access.offset = static_cast<uint64_t>(here - memory.tensors[i]);
            return;
        }
    }

    Served answer(Endpoint &ep, Served at) {
        end_serve(at->second);
        ep.served.insert(at->first);
        send(ep, SimPacket::Kind::answer, at->second.request, 0, at->second.status, nullptr);
        return ep.serving.erase(at);
    }

    void end_serve(Serving &serving) {
        if (void *const token = std::exchange(serving.token, nullptr)) host_.end_serve(host_.ctx, token);
    }

    void complete(Posted &posted, adt_status_t status) { done_.push_back({posted.batch, status, 0}); }

  public:
    std::unordered_map<uint64_t, uint64_t> keys_;  // of caches that are registered
    std::unordered_map<uint64_t, const Memory *> memories_;

  private:
    const adt_host_t host_;
    SimNetwork *const network_;
    const uint64_t place_;
    uint64_t life_ = 0;
    uint32_t endpoints_made_ = 0;
    std::map<uint32_t, std::unique_ptr<Endpoint>> endpoints_;
    std::vector<adt_completion_t> done_;
    std::string error_;
};

namespace {

SimTransport &sim(adt_transport_h handle) {
    return *reinterpret_cast<SimTransport *>(handle);
}

void probe(adt_probe_t *out) {
    out->usable = 0;
    std::snprintf(out->reason, sizeof(out->reason), "only within a simulation: aiodatadist.testing.SimCluster");
}

adt_status_t open_sim(const adt_open_params_t *params, adt_transport_h *out) {
    try {
        *out = reinterpret_cast<adt_transport_h>(new SimTransport(*params));
        return ADT_OK;
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

void close_sim(adt_transport_h handle) {
    delete &sim(handle);
}

adt_status_t reg_mem(adt_transport_h handle, const adt_memory_t *memory, adt_mem_h *out) {
    if (memory->placement != ADT_PLACEMENT_HOST) return ADT_ERR_UNSUPPORTED;
    try {
        auto made = std::make_unique<Memory>();
        made->cache = memory->cache_id;
        made->key = sim(handle).new_key();
        made->extent = tensor_extent(memory->geometry);
        for (uint32_t i = 0; i < memory->geometry.num_tensors; ++i) {
            made->tensors.push_back(static_cast<char *>(memory->tensors[i]));
        }
        // Outside a simulation nobody looks for it, and there engines have threads.
        if (sim(handle).simulated()) {
            sim(handle).keys_[made->cache] = made->key;
            sim(handle).memories_[made->cache] = made.get();
        }
        *out = reinterpret_cast<adt_mem_h>(made.release());
        return ADT_OK;
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

adt_status_t dereg_mem(adt_transport_h handle, adt_mem_h mem, void *) {
    const auto *const memory = reinterpret_cast<const Memory *>(mem);
    if (sim(handle).simulated()) {
        const auto found = sim(handle).memories_.find(memory->cache);
        if (found != sim(handle).memories_.end() && found->second == memory) {
            sim(handle).memories_.erase(found);
            sim(handle).keys_.erase(memory->cache);
        }
    }
    delete memory;
    return ADT_OK;
}

adt_status_t export_key(adt_transport_h, adt_mem_h mem, void *buffer, size_t capacity, size_t *size) {
    const auto &memory = *reinterpret_cast<const Memory *>(mem);
    *size = sizeof(SimKey);
    if (capacity < *size) return ADT_ERR_AGAIN;
    const SimKey key{SimKey::kMagic, static_cast<uint32_t>(memory.tensors.size()), memory.key};
    std::memcpy(buffer, &key, sizeof(key));
    return ADT_OK;
}

adt_status_t import_key(adt_transport_h handle, adt_endpoint_h, uint64_t cache_id, const adt_geometry_t *geometry,
                        const adt_key_t *key, adt_remote_h *out, adt_path_t *path) {
    SimKey read{};
    if (key->size != sizeof(read)) return sim(handle).fail(ADT_ERR_PROTOCOL, "the sim key has another length");
    std::memcpy(&read, key->data, sizeof(read));
    if (read.magic != SimKey::kMagic || read.num_tensors != geometry->num_tensors) {
        return sim(handle).fail(ADT_ERR_PROTOCOL, "the sim key does not fit its cache");
    }
    try {
        *out = reinterpret_cast<adt_remote_h>(new Remote{cache_id, read.key});
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
    *path = {"sim", kBatchBytes, kBatchChunks, 0};
    return ADT_OK;
}

void release_key(adt_transport_h, adt_remote_h remote) {
    delete reinterpret_cast<Remote *>(remote);
}

adt_status_t connect_sim(adt_transport_h handle, const adt_connect_params_t *params, adt_endpoint_h *out) {
    try {
        return sim(handle).connect(*params, out);
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

adt_status_t disconnect_sim(adt_transport_h handle, adt_endpoint_h endpoint) {
    sim(handle).disconnect(*reinterpret_cast<Endpoint *>(endpoint));
    return ADT_OK;
}

adt_status_t post(adt_transport_h handle, adt_batch_t *const *batches, size_t count, size_t *posted) {
    *posted = 0;
    try {
        for (; *posted < count; ++*posted) {
            const adt_status_t status = sim(handle).post(batches[*posted]);
            if (status != ADT_OK) return status;
        }
        return ADT_OK;
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

size_t poll_sim(adt_transport_h handle, adt_completion_t *out, size_t capacity) {
    return sim(handle).poll(out, capacity);
}

adt_status_t cancel(adt_transport_h handle, adt_endpoint_h endpoint, uint64_t op_id) {
    return sim(handle).cancel(*reinterpret_cast<Endpoint *>(endpoint), op_id);
}

adt_status_t revoke(adt_transport_h handle, adt_endpoint_h endpoint, uint64_t cache_id, uint32_t) {
    return sim(handle).revoke(*reinterpret_cast<Endpoint *>(endpoint), cache_id);
}

void last_error(adt_transport_h handle, char *buffer, size_t capacity) {
    std::snprintf(buffer, capacity, "%s", sim(handle).error().c_str());
}

}  // namespace

const adt_transport_ops_t kSimOps = {
    ADT_ABI_VERSION,
    sizeof(adt_transport_ops_t),
    "sim",
    0,
    4,
    probe,
    open_sim,
    close_sim,
    reg_mem,
    dereg_mem,
    export_key,
    import_key,
    release_key,
    adt_unsupported_import_local,
    connect_sim,
    disconnect_sim,
    adt_no_hear,
    post,
    adt_unsupported_execute,
    poll_sim,
    adt_no_event_fd,
    adt_always_armed,
    adt_no_loop_fd,
    adt_no_loop_progress,
    adt_no_take_over,
    cancel,
    revoke,
    last_error,
};

}  // namespace adt
