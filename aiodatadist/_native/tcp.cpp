// SPDX-License-Identifier: Apache-2.0
// tcp transport: gathers straight out of registered memory and scatters straight into it, over several connections a
// link. The owner's engine checks and answers every request natively; see tcp_frame.hpp for the wire.
//
// Locks. Each connection has `mu` (its state machine, held while bytes move, a millisecond at most) and `inbox_mu` (a
// leaf: what was posted and not yet taken up). `post` takes the leaf only. The host is told of completions and losses
// when neither is held; begin_serve and end_serve are called under `mu`.
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <unordered_map>
#include <vector>

#include "counted.hpp"
#include "fd.hpp"
#include "tcp_frame.hpp"
#include "threads.hpp"
#include "transports.hpp"

namespace adt {
namespace {

constexpr uint64_t kBatchBytes = 1 << 20;
constexpr size_t kIov = 256;  // pieces a system call moves
constexpr size_t kFillerBytes = 64 * 1024;
constexpr size_t kAheadBytes = 8 * 1024;  // read with a header
constexpr uint64_t kTurnBytes = 4 << 20;  // what one connection moves before another gets the thread
// Beside short requests, and for so long after one: what a system call moves. It is not interrupted, and a processor
// that it has is what they wait for.
constexpr uint64_t kShareBytes = 256 * 1024;
constexpr uint64_t kShareNs = 2'000'000;
constexpr uint32_t kQueueDepth = 6;  // batches an endpoint has posted: two connections, three deep

alignas(64) const char kFiller[kFillerBytes] = {};

// A position in a list of chunks.
struct Cursor {
    uint32_t chunk = 0;
    uint32_t at = 0;

    void advance(const adt_chunk_t *chunks, size_t bytes) {
        while (bytes > 0) {
            const size_t left = chunks[chunk].length - at;
            if (bytes < left) {
                at += static_cast<uint32_t>(bytes);
                return;
            }
            bytes -= left;
            ++chunk;
            at = 0;
        }
    }
};

struct OutFrame {
    FrameHeader header{};
    std::vector<FrameRun> runs;
    const adt_chunk_t *chunks = nullptr;  // payload pieces; null once detached
    uint32_t count = 0;
    std::vector<adt_chunk_t> own_chunks;  // answers: storage of `chunks`
    bool has_payload = false;
    FrameTrailer trailer{ADT_OK, 0};
    adt_batch_t *batch = nullptr;  // requests
    void *served = nullptr;        // answers that read local memory
    uint64_t cache = 0;            // answers: the local cache
    // progress: bytes sent of head (header and runs), payload, trailer
    size_t head_sent = 0;
    uint64_t payload_sent = 0;
    size_t trailer_sent = 0;
    Cursor cursor;

    size_t head_size() const { return sizeof(header) + runs.size() * sizeof(FrameRun); }
    bool started() const { return head_sent > 0; }
    uint64_t payload() const { return has_payload ? header.payload : 0; }
};

// A request of ours that waits for its answer.
struct Waiting {
    uint64_t seq;
    adt_batch_t *batch;
    FrameType answer;
    bool detached;  // the local memory was given back: what still arrives goes to a sink
};

class Tcp;

// bulk: both sides ask, the I/O threads move. asking: for this side's short requests; sent by whoever posts them, and
// answers are received by the loop's thread, or by a thread of the transport once it took over. answering: the peer's
// such one, which that thread serves: it never waits for bulk.
enum class Use : uint8_t { bulk, asking, answering };

struct Connection : Counted<Live::connection> {
    uint64_t id = 0;
    Use use = Use::bulk;
    Fd fd;
    void *link = nullptr;
    std::mutex mu;
    // under mu
    bool closed = false;
    std::deque<OutFrame> out;
    std::deque<Waiting> waiting;
    uint32_t answers_queued = 0;
    uint64_t next_seq = 1;
    enum class Stage : uint8_t { header, runs, payload, trailer } stage = Stage::header;
    FrameHeader in{};
    size_t in_got = 0;
    std::vector<FrameRun> in_runs;
    std::vector<adt_chunk_t> in_chunks;  // a peer's write: where it lands
    FrameTrailer in_trailer{};
    uint64_t payload_got = 0;
    Cursor cursor;
    bool sink = false;
    void *in_served = nullptr;
    adt_status_t in_status = ADT_OK;
    // leaf lock
    std::mutex inbox_mu;
    std::vector<adt_batch_t *> inbox;
    bool busy = false;                     // a thread is at work and will look into the inbox before it leaves
    bool ended = false;                    // nothing is taken any more
    std::atomic<uint64_t> outstanding{0};  // bytes posted and not completed
};

struct Endpoint {
    void *link = nullptr;
    std::vector<std::shared_ptr<Connection>> connections;  // bulk ones first
    size_t bulk = 0;
    std::shared_ptr<Connection> asking;
};

class Tcp {
  public:
    explicit Tcp(const adt_open_params_t &params) : host_(*params.host), stepped_(params.threads == 0) {
        bulk_ = Fd(epoll_create1(EPOLL_CLOEXEC));
        short_ = Fd(epoll_create1(EPOLL_CLOEXEC));
        stop_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        if (!bulk_ || !short_ || !stop_) throw std::system_error(errno, std::generic_category(), "epoll or eventfd");
        epoll_event interest{};
        interest.events = EPOLLIN;
        interest.data.u64 = 0;
        epoll_ctl(bulk_.get(), EPOLL_CTL_ADD, stop_.get(), &interest);
        epoll_ctl(short_.get(), EPOLL_CTL_ADD, stop_.get(), &interest);
        const auto work_at = [this](const Fd &epoll) {
            while (turn(epoll, -1)) {
            }
        };
        try {
            for (unsigned i = 0; i < params.threads; ++i) {
                threads_.push_back(start_thread("adt-io", [this, work_at] {
                    // A post wakes it in the middle of a call.
                    yield_to_whoever_wakes();
                    work_at(bulk_);
                }));
            }
            if (!stepped_) threads_.push_back(start_thread("adt-short", [this, work_at] { work_at(short_); }));
        } catch (...) {
            stop();
            throw;
        }
    }

