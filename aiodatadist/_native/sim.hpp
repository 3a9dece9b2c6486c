// SPDX-License-Identifier: Apache-2.0
// A simulated network between stepped engines of one process, on one virtual clock.
//
// It carries what the transport `sim` (sim.cpp) sends, in fragments that arrive when the faults of their way say, and
// notes each access to memory. Who drives the engines moves the clock. There is one driver, and it is one thread: so
// nothing here is locked. No address, no real time and no hash decides anything, only the seed and the order of calls.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aiodatadist/transport.h"
#include "engine.hpp"

namespace adt {

class SimTransport;

// What happens to fragments that go from one place to another. Times are ns.
struct SimWay {
    uint64_t latency_least = 0;
    uint64_t latency_most = 0;
    uint64_t bytes_per_second = 0;  // 0: no limit
    uint64_t fragment_bytes = 65536;
    double loss = 0;  // of a fragment, which is sent again after `resend`
    uint64_t resend = 0;
    double duplicate = 0;  // arrives a second time
    double reorder = 0;    // is late by up to `reorder_most`
    uint64_t reorder_most = 0;
    uint64_t visible_least = 0;  // from arrival until the bytes are in memory
    uint64_t visible_most = 0;
    bool blocked = false;
};

// One access to memory.
struct SimAccess {
    uint64_t at;
    uint64_t place;  // whose memory
    uint64_t life;   // which engine at that place
    uint64_t cache;
    uint64_t address;
    uint64_t bytes;
    uint32_t tensor;
    uint32_t write;  // 1: written, 0: read
    uint64_t by;     // place of the operation
    uint64_t by_life;
    uint64_t op;
    uint64_t offset;  // from the start of the tensor
};

// Splitmix64: the same numbers everywhere.
class SimRandom {
  public:
    explicit SimRandom(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    uint64_t between(uint64_t least, uint64_t most) {
        return most <= least ? least : least + next() % (most - least + 1);
    }
    bool chance(double p) { return p > 0 && static_cast<double>(next() >> 11) * 0x1p-53 < p; }

  private:
    uint64_t state_;
};

// A request for a peer's memory, as both ends and all its fragments share it.
struct SimRequest {
    uint64_t number = 0;
    adt_opcode_t opcode = ADT_READ;
    std::vector<adt_chunk_t> chunks;  // `local` is the initiator's
    uint64_t bytes = 0;
    uint64_t cache = 0;
    uint64_t local_cache = 0;
    uint64_t key = 0;
    uint64_t op = 0;
    uint32_t epoch = 0;
    uint64_t by = 0;
    uint64_t by_life = 0;
    uint64_t fragment_bytes = 0;
    uint32_t fragments = 0;
};

struct SimPacket {
    // The first three travel. The others stay at their place: bytes leave the memory, or get into it.
    enum class Kind : uint8_t { request, payload, answer, depart, visible };
    Kind kind = Kind::request;
    uint64_t from = 0;
    uint64_t to = 0;
    uint32_t endpoint = 0;  // its number at `to`
    uint32_t fragment = 0;
    adt_status_t status = ADT_OK;
    std::shared_ptr<const SimRequest> request;
    std::shared_ptr<std::string> bytes;  // null: left out, because the sender no longer reads its memory
};

class SimNetwork {
  public:
    SimNetwork(uint64_t seed, unsigned left_out) : left_out_(left_out), random_(seed) {}

    Clock &clock() { return clock_; }
    SimRandom &random() { return random_; }
    bool trusts_keys() const { return (left_out_ & kNoKey) != 0; }
    unsigned left_out() const { return left_out_; }

    // The way from one place to another; a change counts for what is sent from now on. What a blocked way holds goes on
    // when it is open again.
    void set_way(uint64_t from, uint64_t to, const SimWay &way);
    const SimWay &way(uint64_t from, uint64_t to) const;

    // The engine connection `fd` is one end (0 or 1) of this link.
    void bind(int fd, uint64_t link, unsigned end, uint64_t peer_place);
    // Cuts a place off: nothing arrives, nothing leaves any more, and what its memory waits for never comes. What it
    // has sent is on its way.
    void crash(uint64_t place);
    // When the next packet arrives at a place for this transport; UINT64_MAX: none.
    uint64_t next_due(uint64_t place, adt_transport_h transport) const;

    std::vector<SimAccess> take_accesses() { return std::exchange(accesses_, {}); }

    // For the transport.
    uint64_t attach(SimTransport *transport, uint64_t place);
    void detach(SimTransport *transport, uint64_t place);
    bool attached(const SimTransport *transport, uint64_t place) const;
    struct Bound {
        uint64_t link;
        unsigned end;
        uint64_t peer_place;
    };
    bool take_bound(int fd, Bound &out);
    uint32_t &endpoint_of(uint64_t link, unsigned end) { return links_[link][end]; }
    void send(SimPacket packet);
    void later(SimPacket packet, uint64_t delay);
    uint64_t depart_at(uint64_t from, uint64_t to, uint64_t bytes);
    bool take_due(uint64_t place, SimPacket &out);
    void note(const SimAccess &access) { accesses_.push_back(access); }

  private:
    using Queue = std::map<std::pair<uint64_t, uint64_t>, SimPacket>;  // by time, then in the order of sending
    struct Place {
        SimTransport *transport = nullptr;
        uint64_t lives = 0;
        Queue queue;
    };
    void enqueue(SimPacket packet, uint64_t at);

    const unsigned left_out_;
    Clock clock_{true};
    SimRandom random_;
    SimWay plain_;
    std::map<std::pair<uint64_t, uint64_t>, SimWay> ways_;
    std::map<std::pair<uint64_t, uint64_t>, std::vector<SimPacket>> held_;
    std::map<std::pair<uint64_t, uint64_t>, uint64_t> free_at_;
    std::map<uint64_t, Place> places_;
    std::unordered_map<int, Bound> bound_;
    std::unordered_map<uint64_t, std::array<uint32_t, 2>> links_;
    std::vector<SimAccess> accesses_;
    uint64_t order_ = 0;
};

}  // namespace adt
