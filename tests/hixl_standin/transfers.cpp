// SPDX-License-Identifier: Apache-2.0
// STAND-IN for tests, not Ascend software: requests, and the thread that moves their bytes.
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "engine.hpp"
#include "knobs.hpp"

namespace standin {

namespace {

using hixl::TransferStatus;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr size_t kPiece = size_t{1} << 20;  // bytes between two looks at whether the connection is still there
constexpr size_t kRuns = 64;
constexpr auto kLateWriteEvery = milliseconds(2);

// Whether the peer still holds its end: a dead process's number may be somebody else's.
bool reachable(const Link &link) {
    char byte;
    const ssize_t n = recv(link.socket.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

bool copy(const Link &link, hixl::TransferOp op, const std::vector<iovec> &here, const std::vector<iovec> &there) {
    size_t bytes = 0;
    for (const auto &run : here) bytes += run.iov_len;
    const auto function = op == hixl::READ ? process_vm_readv : process_vm_writev;
    count(kCopied, bytes);
    return function(link.pid, here.data(), here.size(), there.data(), there.size(), 0) == static_cast<ssize_t>(bytes);
}

uint64_t alias(const std::vector<Region> &regions, uint64_t address, uint64_t size) {
    const Region *region = locate(regions, address, size);
    return region->alias + (address - region->address);
}

}  // namespace

const Region *locate(const std::vector<Region> &regions, uint64_t address, uint64_t size) {
    for (const auto &region : regions) {
        const uint64_t offset = address - region.address;
        if (address >= region.address && offset <= region.size && size <= region.size - offset) return &region;
    }
    return nullptr;
}

void write_late(const Request &request) {
    static const std::string junk(64, '\xEE');
    for (const auto &desc : request.descs) {
        const size_t size = std::min(junk.size(), desc.len);
        // By process_vm in both directions: a caller that has freed the memory is to be found out, not killed.
        const bool reads = request.op == hixl::READ;
        const auto &link = *request.link;
        const uint64_t target =
            reads ? alias(link.local, desc.local_addr, size) : alias(link.remote, desc.remote_addr, size);
        const iovec from{const_cast<char *>(junk.data()), size}, to{reinterpret_cast<void *>(target), size};
        if (process_vm_writev(reads ? getpid() : link.pid, &from, 1, &to, 1, 0) > 0) count(kLateWrites);
    }
}

Engine::Requests::iterator Engine::look_up(uint64_t id) {
    return std::find_if(requests_.begin(), requests_.end(), [&](const Request &request) { return request.id == id; });
}

Engine::Requests::iterator Engine::drop(Requests::iterator it) {
    if (knob(kReuse) != 0) freed_.push_back(it->id);
    return requests_.erase(it);
}

hixl::Status Engine::post(const std::string &remote, hixl::TransferOp op,
                          const std::vector<hixl::TransferOpDesc> &descs, const void *user_data, uint64_t *id) {
    if (descs.empty() || (op != hixl::READ && op != hixl::WRITE)) return hixl::PARAM_INVALID;
    std::lock_guard lock(mu_);
    const auto link = find(remote);
    if (!link) return hixl::NOT_CONNECTED;
    if (link->broken) return hixl::FAILED;
    if (requests_.size() >= static_cast<size_t>(knob(kMaxRequests))) return hixl::RESOURCE_EXHAUSTED;
    for (const auto &desc : descs) {
        if (desc.len == 0) return hixl::PARAM_INVALID;
        const bool mine = locate(link->local, desc.local_addr, desc.len) != nullptr;
        if (!mine || locate(link->remote, desc.remote_addr, desc.len) == nullptr) {
            violation(std::string(mine ? "remote" : "local") + " memory that was not registered before Connect");
            return hixl::PARAM_INVALID;
        }
    }
    auto &request = requests_.emplace_back();
    if (knob(kReuse) != 0 && !freed_.empty()) {
        request.id = freed_.back();
        freed_.pop_back();
    } else {
        request.id = ++last_id_;
    }
    request.user_data = user_data;
    request.link = link;
    request.op = op;
    request.descs = descs;
    request.due = Clock::now() + microseconds(knob(kDelayUs));
    request.fails = hits(kFail);
    request.stalls = hits(kStall);
    request.stalls_until = Clock::time_point::max();
    if (const int64_t pause = knob(kStallMs); pause > 0) request.stalls_until = request.due + milliseconds(pause);
    count(kRequests);
    *id = request.id;
    work_.notify_all();
    return hixl::SUCCESS;
}

hixl::Status Engine::transfer(const std::string &remote, hixl::TransferOp op,
                              const std::vector<hixl::TransferOpDesc> &descs, int32_t ms) {
    const auto deadline = Clock::now() + milliseconds(ms);
    uint64_t id = 0;
    const auto status = post(remote, op, descs, nullptr, &id);
    if (status != hixl::SUCCESS) return status;
    std::unique_lock lock(mu_);
    const auto it = look_up(id);
    auto &request = *it;
    if (!moved_.wait_until(lock, deadline, [&] { return request.status != TransferStatus::WAITING; })) {
        request.forgotten = true;  // and goes on
        return hixl::TIMEOUT;
    }
    const bool well = request.status == TransferStatus::COMPLETED;
    drop(it);
    return well ? hixl::SUCCESS : hixl::FAILED;
}

hixl::Status Engine::query(uint64_t id, TransferStatus &status) {
    count(kQueries);
    if (hits(kQueryFails)) return hixl::FAILED;
    if (id == 0) return hixl::FAILED;
    std::lock_guard lock(mu_);
    const auto it = look_up(id);
    if (it == requests_.end()) {
        violation("a request that is unknown, or was found finished before, is asked for");
        return hixl::PARAM_INVALID;
    }
    status = it->status;
    if (status != TransferStatus::WAITING) drop(it);
    return hixl::SUCCESS;
}

hixl::Status Engine::query(const hixl::GetTransferStatusArgs &args, std::vector<hixl::TransferResult> &results) {
    count(kQueries);
    count(kBulkQueries);
    for (const uint8_t byte : args.reserved) {
        if (byte != 0) {
            violation("reserved bytes of GetTransferStatusArgs are not zero");
            return hixl::PARAM_INVALID;
        }
    }
    if (kind_ != Kind::client_server || knob(kBulk) == 0) return hixl::UNSUPPORTED;
    if (hits(kQueryFails)) return hixl::FAILED;
    results.clear();
    std::lock_guard lock(mu_);
    for (auto it = requests_.begin(); it != requests_.end() && results.size() < args.max_query_count;) {
        auto &request = *it;
        const bool waits = request.status == TransferStatus::WAITING;
        if (request.forgotten || (waits && args.skip_waiting)) {
            ++it;
            continue;
        }
        hixl::TransferResult result;
        result.req = reinterpret_cast<hixl::TransferReq>(request.id);
        result.user_data = request.user_data;
        result.status = request.status;
        results.push_back(result);
        it = waits ? std::next(it) : drop(it);
    }
    return hixl::SUCCESS;
}

// Moves all bytes of a request, or half of them where it stalls, without the lock.
TransferStatus Engine::carry_out(Request &request, std::unique_lock<std::mutex> &lock) {
    const auto link = request.link;
    const bool half = request.stalls;
    if (link->broken || request.fails || !reachable(*link)) return TransferStatus::FAILED;
    touching_ = link.get();
    std::vector<iovec> here, there;
    size_t bytes = 0;
    bool well = true;
    const auto flush = [&] {
        if (here.empty()) return;
        lock.unlock();
        well = copy(*link, request.op, here, there) && well;
        lock.lock();
        well = well && !link->stop;
        here.clear();
        there.clear();
        bytes = 0;
    };
    const size_t wanted = half ? request.descs.size() / 2 : request.descs.size();
    for (size_t i = 0; i < wanted && well; ++i) {
        const auto &desc = request.descs[i];
        const uint64_t local = alias(link->local, desc.local_addr, desc.len);
        const uint64_t remote = alias(link->remote, desc.remote_addr, desc.len);
        for (size_t done = 0; done < desc.len && well;) {
            const size_t size = std::min(desc.len - done, kPiece - bytes);
            here.push_back({reinterpret_cast<void *>(local + done), size});
            there.push_back({reinterpret_cast<void *>(remote + done), size});
            done += size;
            bytes += size;
            if (bytes == kPiece || here.size() == kRuns) flush();
        }
    }
    if (well) flush();
    touching_ = nullptr;
    moved_.notify_all();
    if (!well) return TransferStatus::FAILED;
    return half ? TransferStatus::WAITING : TransferStatus::COMPLETED;
}

void Engine::work() {
    std::unique_lock lock(mu_);
    while (!over_) {
        const auto now = Clock::now();
        auto wake = Clock::time_point::max();
        auto next = requests_.end();
        for (auto it = requests_.begin(); it != requests_.end(); ++it) {
            if (it->status != TransferStatus::WAITING || it->link->stop) continue;
            if (it->due > now)
                wake = std::min(wake, it->due);
            else if (next == requests_.end())
                next = it;
        }
        if (next == requests_.end()) {
            if (wake == Clock::time_point::max())
                work_.wait(lock);
            else
                work_.wait_until(lock, wake);
            continue;
        }
        auto &link = *next->link;
        if (next->stalling && now < next->stalls_until && reachable(link)) {
            write_late(*next);
            next->due = now + kLateWriteEvery;
            continue;
        }
        next->stalls = next->stalls && !next->stalling;
        next->stalling = false;
        // The lock is free while bytes move; only what is no longer WAITING is erased meanwhile.
        const auto status = carry_out(*next, lock);
        if (link.stop) continue;  // the disconnect decides
        next->status = status;
        if (status == TransferStatus::FAILED) link.broken = true;
        if (status == TransferStatus::WAITING) {
            next->stalling = true;
            count(kStalls);
        } else if (next->forgotten) {
            drop(next);
        }
        moved_.notify_all();
    }
}

}  // namespace standin