    ~Tcp() { stop(); }

    void stop() {
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t n = ::write(stop_.get(), &one, sizeof(one));
        for (std::thread &thread : threads_) thread.join();
    }

    bool turn(const Fd &epoll, int timeout_ms);
    void step() {
        while (turn(short_, 0) || turn(bulk_, 0)) {
        }
    }
    adt_status_t connect(const adt_connect_params_t &params, Endpoint *&out);
    void disconnect(Endpoint *endpoint);
    adt_status_t post(adt_batch_t *batch);
    bool post_short(Connection &c, adt_batch_t *batch);
    static int loop_fd(const Endpoint &endpoint);
    adt_status_t loop_progress(const Endpoint &endpoint);
    void take_over(const Endpoint &endpoint);
    void cancel(Endpoint &endpoint, uint64_t op);
    void revoke(Endpoint &endpoint, uint64_t cache);

    size_t poll(adt_completion_t *out, size_t capacity) {
        const std::lock_guard<std::mutex> lock(mu_);
        const size_t n = std::min(capacity, done_.size());
        std::copy_n(done_.begin(), n, out);
        done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(n));
        return n;
    }

    adt_status_t fail(adt_status_t status, std::string text) {
        const std::lock_guard<std::mutex> lock(mu_);
        error_ = std::move(text);
        return status;
    }
    std::string error() {
        const std::lock_guard<std::mutex> lock(mu_);
        return error_;
    }
    bool stepped() const { return stepped_; }

  private:
    // What happened while a connection's lock was held and is told when it is not.
    struct News {
        bool done = false;  // completions wait
        bool lost = false;
        adt_status_t status = ADT_OK;
        std::string reason;
    };

    void work(const std::shared_ptr<Connection> &shared);
    void arm(Connection &c);
    void tell(Connection &c, const News &news);
    bool receive(Connection &c, News &news);
    size_t places(Connection &c, iovec *iov, uint64_t &want) const;
    bool arrived(Connection &c, uint64_t got, News &news);
    bool deliver(Connection &c, News &news);  // a whole frame arrived
    bool begin_frame(Connection &c, News &news);
    bool begin_request(Connection &c, News &news);
    // `may_end` false: a broken connection is left for an I/O thread to find.
    bool transmit(Connection &c, News &news, bool may_end = true);
    void sent(Connection &c, OutFrame &frame);
    void take_inbox(Connection &c, bool ending = false);
    void answer(Connection &c, FrameType type, adt_status_t status, uint64_t seq, uint64_t payload, void *served);
    void complete(Connection &c, adt_batch_t *batch, adt_status_t status, bool detached, News &news);
    void end(Connection &c, adt_status_t status, std::string reason, News &news);
    void end_serve(void *&token) {
        if (token != nullptr) host_.end_serve(host_.ctx, std::exchange(token, nullptr));
    }

    int epoll_of(const Connection &c) const { return (c.use == Use::bulk ? bulk_ : short_).get(); }
    // What a system call on this connection may move.
    uint64_t share(const Connection &c) const {
        const bool shared =
            c.use == Use::bulk && !stepped_ && host_.now_ns(host_.ctx) < short_until_.load(std::memory_order_relaxed);
        return shared ? kShareBytes : kTurnBytes;
    }
    // Between two calls: lets those have the processor who wait for a short request's answer, or to give it.
    static void step_aside(uint64_t shared) {
        if (shared == kShareBytes) sched_yield();
    }

