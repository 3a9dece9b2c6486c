// SPDX-License-Identifier: Apache-2.0
#include "hixl_endpoint.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "hixl_agent.hpp"
#include "hixl_library.hpp"
#include "hixl_stats.hpp"

namespace adt {
namespace {

constexpr uint32_t kMostFailures = 2;  // of one batch: its request, and once more by a new connection
constexpr uint32_t kMostAttempts = 4;  // to connect again
constexpr size_t kMostPauses = 65536;  // that a peer asks for at a time
constexpr uint64_t kRetryNs = 100'000'000;

adt_message_t message(HixlSay kind, uint64_t c = 0) {
    adt_message_t made{};
    made.kind = static_cast<uint8_t>(kind);
    made.c = c;
    return made;
}

// The name of the peer's engine, or nothing if it names none.
std::string engine_of(const adt_message_t &offer) {
    unsigned char address[16];
    std::memcpy(address, &offer.a, 8);
    std::memcpy(address + 8, &offer.b, 8);
    char text[INET6_ADDRSTRLEN] = "";
    const bool six = offer.number == 6;
    if (offer.small == 0 || (!six && offer.number != 4)) return {};
    if (inet_ntop(six ? AF_INET6 : AF_INET, address, text, sizeof(text)) == nullptr) return {};
    const std::string host = six ? "[" + std::string(text) + "]" : std::string(text);
    return host + ":" + std::to_string(offer.small);
}

}  // namespace

HixlEndpoint::HixlEndpoint(HixlAgent &owner, HixlSink &who, uint64_t number, void *name)
    : agent(owner), sink(who), id(number), link(name) {}

void HixlEndpoint::start(HixlNews &news) {
    if (!closed_) news.messages.push_back(agent.offer());
}

void HixlEndpoint::refuse(const std::string &reason, HixlNews &news) {
    if (!closed_) give_up(reason, true, news);
}

void HixlEndpoint::hear(const adt_message_t &told, HixlNews &news) {
    if (closed_) return;
    switch (static_cast<HixlSay>(told.kind)) {
        case HixlSay::offer:
            if (!remote_.empty()) break;
            remote_ = engine_of(told);
            if (remote_.empty()) break;
            peer_generation_ = std::max(peer_generation_, told.c);
            return;
        case HixlSay::failed:
            if (!settled_) give_up("the peer could not connect by HIXL", false, news);
            return;
        case HixlSay::pause:
            if (peer_pauses_.size() >= kMostPauses) break;
            peer_pauses_.insert(told.c);
            if (down()) news.messages.push_back(message(HixlSay::paused, told.c));
            return;
        case HixlSay::paused:
            agent.peer_paused(told.c, id);
            return;
        case HixlSay::resume:
            peer_pauses_.erase(told.c);
            return;
    }
    lose(ADT_ERR_PROTOCOL, "the peer's endpoint of HIXL broke the rules", news);
}

void HixlEndpoint::hold(uint64_t serial, HixlNews &news) {
    own_pauses_.insert(serial);
    news.messages.push_back(message(HixlSay::pause, serial));
}

void HixlEndpoint::release(uint64_t serial, HixlNews &news) {
    own_pauses_.erase(serial);
    news.messages.push_back(message(HixlSay::resume, serial));
}

void HixlEndpoint::post(adt_batch_t *batch, const HixlMemory &memory, HixlNews &news) {
    if (closed_ || failed_) {
        news.done.push_back({batch, closed_ ? ADT_ERR_PEER_LOST : ADT_ERR_UNSUPPORTED, 0});
        return;
    }
    const uint64_t there = reinterpret_cast<const HixlRemote *>(batch->remote)->generation;
    peer_generation_ = std::max(peer_generation_, there);
    waiting_works_.push_back(Work{batch, &memory, memory.generation, there});
}

void HixlEndpoint::cancel(uint64_t op, HixlNews &news) {
    const auto kept = std::stable_partition(waiting_works_.begin(), waiting_works_.end(),
                                            [op](const Work &work) { return work.batch->op_id != op; });
    for (auto at = kept; at != waiting_works_.end(); ++at) news.done.push_back({at->batch, ADT_ERR_ABORTED, 0});
    waiting_works_.erase(kept, waiting_works_.end());
    for (auto &[cookie, work] : requested_) {
        if (work.batch->op_id != op) continue;
        work.given_up = true;
        force_ = true;  // HIXL stops a request by the end of its connection only
    }
}

void HixlEndpoint::close(HixlNews &news) {
    closed_ = true;
    end_waiting(ADT_ERR_PEER_LOST, news);
    // What is under way ends with the connection; `step` sees to it.
    if (down()) news.gone = true;
}

void HixlEndpoint::finalized(HixlNews &news) {
    closed_ = true;
    went_down(news);
    end_waiting(ADT_ERR_PEER_LOST, news);
    news.gone = true;
}

void HixlEndpoint::end_waiting(adt_status_t status, HixlNews &news) {
    for (const Work &work : waiting_works_) news.done.push_back({work.batch, status, 0});
    waiting_works_.clear();
}

// ------------------------------------------------------------------------------------------------------ the connection

bool HixlEndpoint::step(uint64_t now, HixlNews &news) {
    if (state_ == State::connecting) look_connecting(now, news);
    if (state_ == State::disconnecting) look_disconnecting(now, news);
    if (state_ == State::up) {
        const bool stale = !waiting_works_.empty() && !covered(waiting_works_.front());
        if (must_end() || stale || unproved()) {
            state_ = State::draining;
            drain_until_ = now + agent.settings().drain_ns;
            retry_at_ = now;
        } else {
            pump(news);
        }
    }
    if (state_ == State::draining && now >= retry_at_) {
        const bool drained = requested_.empty();
        if (!drained && now >= drain_until_) force_ = true;
        if (drained || force_ || closed_ || failed_) disconnect(now, news);
    }
    const bool wanted =
        !remote_.empty() && !closed_ && !failed_ && !paused() && (!settled_ || unproved() || !waiting_works_.empty());
    if (state_ == State::down && wanted && now >= retry_at_) connect(now, news);
    return state_ == State::down ? wanted && !closed_ && !failed_
                                 : state_ != State::up || !requested_.empty() || !waiting_works_.empty();
}

void HixlEndpoint::connect(uint64_t now, HixlNews &news) {
    covered_here_ = agent.generation();
    covered_there_ = peer_generation_;
    connect_at_ = now;
    if (connect_until_ == 0) {
        connect_until_ = now + static_cast<uint64_t>(agent.settings().connect_ms) * 1'000'000;
    }
    const uint32_t status = agent.api().connect(agent.engine(), remote_.c_str(), agent.settings().connect_ms);
    switch (status) {
        case ADT_HIXL_SUCCESS:
            state_ = State::connecting;
            return;
        case ADT_HIXL_ALREADY_CONNECTED:
            // Made by a connect that had counted as failed: what it covers is not known.
            state_ = State::draining;
            drain_until_ = now;
            return;
        case ADT_HIXL_RESOURCE_EXHAUSTED:
            if (now < connect_until_) {
                retry_at_ = now + kRetryNs / 10;
                return;
            }
            [[fallthrough]];
        default:
            connect_failed(hixl_status_words(status), now, news);
    }
}

void HixlEndpoint::look_connecting(uint64_t now, HixlNews &news) {
    // Also where it is of no more use: a connection that came after its disconnecting would stay.
    int32_t found = ADT_HIXL_NOT_CONNECT;
    const uint32_t status = agent.api().connection(agent.engine(), remote_.c_str(), &found);
    if (status == ADT_HIXL_SUCCESS && (found == ADT_HIXL_CONNECT_PENDING || found == ADT_HIXL_CONNECTING)) return;
    if (status != ADT_HIXL_SUCCESS || found != ADT_HIXL_CONNECTED) {
        went_down(news);
        if (closed_ || failed_) return;
        connect_failed(status == ADT_HIXL_SUCCESS ? "it could not be reached" : hixl_status_words(status), now, news);
        return;
    }
    state_ = State::up;
    attempts_ = 0;
    connect_until_ = 0;
    counted_ = true;
    agent.proved(covered_here_);
    hixl_stats().connections.fetch_add(1, std::memory_order_relaxed);
    if (std::exchange(settled_, true)) return;
    news.settled = true;
    news.status = ADT_OK;
}

void HixlEndpoint::connect_failed(const std::string &why, uint64_t now, HixlNews &news) {
    // One that takes its whole time says nothing of memory.
    const uint64_t limit = static_cast<uint64_t>(agent.settings().connect_ms) * 1'000'000;
    if (now - connect_at_ < limit / 2 && agent.blame_memory()) {
        retry_at_ = now + kRetryNs / 10;
        return;
    }
    const std::string said = "HIXL cannot connect to " + remote_ + ": " + why;
    if (!settled_) {
        give_up(said, true, news);
    } else if (++attempts_ >= kMostAttempts) {
        lose(ADT_ERR_PEER_LOST, said, news);
    } else {
        retry_at_ = now + kRetryNs * attempts_;
    }
}

void HixlEndpoint::disconnect(uint64_t now, HixlNews &news) {
    const bool forced = !requested_.empty();
    const uint32_t status = agent.api().disconnect(agent.engine(), remote_.c_str(), agent.settings().connect_ms);
    if (status == ADT_HIXL_SUCCESS) {
        if (state_ != State::disconnecting) {
            hixl_stats().disconnects.fetch_add(1, std::memory_order_relaxed);
            if (forced) hixl_stats().forced.fetch_add(1, std::memory_order_relaxed);
        }
        state_ = State::disconnecting;
        retry_at_ = now + kRetryNs;
    } else if (status == ADT_HIXL_NOT_CONNECTED) {
        went_down(news);
    } else {
        // Nothing else says that memory is quiet, so it is tried until it works.
        if (state_ == State::connecting || state_ == State::up) state_ = State::draining;
        retry_at_ = now + kRetryNs;
    }
}

void HixlEndpoint::look_disconnecting(uint64_t now, HixlNews &news) {
    int32_t found = ADT_HIXL_DISCONNECTING;
    const uint32_t status = agent.api().connection(agent.engine(), remote_.c_str(), &found);
    if (status == ADT_HIXL_NOT_CONNECTED || (status == ADT_HIXL_SUCCESS && found == ADT_HIXL_NOT_CONNECT)) {
        went_down(news);
        return;
    }
    const bool working = status == ADT_HIXL_SUCCESS && found != ADT_HIXL_CONNECTED && found != ADT_HIXL_CONNECT_FAILED;
    if (!working && now >= retry_at_) disconnect(now, news);
}

// HIXL has nothing of this link any more: local memory is quiet.
void HixlEndpoint::went_down(HixlNews &news) {
    state_ = State::down;
    if (std::exchange(counted_, false)) hixl_stats().connections.fetch_sub(1, std::memory_order_relaxed);
    force_ = false;
    retry_at_ = 0;
    std::deque<Work> again;
    for (auto &[cookie, work] : requested_) {
        agent.forget_request(cookie);
        if (work.request != nullptr) agent.leave_behind(std::exchange(work.request, nullptr));
        if (work.given_up) {
            news.done.push_back({work.batch, ADT_ERR_ABORTED, 0});
        } else if (work.failures >= kMostFailures) {
            news.done.push_back({work.batch, ADT_ERR_IO, 0});
        } else if (closed_ || failed_) {
            news.done.push_back({work.batch, closed_ ? ADT_ERR_PEER_LOST : ADT_ERR_UNSUPPORTED, 0});
        } else {
            again.push_back(work);
        }
    }
    requested_.clear();
    waiting_works_.insert(waiting_works_.begin(), again.begin(), again.end());
    for (const uint64_t serial : peer_pauses_) news.messages.push_back(message(HixlSay::paused, serial));
    if (closed_) news.gone = true;
}

void HixlEndpoint::give_up(const std::string &reason, bool tell, HixlNews &news) {
    failed_ = true;
    end_waiting(ADT_ERR_UNSUPPORTED, news);
    if (std::exchange(settled_, true)) return;
    news.settled = true;
    news.status = ADT_ERR_UNSUPPORTED;
    news.reason = reason;
    if (tell) news.messages.push_back(message(HixlSay::failed));
}

void HixlEndpoint::lose(adt_status_t status, const std::string &reason, HixlNews &news) {
    failed_ = true;
    news.lost = true;
    news.status = status;
    news.reason = reason;
}

// ------------------------------------------------------------------------------------------------------------ requests

// Whether the connection reaches what a batch needs: HIXL shows a peer what was registered before it connected.
bool HixlEndpoint::covered(const Work &work) const {
    return work.needs_here <= covered_here_ && work.needs_there <= covered_there_;
}

void HixlEndpoint::pump(HixlNews &news) {
    while (state_ == State::up && !force_ && !waiting_works_.empty() && covered(waiting_works_.front())) {
        if (!submit(waiting_works_.front(), news)) return;
    }
}

// Whether host memory waits for a connection that reaches it.
bool HixlEndpoint::unproved() const {
    return useful() && agent.to_prove() > covered_here_;
}

// Hands the first waiting batch to HIXL, and takes it out of the list. False: HIXL takes no more just now.
bool HixlEndpoint::submit(Work &work, HixlNews &news) {
    const adt_batch_t &batch = *work.batch;
    if (work.memory->refused.load(std::memory_order_relaxed)) {
        news.reason = "HIXL does not connect with this host memory: over RoCE it must be of aclrtMallocHost";
        news.done.push_back({work.batch, ADT_ERR_UNSUPPORTED, 0});
        waiting_works_.pop_front();
        return true;
    }
    const auto &there = *reinterpret_cast<const HixlRemote *>(batch.remote);
    pieces_.clear();
    for (uint32_t i = 0; i < batch.count; ++i) {
        const adt_chunk_t &chunk = batch.chunks[i];
        const auto local = reinterpret_cast<uintptr_t>(chunk.local);
        const uintptr_t remote = there.tensors[chunk.remote_tensor] + chunk.remote_offset;
        // Never joined: the engine has merged neighbours, and HIXL takes no piece that lies in two registrations.
        pieces_.push_back({local, remote, chunk.length});
    }
    const uint64_t cookie = agent.name_request(*this);
    void *request = nullptr;
    const uint32_t status = agent.api().transfer(
        agent.engine(), remote_.c_str(), batch.opcode == ADT_READ ? ADT_HIXL_READ : ADT_HIXL_WRITE, pieces_.data(),
        pieces_.size(), reinterpret_cast<const void *>(static_cast<uintptr_t>(cookie)), &request);
    switch (status) {
        case ADT_HIXL_RESOURCE_EXHAUSTED:
            agent.forget_request(cookie);
            return false;
        case ADT_HIXL_PARAM_INVALID:
            // Refused before anything was moved.
            agent.forget_request(cookie);
            news.reason = "HIXL refuses a transfer of " + std::to_string(pieces_.size()) + " pieces to " + remote_ +
                          ": " + hixl_status_words(status);
            news.done.push_back({work.batch, ADT_ERR_INVALID, 0});
            waiting_works_.pop_front();
            return true;
        case ADT_HIXL_SUCCESS:
            hixl_stats().requests.fetch_add(1, std::memory_order_relaxed);
            agent.took_request(request);
            work.request = request;
            break;
        default:
            // Nobody knows what of it is under way: it counts as posted until the connection has ended.
            news.reason = "HIXL cannot transfer to " + remote_ + ": " + hixl_status_words(status);
            hixl_stats().failures.fetch_add(1, std::memory_order_relaxed);
            ++work.failures;
            force_ = true;
    }
    requested_.emplace(cookie, work);
    waiting_works_.pop_front();
    return true;
}

bool HixlEndpoint::query(HixlNews &news) {
    // While the connection ends, requests end with it.
    if (state_ != State::up && state_ != State::draining) return false;
    std::vector<std::pair<uint64_t, bool>> over;
    for (const auto &[cookie, work] : requested_) {
        if (work.request == nullptr) continue;
        int32_t found = ADT_HIXL_WAITING;
        const uint32_t status = agent.api().query(agent.engine(), work.request, &found);
        if (status == ADT_HIXL_SUCCESS && found == ADT_HIXL_WAITING) continue;
        over.emplace_back(cookie, status == ADT_HIXL_SUCCESS && found == ADT_HIXL_COMPLETED);
    }
    for (const auto &[cookie, well] : over) ended(cookie, well, news);
    return !over.empty();
}

void HixlEndpoint::ended(uint64_t cookie, bool well, HixlNews &news) {
    const auto found = requested_.find(cookie);
    if (found == requested_.end()) return;
    Work &work = found->second;
    work.request = nullptr;
    agent.forget_request(cookie);
    if (well) {
        news.done.push_back({work.batch, ADT_OK, 0});
        requested_.erase(found);
        return;
    }
    // The connection is of no more use, and may still write until it has ended. The first to fail is to blame.
    hixl_stats().failures.fetch_add(1, std::memory_order_relaxed);
    if (!force_) {
        ++work.failures;
        news.reason = "HIXL says that a transfer to " + remote_ + " has failed";
    }
    force_ = true;
}

}  // namespace adt
