// SPDX-License-Identifier: Apache-2.0
#include "fd.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace adt {
namespace {

// One bit a descriptor. Descriptors beyond the table are not closed in a child; Linux hands out the lowest free
// number, so this needs a process with more than a million open files.
constexpr int kTracked = 1 << 20;
std::atomic<uint64_t> g_ours[kTracked / 64];
std::atomic<int> g_highest{-1};
std::atomic<bool> g_child{false};
std::atomic<int> g_engines{0};

void close_all_in_child() {
    // Without an engine there is neither a thread nor a peer, and nothing that a child could not go on with.
    if (g_engines.load(std::memory_order_relaxed) == 0) return;
    g_child.store(true, std::memory_order_relaxed);
    const int highest = g_highest.load(std::memory_order_relaxed);
    for (int word = 0; word <= highest / 64 && highest >= 0; ++word) {
        uint64_t bits = g_ours[word].exchange(0, std::memory_order_relaxed);
        while (bits != 0) {
            const int bit = __builtin_ctzll(bits);
            bits &= bits - 1;
            ::close(word * 64 + bit);
        }
    }
}

}  // namespace

bool in_forked_child() {
    return g_child.load(std::memory_order_relaxed);
}

EngineAlive::EngineAlive() {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, close_all_in_child); });
    g_engines.fetch_add(1, std::memory_order_relaxed);
}

EngineAlive::~EngineAlive() {
    g_engines.fetch_sub(1, std::memory_order_relaxed);
}

void note_descriptor(int fd, bool ours) {
    if (fd < 0 || fd >= kTracked) return;
    const uint64_t mask = uint64_t{1} << (static_cast<unsigned>(fd) % 64);
    if (ours) {
        g_ours[fd / 64].fetch_or(mask, std::memory_order_relaxed);
        int seen = g_highest.load(std::memory_order_relaxed);
        while (seen < fd && !g_highest.compare_exchange_weak(seen, fd, std::memory_order_relaxed)) {
        }
    } else {
        g_ours[fd / 64].fetch_and(~mask, std::memory_order_relaxed);
    }
}

void Fd::reset() {
    const int fd = std::exchange(fd_, -1);
    // In a forked child the number was closed at fork and may by now name something of the child's own.
    if (fd < 0 || in_forked_child()) return;
    note_descriptor(fd, false);
    ::close(fd);
}

}  // namespace adt