    const adt_host_t host_;
    const bool stepped_;
    std::atomic<uint64_t> short_until_{0};  // until then bulk shares the processors with short requests
    Fd bulk_;                               // epoll of the connections for it
    Fd short_;                              // of all others
    Fd stop_;
    std::mutex mu_;
    std::vector<adt_completion_t> done_;
    std::string error_;
    uint64_t next_id_ = 1;
    std::unordered_map<uint64_t, std::shared_ptr<Connection>> connections_;
    std::vector<std::thread> threads_;
};

// ------------------------------------------------------------------------------------------------- threads, events

bool Tcp::turn(const Fd &epoll, int timeout_ms) {
    epoll_event event{};
    const int n = epoll_wait(epoll.get(), &event, 1, timeout_ms);
    if (n <= 0) return timeout_ms < 0;
    const uint64_t id = event.data.u64;  // a copy: the kernel's struct is packed, and no reference may point into it
    if (id == 0) return false;
    std::shared_ptr<Connection> connection;
    {
        const std::lock_guard<std::mutex> lock(mu_);
        const auto found = connections_.find(id);
        if (found != connections_.end()) connection = found->second;
    }
    if (connection) work(connection);
    return true;
}

// Moves what can be moved on one connection, then arms it again (it is registered one-shot, so that one thread at a
// time has it).
void Tcp::work(const std::shared_ptr<Connection> &shared) {
    Connection &c = *shared;
    News news;
    {
        const std::lock_guard<std::mutex> lock(c.mu);
        {
            const std::lock_guard<std::mutex> inbox(c.inbox_mu);
            c.busy = true;
        }
        for (bool again = true; again && !c.closed;) {
            take_inbox(c);
            if (!transmit(c, news) || !receive(c, news) || !transmit(c, news)) break;
            const std::lock_guard<std::mutex> inbox(c.inbox_mu);
            again = !c.inbox.empty();
            if (again) continue;
            c.busy = false;
            arm(c);
        }
    }
    tell(c, news);
}

// Waits for what the connection can do next; `mu` is held. One for the loop's thread is only watched while something is
// stuck or was taken over.
void Tcp::arm(Connection &c) {
    epoll_event interest{};
    interest.events = EPOLLONESHOT;
    if (c.use != Use::asking || !c.waiting.empty()) interest.events |= EPOLLIN;
    if (!c.out.empty()) interest.events |= EPOLLOUT;
    interest.data.u64 = c.id;
    epoll_ctl(epoll_of(c), EPOLL_CTL_MOD, c.fd.get(), &interest);
}

void Tcp::tell(Connection &c, const News &news) {
    if (news.done && !stepped_) host_.notify(host_.ctx, reinterpret_cast<adt_transport_h>(this));
    if (news.lost) host_.endpoint_lost(host_.ctx, c.link, news.status, news.reason.c_str());
}

void Tcp::take_inbox(Connection &c, bool ending) {
    std::vector<adt_batch_t *> taken;
    {
        const std::lock_guard<std::mutex> lock(c.inbox_mu);
        taken.swap(c.inbox);
        c.ended = ending;
    }
    for (adt_batch_t *batch : taken) {
        OutFrame frame;
        const bool write = batch->opcode == ADT_WRITE;
        const uint64_t seq = c.next_seq++;
        frame.header = {FrameHeader::kMagic,
                        static_cast<uint8_t>(write ? FrameType::write : FrameType::read),
                        0,
                        0,
                        ADT_OK,
                        batch->count,
                        seq,
                        *reinterpret_cast<const uint64_t *>(batch->remote),
                        batch->op_id,
                        batch->bytes,
                        batch->epoch,
                        0};
        frame.runs.reserve(batch->count);
        for (uint32_t i = 0; i < batch->count; ++i) {
            const adt_chunk_t &chunk = batch->chunks[i];
            frame.runs.push_back({chunk.remote_offset, chunk.remote_tensor, chunk.length});
        }
        if (write) {
            frame.has_payload = true;
            frame.chunks = batch->chunks;
            frame.count = batch->count;
        }
        frame.batch = batch;
        c.out.push_back(std::move(frame));
        c.waiting.push_back({seq, batch, write ? FrameType::write_done : FrameType::read_done, false});
    }
}

// ------------------------------------------------------------------------------------------------------- sending

bool Tcp::transmit(Connection &c, News &news, bool may_end) {
    uint64_t budget = kTurnBytes;
    while (!c.out.empty()) {
        const uint64_t most = share(c);
        OutFrame &f = c.out.front();
        iovec iov[kIov];
        size_t n = 0;
        if (f.head_sent < f.head_size()) {
            if (f.head_sent < sizeof(f.header)) {
                iov[n++] = {reinterpret_cast<char *>(&f.header) + f.head_sent, sizeof(f.header) - f.head_sent};
            }
            const size_t runs_sent = f.head_sent > sizeof(f.header) ? f.head_sent - sizeof(f.header) : 0;
            const size_t runs_size = f.runs.size() * sizeof(FrameRun);
            if (runs_sent < runs_size) {
                iov[n++] = {reinterpret_cast<char *>(f.runs.data()) + runs_sent, runs_size - runs_sent};
            }
        }
        uint64_t queued = 0;
        const uint64_t left = f.payload() - f.payload_sent;
        if (f.chunks != nullptr) {
            Cursor at = f.cursor;
            while (queued < left && queued < most && n < kIov - 1) {
                const adt_chunk_t &chunk = f.chunks[at.chunk];
                const size_t length = static_cast<size_t>(std::min<uint64_t>(chunk.length - at.at, most - queued));
                iov[n++] = {static_cast<char *>(chunk.local) + at.at, length};
                queued += length;
                ++at.chunk;
                at.at = 0;
            }
        } else {
            while (queued < left && n < kIov - 1) {
                const size_t length = static_cast<size_t>(std::min<uint64_t>(kFillerBytes, left - queued));
                iov[n++] = {const_cast<char *>(kFiller), length};
                queued += length;
            }
        }
        if (queued == left && f.has_payload) {
            iov[n++] = {reinterpret_cast<char *>(&f.trailer) + f.trailer_sent, sizeof(f.trailer) - f.trailer_sent};
        }
        msghdr message{};
        message.msg_iov = iov;
        message.msg_iovlen = n;
        ssize_t moved = sendmsg(c.fd.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (moved < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN) return true;
            if (may_end) end(c, ADT_ERR_PEER_LOST, std::string("send: ") + std::strerror(errno), news);
            return false;
        }
        if (c.use == Use::bulk) {
            step_aside(most);
        } else if (!stepped_) {
            short_until_.store(host_.now_ns(host_.ctx) + kShareNs, std::memory_order_relaxed);
        }
        auto left_to_count = static_cast<uint64_t>(moved);
        budget -= std::min(budget, left_to_count);
        const uint64_t head = std::min<uint64_t>(left_to_count, f.head_size() - f.head_sent);
        f.head_sent += head;
        left_to_count -= head;
        const uint64_t payload = std::min(left_to_count, left);
        f.payload_sent += payload;
        if (f.chunks != nullptr) f.cursor.advance(f.chunks, payload);
        f.trailer_sent += left_to_count - payload;
        if (f.head_sent == f.head_size() && f.payload_sent == f.payload() &&
            (!f.has_payload || f.trailer_sent == sizeof(f.trailer))) {
            sent(c, f);
            c.out.pop_front();
        }
        if (budget == 0) return true;
    }
    return true;
}

void Tcp::sent(Connection &c, OutFrame &frame) {
    if (frame.batch != nullptr) return;  // a request: its answer completes it
    --c.answers_queued;
    end_serve(frame.served);
}

void Tcp::answer(Connection &c, FrameType type, adt_status_t status, uint64_t seq, uint64_t payload, void *served) {
    OutFrame frame;
    frame.header = {FrameHeader::kMagic, static_cast<uint8_t>(type), 0, 0, status, 0, seq, 0, 0, payload, 0, 0};
    if (payload > 0) {
        frame.has_payload = true;
        frame.own_chunks.swap(c.in_chunks);
        frame.chunks = frame.own_chunks.data();
        frame.count = static_cast<uint32_t>(frame.own_chunks.size());
        frame.served = served;
        frame.cache = c.in.cache;
    }
    ++c.answers_queued;
    c.out.push_back(std::move(frame));
    // A moved vector keeps its storage, so `chunks` still points at it.
}

// ------------------------------------------------------------------------------------------------------ receiving

// Fills in where the next bytes belong, in their order: the rest of the stage, and a trailer with the payload before
// it. Returns how many places there are; `want` is how many bytes.
size_t Tcp::places(Connection &c, iovec *iov, uint64_t &want) const {
    // Shared by whatever is thrown away; its content is never read.
    static thread_local std::vector<char> drop(kFillerBytes);
    size_t n = 0;
    const auto add = [&](void *at, uint64_t bytes) {
        iov[n++] = {at, static_cast<size_t>(bytes)};
        want += bytes;
    };
    want = 0;
    switch (c.stage) {
        case Connection::Stage::header:
            add(reinterpret_cast<char *>(&c.in) + c.in_got, sizeof(c.in) - c.in_got);
            break;
        case Connection::Stage::runs:
            add(reinterpret_cast<char *>(c.in_runs.data()) + c.in_got, c.in_runs.size() * sizeof(FrameRun) - c.in_got);
            break;
        case Connection::Stage::trailer:
            add(reinterpret_cast<char *>(&c.in_trailer) + c.in_got, sizeof(c.in_trailer) - c.in_got);
            break;
        case Connection::Stage::payload: {
            const uint64_t left = c.in.payload - c.payload_got;
            if (c.sink) {
                add(drop.data(), std::min<uint64_t>(left, drop.size()));
                break;
            }
            const bool read = c.in.type == static_cast<uint8_t>(FrameType::read_done);
            const adt_chunk_t *chunks = read ? c.waiting.front().batch->chunks : c.in_chunks.data();
            const uint64_t most = std::min(left, share(c));
            Cursor at = c.cursor;
            while (want < most && n < kIov) {
                const uint64_t length = std::min<uint64_t>(chunks[at.chunk].length - at.at, most - want);
                add(static_cast<char *>(chunks[at.chunk].local) + at.at, length);
                ++at.chunk;
                at.at = 0;
            }
            if (want == left) add(&c.in_trailer, sizeof(c.in_trailer));
            break;
        }
    }
    return n;
}

namespace {

// Copies as much as there is and the places take; returns how much.
size_t fill(const iovec *iov, size_t n, const char *from, size_t bytes) {
    size_t done = 0;
    for (size_t i = 0; i < n && done < bytes; ++i) {
        const size_t length = std::min(iov[i].iov_len, bytes - done);
        std::memcpy(iov[i].iov_base, from + done, length);
        done += length;
    }
    return done;
}

// Whether the next frame can only be the answer to one read: then all of it is received at once, and in place.
bool one_answer_due(const Connection &c) {
    if (c.use != Use::asking || c.stage != Connection::Stage::header || c.in_got > 0) return false;
    if (c.waiting.size() != 1 || !c.out.empty()) return false;
    const Waiting &due = c.waiting.front();
    return due.answer == FrameType::read_done && !due.detached && due.batch->count <= kIov;
}

}  // namespace

bool Tcp::receive(Connection &c, News &news) {
    // What comes with a header. Nothing is left here when this returns, so that connections can share it.
    static thread_local std::vector<char> ahead(kAheadBytes);
    size_t ahead_at = 0;
    size_t ahead_end = 0;
    uint64_t budget = kTurnBytes;
    bool more = true;  // the last call got all that it had room for
    for (;;) {
        iovec iov[kIov + 3];
        uint64_t want = 0;
        size_t n = places(c, iov, want);
        if (ahead_at < ahead_end) {
            const size_t got = fill(iov, n, ahead.data() + ahead_at, ahead_end - ahead_at);
            ahead_at += got;
            if (!arrived(c, got, news)) return false;
            continue;
        }
        if (budget == 0 || !more) return true;
        const bool whole = one_answer_due(c);
        uint64_t room = want;
        if (whole) {
            const adt_batch_t &batch = *c.waiting.front().batch;
            for (uint32_t i = 0; i < batch.count; ++i) iov[n++] = {batch.chunks[i].local, batch.chunks[i].length};
            iov[n++] = {&c.in_trailer, sizeof(c.in_trailer)};
            room += batch.bytes + sizeof(c.in_trailer);
        } else if (c.stage == Connection::Stage::header) {
            iov[n++] = {ahead.data(), ahead.size()};
            room += ahead.size();
        }
        msghdr message{};
        message.msg_iov = iov;
        message.msg_iovlen = n;
        const ssize_t moved = recvmsg(c.fd.get(), &message, MSG_DONTWAIT);
        if (moved < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN) return true;
            end(c, ADT_ERR_PEER_LOST, std::string("receive: ") + std::strerror(errno), news);
            return false;
        }
        if (moved == 0) {
            end(c, ADT_ERR_PEER_LOST, "the peer closed the data connection", news);
            return false;
        }
        const auto all = static_cast<uint64_t>(moved);
        if (c.stage == Connection::Stage::payload) step_aside(share(c));
        budget -= std::min(budget, all);
        more = !whole && all == room;
        const uint64_t got = std::min(all, want);
        if (!arrived(c, got, news)) return false;
        if (!whole) {
            ahead_at = 0;
            ahead_end = static_cast<size_t>(all - got);
        } else if (all > got) {
            if (c.stage != Connection::Stage::payload) {
                end(c, ADT_ERR_PROTOCOL, "a payload that was not announced", news);
                return false;
            }
            if (!arrived(c, all - got, news)) return false;
        }
    }
}

