// SPDX-License-Identifier: Apache-2.0
// One side of one link over HIXL: the connection from here to the peer's engine, by which this side reads and writes
// the peer's memory. The peer has one of its own in the other direction.
//
// HIXL cannot cancel a request, and what it has given up may still write until the connection has ended. So whatever
// does not drain ends with the connection: only a finished disconnect says that local memory is quiet. What others had
// under way is handed to the next connection.
//
// All of it runs in the thread of its agent. Nothing blocks: HIXL connects, moves and disconnects by itself, and
// `step` looks how far it is.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "aiodatadist/transport.h"
#include "counted.hpp"
#include "hixl_api.h"
#include "hixl_memory.hpp"

namespace adt {

class HixlAgent;
class HixlEndpoint;

// What ends tell each other: adt_message_t::kind.
enum class HixlSay : uint8_t {
    offer = 1,  // small: port, number: 4 or 6, a and b: IP address, c: generation of the memory that is registered
    failed,     // the sender has given up before the first connection
    pause,      // c: a number; disconnect, and say so, because memory is to be taken back
    paused,     // c: that number
    resume,     // c: that number; the memory is gone
};

// What became of a call, to be told to the host.
struct HixlNews {
    std::vector<adt_completion_t> done;
    std::vector<adt_message_t> messages;
    bool settled = false;
    bool lost = false;
    bool gone = false;
    adt_status_t status = ADT_OK;
    std::string reason;
};

// Who is told. Called in the agent's thread.
class HixlSink {
  public:
    virtual void told(const HixlEndpoint &endpoint, const HixlNews &news) = 0;

  protected:
    ~HixlSink() = default;
};

class HixlEndpoint : Counted<Live::hixl_endpoint> {
  public:
    HixlEndpoint(HixlAgent &agent, HixlSink &sink, uint64_t id, void *link);
    HixlEndpoint(const HixlEndpoint &) = delete;
    HixlEndpoint &operator=(const HixlEndpoint &) = delete;

    HixlAgent &agent;
    HixlSink &sink;
    const uint64_t id;
    void *const link;
    std::atomic<uint32_t> waiting{0};  // messages that were heard and not taken up

    void start(HixlNews &news);
    void refuse(const std::string &reason, HixlNews &news);
    void hear(const adt_message_t &message, HixlNews &news);
    void post(adt_batch_t *batch, const HixlMemory &memory, HixlNews &news);
    void cancel(uint64_t op, HixlNews &news);
    void close(HixlNews &news);
    // Everything HIXL had is gone, because its engine is.
    void finalized(HixlNews &news);

    // Goes on as far as that goes without waiting. False: there is nothing to look after until something is asked.
    bool step(uint64_t now, HixlNews &news);
    // Asks HIXL for each request by itself. True: something has ended.
    bool query(HixlNews &news);
    // A request has ended. HIXL has freed it, and must not be asked for it again.
    void ended(uint64_t cookie, bool well, HixlNews &news);

    // While memory is taken back there is no connection.
    void hold(uint64_t serial, HixlNews &news);
    void release(uint64_t serial, HixlNews &news);
    bool down() const { return state_ == State::down; }
    bool closed() const { return closed_; }
    // Has connected before, and will again.
    bool useful() const { return settled_ && !failed_ && !closed_; }

  private:
    // A batch, and the request that moves it.
    struct Work {
        adt_batch_t *batch;
        const HixlMemory *memory;
        uint64_t needs_here;  // generations of memory that its connection must reach
        uint64_t needs_there;
        void *request = nullptr;
        uint32_t failures = 0;
        bool given_up = false;
    };
    // down: HIXL has nothing of this link.
    enum class State : uint8_t { down, connecting, up, draining, disconnecting };

    bool paused() const { return !peer_pauses_.empty() || !own_pauses_.empty(); }
    bool must_end() const { return closed_ || failed_ || paused() || force_; }
    bool covered(const Work &work) const;
    bool unproved() const;
    void connect(uint64_t now, HixlNews &news);
    void look_connecting(uint64_t now, HixlNews &news);
    void look_disconnecting(uint64_t now, HixlNews &news);
    void pump(HixlNews &news);
    bool submit(Work &work, HixlNews &news);
    void disconnect(uint64_t now, HixlNews &news);
    void went_down(HixlNews &news);
    void connect_failed(const std::string &why, uint64_t now, HixlNews &news);
    void give_up(const std::string &reason, bool tell, HixlNews &news);
    void lose(adt_status_t status, const std::string &reason, HixlNews &news);
    void end_waiting(adt_status_t status, HixlNews &news);

    State state_ = State::down;
    std::string remote_;  // "ip:port" of the peer's engine; empty until it has offered
    uint64_t peer_generation_ = 0;
    // What the connection reaches: memory that was registered before it was made.
    uint64_t covered_here_ = 0;
    uint64_t covered_there_ = 0;
    uint64_t drain_until_ = 0;
    uint64_t retry_at_ = 0;
    uint32_t attempts_ = 0;
    uint64_t connect_at_ = 0;
    uint64_t connect_until_ = 0;  // how long HIXL may have no room for a connection
    bool settled_ = false;
    bool failed_ = false;  // never of use, or no more
    bool closed_ = false;
    bool force_ = false;    // end the connection without draining
    bool counted_ = false;  // among the connections that exist
    std::set<uint64_t> own_pauses_;
    std::set<uint64_t> peer_pauses_;
    std::deque<Work> waiting_works_;      // not handed to HIXL
    std::map<uint64_t, Work> requested_;  // by cookie, in the order of posting
    std::vector<adt_hixl_piece_t> pieces_;
};

}  // namespace adt
