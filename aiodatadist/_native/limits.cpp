// SPDX-License-Identifier: Apache-2.0
#include "limits.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "copy.hpp"
#include "threads.hpp"

namespace adt {
namespace {

constexpr size_t kMaxIovecs = 1024;  // the kernel's IOV_MAX
constexpr size_t kHeader = 64;       // a request or an answer of a round trip

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

char *pointer(uintptr_t address) {
    return reinterpret_cast<char *>(address);
}

// Runs work(thread, first, last) in `threads` threads, the caller's among them. `work` returns 0 or an errno.
template <typename Work>
int64_t timed(unsigned threads, size_t count, Work work) {
    std::atomic<int> error{0};
    const auto part = [&](unsigned thread) {
        const int failed = work(thread, count * thread / threads, count * (thread + 1) / threads);
        if (failed) error = failed;
    };
    std::vector<std::thread> others;
    others.reserve(threads);
    const int64_t began = now_ns();
    try {
        for (unsigned i = 1; i < threads; ++i) others.push_back(start_thread("adt-limit", [&part, i] { part(i); }));
    } catch (const std::system_error &) {
        error = EAGAIN;
    }
    if (!error) part(0);
    for (std::thread &other : others) other.join();
    const int64_t took = now_ns() - began;
    return error ? -error.load() : took;
}

// Which block is touched ahead of its copy: the one after next.
constexpr size_t kAhead = 2;

int copy_part(Blocks to, Blocks from, size_t first, size_t last, CopyLoop loop) {
    if (loop == CopyLoop::plain) {
        for (size_t i = first; i < last; ++i) std::memcpy(pointer(to.at(i)), pointer(from.at(i)), to.bytes);
        return 0;
    }
    const CopyKernel copy = stream_copy();
    for (size_t i = first; i < last; ++i) {
        if (loop == CopyLoop::stream_prefetch && i + kAhead < last) {
            prefetch_block(pointer(from.at(i + kAhead)), from.bytes);
        }
        copy(pointer(to.at(i)), pointer(from.at(i)), to.bytes);
    }
    store_fence();
    return 0;
}

int vm_call(int pid, const iovec *local, const iovec *remote, size_t count, bool write) {
    size_t wanted = 0;
    for (size_t i = 0; i < count; ++i) wanted += local[i].iov_len;
    const ssize_t moved = write ? process_vm_writev(pid, local, count, remote, count, 0)
                                : process_vm_readv(pid, local, count, remote, count, 0);
    if (moved < 0) return errno;
    return static_cast<size_t>(moved) == wanted ? 0 : EFAULT;
}

int vm_part(Blocks local, int pid, Blocks remote, size_t first, size_t last, size_t iovecs, bool write) {
    std::vector<iovec> here(iovecs);
    std::vector<iovec> there(iovecs);
    for (size_t at = first; at < last; at += iovecs) {
        const size_t count = std::min(iovecs, last - at);
        for (size_t i = 0; i < count; ++i) {
            here[i] = {pointer(local.at(at + i)), local.bytes};
            there[i] = {pointer(remote.at(at + i)), remote.bytes};
        }
        if (const int failed = vm_call(pid, here.data(), there.data(), count, write)) return failed;
    }
    return 0;
}

// Moves all of `parts`, which it uses up.
int move_parts(int fd, std::vector<iovec> &parts, bool send) {
    size_t head = 0;
    while (head < parts.size()) {
        msghdr message{};
        message.msg_iov = &parts[head];
        message.msg_iovlen = parts.size() - head;
        const ssize_t moved = send ? sendmsg(fd, &message, MSG_NOSIGNAL) : recvmsg(fd, &message, 0);
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0) return errno;
        if (moved == 0) return ECONNRESET;
        size_t left = static_cast<size_t>(moved);
        while (head < parts.size() && left >= parts[head].iov_len) left -= parts[head++].iov_len;
        if (left) parts[head] = {static_cast<char *>(parts[head].iov_base) + left, parts[head].iov_len - left};
    }
    return 0;
}

int socket_part(int fd, Blocks local, size_t first, size_t last, bool sends, bool asks) {
    char go = 0;
    std::vector<iovec> parts;
    const auto token = [&](bool send) {
        parts.assign(1, {&go, 1});
        return move_parts(fd, parts, send);
    };
    if (const int failed = token(asks)) return failed;
    for (size_t at = first; at < last;) {
        parts.clear();
        for (; at < last && parts.size() < kMaxIovecs; ++at) parts.push_back({pointer(local.at(at)), local.bytes});
        if (const int failed = move_parts(fd, parts, sends)) return failed;
    }
    // What was sent has arrived when its receiver says so.
    return sends == asks ? token(!asks) : 0;
}

}  // namespace

const char *build_fault() {
#if defined(AIODATADIST_DEBUG)
    return "a debug build";
#elif defined(AIODATADIST_SANITIZED)
    return "built with a sanitizer";
#else
    return "";
#endif
}

int64_t limit_copy(Blocks to, Blocks from, size_t count, unsigned threads, CopyLoop loop) {
    return timed(threads, count,
                 [=](unsigned, size_t first, size_t last) { return copy_part(to, from, first, last, loop); });
}

int64_t limit_process_vm(Blocks local, int pid, Blocks remote, size_t count, unsigned threads, unsigned iovecs,
                         bool write) {
    const size_t most = std::clamp<size_t>(iovecs, 1, kMaxIovecs);
    return timed(threads, count, [=](unsigned, size_t first, size_t last) {
        return vm_part(local, pid, remote, first, last, most, write);
    });
}

int64_t limit_sockets(const int *fds, unsigned streams, Blocks local, size_t count, bool sends, bool asks) {
    return timed(streams, count, [=](unsigned stream, size_t first, size_t last) {
        return socket_part(fds[stream], local, first, last, sends, asks);
    });
}

int64_t limit_copy_each(Blocks to, Blocks from, size_t count, int64_t *took) {
    for (size_t i = 0; i < count; ++i) {
        const int64_t began = now_ns();
        std::memcpy(pointer(to.at(i)), pointer(from.at(i)), to.bytes);
        std::atomic_signal_fence(std::memory_order_seq_cst);  // the copy stays between the two readings
        took[i] = now_ns() - began;
    }
    return 0;
}

int64_t limit_process_vm_each(Blocks local, int pid, Blocks remote, size_t count, bool write, int64_t *took) {
    for (size_t i = 0; i < count; ++i) {
        const int64_t began = now_ns();
        const iovec here{pointer(local.at(i)), local.bytes};
        const iovec there{pointer(remote.at(i)), remote.bytes};
        if (const int failed = vm_call(pid, &here, &there, 1, write)) return -failed;
        took[i] = now_ns() - began;
    }
    return 0;
}

int64_t limit_socket_each(int fd, Blocks local, size_t count, bool sends, bool asks, int64_t *took) {
    char header[kHeader] = {};
    std::vector<iovec> parts;
    for (size_t i = 0; i < count; ++i) {
        const iovec block{pointer(local.at(i)), local.bytes};
        const int64_t began = now_ns();
        // The request, then its answer; the block goes with whichever leaves the end that has it.
        for (const bool send : {asks, !asks}) {
            parts.assign(1, {header, kHeader});
            if (send == sends) parts.push_back(block);
            if (const int failed = move_parts(fd, parts, send)) return -failed;
        }
        took[i] = now_ns() - began;
    }
    return 0;
}

}  // namespace adt