// `got` bytes are in the places that `places` said.
bool Tcp::arrived(Connection &c, uint64_t got, News &news) {
    switch (c.stage) {
        case Connection::Stage::header:
            c.in_got += got;
            return c.in_got < sizeof(c.in) || begin_frame(c, news);
        case Connection::Stage::runs:
            c.in_got += got;
            return c.in_got < c.in_runs.size() * sizeof(FrameRun) || begin_request(c, news);
        case Connection::Stage::payload: {
            const uint64_t payload = std::min(got, c.in.payload - c.payload_got);
            c.payload_got += payload;
            if (!c.sink) {
                const bool read = c.in.type == static_cast<uint8_t>(FrameType::read_done);
                c.cursor.advance(read ? c.waiting.front().batch->chunks : c.in_chunks.data(), payload);
            }
            if (c.payload_got < c.in.payload) return true;
            c.stage = Connection::Stage::trailer;
            c.in_got = got - payload;
            return c.in_got < sizeof(c.in_trailer) || deliver(c, news);
        }
        case Connection::Stage::trailer:
            c.in_got += got;
            return c.in_got < sizeof(c.in_trailer) || deliver(c, news);
    }
    return true;
}

// A header is complete: checks it against every limit before it allocates or believes anything.
bool Tcp::begin_frame(Connection &c, News &news) {
    const FrameHeader &h = c.in;
    c.in_got = 0;
    c.payload_got = 0;
    c.cursor = {};
    c.sink = false;
    c.in_status = ADT_OK;
    const auto type = static_cast<FrameType>(h.type);
    if (h.magic == FrameHeader::kMagic && (type == FrameType::read || type == FrameType::write)) {
        if (c.use == Use::asking) {
            end(c, ADT_ERR_PROTOCOL, "a request on a connection for this side's requests", news);
            return false;
        }
        if (h.count == 0 || h.count > kFrameMaxRuns || h.payload == 0 || h.payload > kFrameMaxPayload ||
            c.answers_queued >= kMaxOutstanding) {
            end(c, ADT_ERR_PROTOCOL, "a request beyond the limits", news);
            return false;
        }
        c.in_runs.resize(h.count);
        c.stage = Connection::Stage::runs;
        return true;
    }
    if (h.magic != FrameHeader::kMagic || (type != FrameType::read_done && type != FrameType::write_done) ||
        c.waiting.empty() || c.waiting.front().seq != h.seq || c.waiting.front().answer != type) {
        end(c, ADT_ERR_PROTOCOL, "a frame that was not asked for", news);
        return false;
    }
    // Answered before it was sent: completing it now would leave its frame reading memory that was given back.
    if (std::any_of(c.out.begin(), c.out.end(),
                    [&](const OutFrame &frame) { return frame.batch == c.waiting.front().batch; })) {
        end(c, ADT_ERR_PROTOCOL, "an answer to a request that is still being sent", news);
        return false;
    }
    const bool payload = type == FrameType::read_done && h.status == ADT_OK;
    if (h.payload != (payload ? c.waiting.front().batch->bytes : 0)) {
        end(c, ADT_ERR_PROTOCOL, "an answer of the wrong size", news);
        return false;
    }
    if (!payload) {
        c.in_trailer = {h.status, 0};
        return deliver(c, news);
    }
    c.sink = c.waiting.front().detached;
    c.stage = Connection::Stage::payload;
    return true;
}

