// SPDX-License-Identifier: Apache-2.0
// One link's side of verbs: a reliable-connected queue pair, which is made anew when it had to be flushed, and the
// batches that are posted on it.
//
// Generations. Both ends count the queue pairs they have made for each other. An end that needs a new one flushes its
// own, makes the next generation and offers it; the other hears that its own is of no use any more, does likewise, and
// both connect. What was posted on the old ones is posted again, but for what was given up or has failed. An offer also
// says that the old queue pair of its sender is gone, so that nothing that was on the wire can arrive there any more.
//
// Locks. `control_` is held while a queue pair is made, connected or ended, which may take seconds; `mu_` guards all
// that posting and completions need, and only VerbsDone's is taken under it. Neither is held when the host is called.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "aiodatadist/transport.h"
#include "counted.hpp"
#include "verbs_memory.hpp"

namespace adt {

// What ends tell each other: adt_message_t::kind, which begins behind HIXL's.
enum class VerbsSay : uint8_t {
    offer = 0x41,  // number: generation, small: LID, a and b: GID, c: VerbsAddress
    ready,         // number: generation; the sender takes requests
    refused,       // a: what is older than this fence, b: a cache, or 0; refused from now on
    failed,        // number: generation; the sender has given the first one up
};

// Completions of all endpoints that wait to be polled. What becomes of a batch is entered under the lock of its
// endpoint: in a list of the caller's own, "detached" could come behind the end that retires the batch, and mean the
// next operation that uses it.
class VerbsDone {
  public:
    void add(adt_batch_t *batch, adt_status_t status, uint32_t detached) {
        const std::lock_guard<std::mutex> lock(mu_);
        done_.push_back({batch, status, detached});
    }
    size_t take(adt_completion_t *out, size_t capacity);

  private:
    std::mutex mu_;  // a leaf
    std::deque<adt_completion_t> done_;
};

// Moves between the memory of this side and of the peer. Made by `Verbs`, and freed with its last reference.
class VerbsEndpoint : Counted<Live::queue_pair> {
  public:
    VerbsEndpoint(uint64_t id, void *link, const adt_rdma_t &rdma, VerbsDone &done);
    ~VerbsEndpoint();
    VerbsEndpoint(const VerbsEndpoint &) = delete;
    VerbsEndpoint &operator=(const VerbsEndpoint &) = delete;

    const uint64_t id;
    void *const link;
    const std::string device_name;     // name:port
    std::atomic<uint32_t> waiting{0};  // messages that were heard and not taken up

    // What became of a call, to be told to the host when no lock is held.
    struct Outcome {
        adt_status_t status;
        std::string reason;
    };
    struct News {
        bool done = false;  // there are completions
        std::vector<adt_message_t> messages;
        std::optional<Outcome> settled;
        std::optional<Outcome> lost;
        bool broken = false;  // `rebuild` is due
        bool stuck = false;   // the device has not let go of the queue pair: the same call is due once more
        std::string error;
    };

    // Called by one thread, in which they may take long.
    void start(const std::shared_ptr<RegisteredDevice> &device, uint8_t port, News &news);
    void fail(const std::string &reason, News &news);
    void rebuild(News &news);
    void hear(const adt_message_t &message, News &news);
    void close(News &news);

    // Called by any thread.
    adt_status_t post(adt_batch_t *batch, News &news);
    void progress(News &news);  // takes completions
    bool arm(News &news);       // false: there were more completions, which have been taken
    void cancel(uint64_t op, News &news);
    void revoke(uint64_t cache, uint32_t epoch, News &news);
    bool closed() const { return closed_.load(std::memory_order_acquire); }
    void imported(uint64_t cache);
    void released(uint64_t cache);

  private:
    // A batch, and how much of it is posted.
    struct Work {
        adt_batch_t *batch;
        uint32_t chunk = 0;
        uint64_t at = 0;
        uint32_t groups = 0;  // posted and not completed
        bool ended = false;   // all is posted
        bool stale = false;   // requests on an earlier queue pair had not ended, and the peer's may still be there
        adt_status_t given_up = ADT_OK;  // what it ends with unless it completes before
        adt_status_t failure = ADT_OK;
    };
    // Requests that one completion stands for.
    struct Group {
        uint64_t id;
        Work *work;  // null: the first request of all, which shows that the way is open
        uint32_t requests;
        bool last;
    };
    // A cache of the peer for which this side has keys.
    struct Imported {
        uint32_t keys = 0;
        bool refused = false;
    };
    enum class State : uint8_t { starting, offered, connected, proving, up, down, failed };

    bool make_queue_pair(News &news);
    bool connect_queue_pair(const adt_message_t &offer, News &news);
    bool end_queue_pair(News &news);
    bool destroy(ibv_qp *qp, News &news);
    void begin_generation(int32_t generation, News &news);
    void go_up(News &news);
    void give_up(const std::string &reason, News &news);
    void lose(adt_status_t status, const std::string &reason, News &news);
    void enter(const Work &work, adt_status_t status, uint32_t detached, News &news);
    void pump(News &news);
    bool post_some(Work &work, News &news);
    bool post_proof(News &news);
    void take_completions(News &news);
    void take(const ibv_wc &wc, News &news);
    void finish(Work &work, adt_status_t status, News &news);
    void mark_broken(News &news);
    void retire_detached(News &news);
    template <typename Which>
    void end_works(const Which &which, adt_status_t status, News &news);
    adt_status_t refusal(const adt_batch_t &batch) const;

    const adt_rdma_t rdma_;
    VerbsDone &done_;
    std::shared_ptr<RegisteredDevice> device_;
    uint8_t port_ = 1;
    ibv_port_attr port_attr_{};
    ibv_gid gid_{};
    std::mutex control_;
    // under control_
    int32_t generation_ = 0;
    int32_t peer_ready_ = 0;
    uint32_t psn_ = 0;
    std::vector<adt_message_t> refusals_;  // to be told before the next offer
    std::atomic<bool> closed_{false};
    std::atomic<bool> settled_{false};
    std::mutex mu_;
    // under mu_; the pointers change under both locks
    State state_ = State::starting;
    ibv_cq *cq_ = nullptr;
    ibv_qp *qp_ = nullptr;
    uint32_t credits_ = 0;
    uint32_t most_credits_ = 0;
    uint32_t max_sge_ = 1;
    uint64_t max_message_ = 0;
    uint64_t next_group_ = 1;
    bool rebuild_due_ = false;
    adt_status_t proof_status_ = ADT_OK;
    std::deque<std::unique_ptr<Work>> works_;  // in the order of posting; completed from the front
    size_t next_ = 0;                          // the first of them that is not all posted
    std::deque<Group> groups_;
    std::vector<std::unique_ptr<Work>> detached_;
    uint32_t min_epoch_ = 0;
    std::map<uint64_t, Imported> imported_;
    std::vector<ibv_send_wr> requests_;
    std::vector<ibv_sge> pieces_;
};

// Words for a status of adt_completion_t, or of a failed request.
std::string verbs_status_words(adt_status_t status);

}  // namespace adt