// A peer's request is complete up to its payload.
bool Tcp::begin_request(Connection &c, News &news) {
    const FrameHeader &h = c.in;
    const bool write = h.type == static_cast<uint8_t>(FrameType::write);
    uint64_t sum = 0;
    c.in_chunks.clear();
    for (const FrameRun &run : c.in_runs) {
        sum += run.length;
        c.in_chunks.push_back({nullptr, run.offset, run.tensor, run.length});
    }
    if (sum != h.payload) {
        end(c, ADT_ERR_PROTOCOL, "runs that do not add up to the payload", news);
        return false;
    }
    adt_request_t request{
        write ? ADT_WRITE : ADT_READ, h.count, c.in_chunks.data(), h.payload, h.cache, h.op, h.epoch, 0};
    void *token = nullptr;
    c.in_status = host_.begin_serve(host_.ctx, c.link, &request, &token);
    if (write) {
        c.in_served = token;
        c.sink = c.in_status != ADT_OK;
        c.stage = Connection::Stage::payload;
        return true;
    }
    if (c.in_status == ADT_OK) {
        answer(c, FrameType::read_done, ADT_OK, h.seq, h.payload, token);
    } else {
        answer(c, FrameType::read_done, c.in_status, h.seq, 0, nullptr);
    }
    c.stage = Connection::Stage::header;
    c.in_got = 0;
    return true;
}

bool Tcp::deliver(Connection &c, News &news) {
    c.stage = Connection::Stage::header;
    c.in_got = 0;
    if (c.in.type == static_cast<uint8_t>(FrameType::write)) {
        end_serve(c.in_served);
        const adt_status_t status = c.in_status != ADT_OK ? c.in_status : c.in_trailer.status;
        answer(c, FrameType::write_done, status, c.in.seq, 0, nullptr);
        return true;
    }
    const Waiting waiting = c.waiting.front();
    c.waiting.pop_front();
    // A detached batch was told already as aborted; this retires it.
    const adt_status_t status = waiting.detached ? ADT_ERR_ABORTED : c.in_trailer.status;
    complete(c, waiting.batch, status > 0 ? ADT_ERR_PROTOCOL : status, false, news);
    return true;
}

void Tcp::complete(Connection &c, adt_batch_t *batch, adt_status_t status, bool detached, News &news) {
    if (!detached) c.outstanding.fetch_sub(batch->bytes, std::memory_order_relaxed);
    news.done = true;
    // Under the connection's lock: a batch's last completion, after which it is another operation's, must not overtake
    // the one that says it is detached.
    const std::lock_guard<std::mutex> lock(mu_);
    done_.push_back({batch, status, detached ? 1u : 0u});
}

// --------------------------------------------------------------------------------------------- ending, by any cause

void Tcp::end(Connection &c, adt_status_t status, std::string reason, News &news) {
    if (c.closed) return;
    c.closed = true;
    take_inbox(c, true);
    for (OutFrame &frame : c.out) end_serve(frame.served);
    end_serve(c.in_served);
    for (const Waiting &waiting : c.waiting) complete(c, waiting.batch, status, false, news);
    c.out.clear();
    c.waiting.clear();
    epoll_ctl(epoll_of(c), EPOLL_CTL_DEL, c.fd.get(), nullptr);
    c.fd.reset();
    {
        const std::lock_guard<std::mutex> lock(mu_);
        connections_.erase(c.id);
        error_ = reason;
    }
    news.lost = true;
    news.status = status;
    news.reason = std::move(reason);
}

adt_status_t Tcp::connect(const adt_connect_params_t &params, Endpoint *&out) {
    std::vector<Fd> fds;
    for (uint32_t i = 0; i < params.num_fds; ++i) fds.emplace_back(params.fds[i]);
    if (fds.empty()) return fail(ADT_ERR_INVALID, "no data connection");
    auto endpoint = std::make_unique<Endpoint>();
    endpoint->link = params.link;
    for (Fd &fd : fds) {
        const int flags = fcntl(fd.get(), F_GETFL);
        const int one = 1;
        if (flags < 0 || fcntl(fd.get(), F_SETFL, flags | O_NONBLOCK) != 0) {
            return fail(ADT_ERR_IO, std::string("data connection: ") + std::strerror(errno));
        }
        setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
        auto connection = std::make_shared<Connection>();
        connection->fd = std::move(fd);
        connection->link = params.link;
        endpoint->connections.push_back(std::move(connection));
    }
    auto &all = endpoint->connections;
    endpoint->bulk = all.size() >= 3 ? all.size() - 2 : all.size();
    if (endpoint->bulk < all.size()) {
        const std::shared_ptr<Connection> &dialers = all[all.size() - 2];
        const std::shared_ptr<Connection> &others = all[all.size() - 1];
        dialers->use = params.dialed != 0 ? Use::asking : Use::answering;
        others->use = params.dialed != 0 ? Use::answering : Use::asking;
        endpoint->asking = params.dialed != 0 ? dialers : others;
    }
    const std::lock_guard<std::mutex> lock(mu_);
    for (const std::shared_ptr<Connection> &connection : endpoint->connections) {
        connection->id = next_id_++;
        connections_.emplace(connection->id, connection);
        epoll_event interest{};
        interest.events = EPOLLONESHOT;
        if (connection->use != Use::asking) interest.events |= EPOLLIN;
        interest.data.u64 = connection->id;
        epoll_ctl(epoll_of(*connection), EPOLL_CTL_ADD, connection->fd.get(), &interest);
    }
    out = endpoint.release();
    return ADT_OK;
}

void Tcp::disconnect(Endpoint *endpoint) {
    const std::unique_ptr<Endpoint> owned(endpoint);
    for (const std::shared_ptr<Connection> &connection : owned->connections) {
        News news;
        {
            const std::lock_guard<std::mutex> lock(connection->mu);
            end(*connection, ADT_ERR_PEER_LOST, "the link ended", news);
        }
        news.lost = false;  // the host knows
        tell(*connection, news);
    }
}

adt_status_t Tcp::post(adt_batch_t *batch) {
    auto &endpoint = *reinterpret_cast<Endpoint *>(batch->endpoint);
    if (batch->loop_waits != 0 && endpoint.asking && !stepped_ && post_short(*endpoint.asking, batch)) return ADT_OK;
    const auto first = endpoint.connections.begin();
    const auto least = std::min_element(first, first + static_cast<std::ptrdiff_t>(endpoint.bulk),
                                        [](const auto &a, const auto &b) { return a->outstanding < b->outstanding; });
    Connection &c = **least;
    const std::lock_guard<std::mutex> lock(c.inbox_mu);
    if (c.ended) return ADT_ERR_PEER_LOST;
    c.outstanding.fetch_add(batch->bytes, std::memory_order_relaxed);
    c.inbox.push_back(batch);
    if (c.busy || c.inbox.size() > 1) return ADT_OK;  // somebody is about to look
    epoll_event interest{};
    interest.events = EPOLLIN | EPOLLOUT | EPOLLONESHOT;
    interest.data.u64 = c.id;
    epoll_ctl(epoll_of(c), EPOLL_CTL_MOD, c.fd.get(), &interest);
    return ADT_OK;
}

// Sends a short request from the calling thread. False: not now, use another connection. `mu` of such a connection is
// never held while the host is called, since no requests arrive on it; so it may be taken here, under the engine's
// lock.
bool Tcp::post_short(Connection &c, adt_batch_t *batch) {
    const std::unique_lock<std::mutex> lock(c.mu, std::try_to_lock);
    if (!lock || c.closed || c.waiting.size() >= kMaxOutstanding) return false;
    {
        const std::lock_guard<std::mutex> inbox(c.inbox_mu);
        c.outstanding.fetch_add(batch->bytes, std::memory_order_relaxed);
        c.inbox.push_back(batch);
    }
    take_inbox(c);
    News nothing;
    transmit(c, nothing, false);
    if (!c.out.empty()) arm(c);  // the rest, or the error that stopped it, is an I/O thread's
    return true;
}

int Tcp::loop_fd(const Endpoint &endpoint) {
    if (!endpoint.asking) return -1;
    const std::lock_guard<std::mutex> lock(endpoint.asking->mu);
    return endpoint.asking->fd.get();
}

adt_status_t Tcp::loop_progress(const Endpoint &endpoint) {
    if (!endpoint.asking) return ADT_ERR_CLOSED;
    const std::shared_ptr<Connection> connection = endpoint.asking;
    News news;
    bool open = false;
    {
        const std::lock_guard<std::mutex> lock(connection->mu);
        if (!connection->closed && receive(*connection, news)) transmit(*connection, news);
        open = !connection->closed;
    }
    tell(*connection, news);
    return open ? ADT_OK : ADT_ERR_CLOSED;
}

void Tcp::take_over(const Endpoint &endpoint) {
    if (!endpoint.asking) return;
    const std::lock_guard<std::mutex> lock(endpoint.asking->mu);
    if (!endpoint.asking->closed && !endpoint.asking->waiting.empty()) arm(*endpoint.asking);
}

// Takes one operation's batches off local memory at once.
void Tcp::cancel(Endpoint &endpoint, uint64_t op) {
    for (const std::shared_ptr<Connection> &connection : endpoint.connections) {
        Connection &c = *connection;
        News news;
        {
            const std::lock_guard<std::mutex> lock(c.mu);
            if (c.closed) continue;
            take_inbox(c);
            for (auto frame = c.out.begin(); frame != c.out.end();) {
                if (frame->batch == nullptr || frame->batch->op_id != op || frame->started()) {
                    ++frame;
                    continue;
                }
                // Nothing of it is on the wire: it never was. Its number must not be waited for either.
                adt_batch_t *batch = frame->batch;
                c.waiting.erase(std::find_if(c.waiting.begin(), c.waiting.end(),
                                             [&](const Waiting &waiting) { return waiting.batch == batch; }));
                frame = c.out.erase(frame);
                complete(c, batch, ADT_ERR_ABORTED, false, news);
            }
            for (OutFrame &frame : c.out) {
                if (frame.batch == nullptr || frame.batch->op_id != op || frame.chunks == nullptr) continue;
                frame.chunks = nullptr;  // the rest comes from the filler
                // After the whole payload there is nothing to take back, and part of the trailer may be out already.
                if (frame.payload_sent < frame.payload()) frame.trailer.status = ADT_ERR_ABORTED;
            }
            for (Waiting &waiting : c.waiting) {
                if (waiting.batch->op_id != op || waiting.detached) continue;
                waiting.detached = true;
                complete(c, waiting.batch, ADT_ERR_ABORTED, true, news);
            }
            if (c.stage == Connection::Stage::payload && c.in.type == static_cast<uint8_t>(FrameType::read_done) &&
                c.waiting.front().detached) {
                c.sink = true;
            }
        }
        tell(c, news);
    }
}

// Takes what is being served to this peer off local memory at once.
void Tcp::revoke(Endpoint &endpoint, uint64_t cache) {
    for (const std::shared_ptr<Connection> &connection : endpoint.connections) {
        Connection &c = *connection;
        const std::lock_guard<std::mutex> lock(c.mu);
        if (c.closed) continue;
        if (c.in_served != nullptr && (cache == 0 || c.in.cache == cache)) {
            c.sink = true;
            c.in_status = ADT_ERR_FENCED;
            end_serve(c.in_served);
        }
        for (OutFrame &frame : c.out) {
            if (frame.served == nullptr || (cache != 0 && frame.cache != cache)) continue;
            if (!frame.started()) {
                frame.has_payload = false;
                frame.header.payload = 0;
                frame.header.status = ADT_ERR_FENCED;
            }
            frame.chunks = nullptr;
            if (frame.payload_sent < frame.payload()) frame.trailer.status = ADT_ERR_FENCED;
            end_serve(frame.served);
        }
    }
}

// ----------------------------------------------------------------------------------------------------- ops table

Tcp &tcp(adt_transport_h handle) {
    return *reinterpret_cast<Tcp *>(handle);
}

void probe(adt_probe_t *out) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    out->usable = fd >= 0 ? 1 : 0;
    if (fd < 0) {
        std::snprintf(out->reason, sizeof(out->reason), "socket: %s", std::strerror(errno));
        return;
    }
    close(fd);
    std::snprintf(out->reason, sizeof(out->reason), "sockets work");
}

adt_status_t open_tcp(const adt_open_params_t *params, adt_transport_h *out) {
    try {
        *out = reinterpret_cast<adt_transport_h>(new Tcp(*params));
        return ADT_OK;
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

void close_tcp(adt_transport_h handle) {
    delete &tcp(handle);
}

// The engine serves peers' requests from its own table, so there is nothing to register, and a key says only that tcp
// reaches the cache.
adt_status_t reg_mem(adt_transport_h, const adt_memory_t *memory, adt_mem_h *out) {
    if (memory->placement != ADT_PLACEMENT_HOST) return ADT_ERR_UNSUPPORTED;
    *out = nullptr;
    return ADT_OK;
}
adt_status_t dereg_mem(adt_transport_h, adt_mem_h, void *) {
    return ADT_OK;
}
adt_status_t export_key(adt_transport_h, adt_mem_h, void *, size_t, size_t *size) {
    *size = 0;
    return ADT_OK;
}

adt_status_t import_key(adt_transport_h, adt_endpoint_h, uint64_t cache_id, const adt_geometry_t *, const adt_key_t *,
                        adt_remote_h *out, adt_path_t *path) {
    try {
        *out = reinterpret_cast<adt_remote_h>(new uint64_t(cache_id));
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
    *path = {"tcp", kBatchBytes, kFrameMaxRuns, 0};
    return ADT_OK;
}

void release_key(adt_transport_h, adt_remote_h remote) {
    delete reinterpret_cast<uint64_t *>(remote);
}

adt_status_t connect_tcp(adt_transport_h handle, const adt_connect_params_t *params, adt_endpoint_h *out) {
    try {
        Endpoint *endpoint = nullptr;
        const adt_status_t status = tcp(handle).connect(*params, endpoint);
        *out = reinterpret_cast<adt_endpoint_h>(endpoint);
        return status;
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

adt_status_t disconnect_tcp(adt_transport_h handle, adt_endpoint_h endpoint) {
    tcp(handle).disconnect(reinterpret_cast<Endpoint *>(endpoint));
    return ADT_OK;
}

adt_status_t post(adt_transport_h handle, adt_batch_t *const *batches, size_t count, size_t *posted) {
    for (*posted = 0; *posted < count; ++*posted) {
        const adt_status_t status = tcp(handle).post(batches[*posted]);
        if (status != ADT_OK) return status;
    }
    return ADT_OK;
}

size_t poll_tcp(adt_transport_h handle, adt_completion_t *out, size_t capacity) {
    if (tcp(handle).stepped()) tcp(handle).step();
    return tcp(handle).poll(out, capacity);
}

int loop_fd(adt_transport_h, adt_endpoint_h endpoint) {
    return Tcp::loop_fd(*reinterpret_cast<Endpoint *>(endpoint));
}

adt_status_t loop_progress(adt_transport_h handle, adt_endpoint_h endpoint) {
    return tcp(handle).loop_progress(*reinterpret_cast<Endpoint *>(endpoint));
}

void take_over(adt_transport_h handle, adt_endpoint_h endpoint) {
    tcp(handle).take_over(*reinterpret_cast<Endpoint *>(endpoint));
}

adt_status_t cancel(adt_transport_h handle, adt_endpoint_h endpoint, uint64_t op) {
    tcp(handle).cancel(*reinterpret_cast<Endpoint *>(endpoint), op);
    return ADT_OK;
}

adt_status_t revoke(adt_transport_h handle, adt_endpoint_h endpoint, uint64_t cache, uint32_t) {
    tcp(handle).revoke(*reinterpret_cast<Endpoint *>(endpoint), cache);
    return ADT_OK;
}

void last_error(adt_transport_h handle, char *buffer, size_t capacity) {
    std::snprintf(buffer, capacity, "%s", tcp(handle).error().c_str());
}

}  // namespace

const adt_transport_ops_t kTcpOps = {
    ADT_ABI_VERSION,
    sizeof(adt_transport_ops_t),
    "tcp",
    0,
    kQueueDepth,
    probe,
    open_tcp,
    close_tcp,
    reg_mem,
    dereg_mem,
    export_key,
    import_key,
    release_key,
    adt_unsupported_import_local,
    connect_tcp,
    disconnect_tcp,
    adt_no_hear,
    post,
    adt_unsupported_execute,
    poll_tcp,
    adt_no_event_fd,
    adt_always_armed,
    loop_fd,
    loop_progress,
    take_over,
    cancel,
    revoke,
    last_error,
};

}  // namespace adt
