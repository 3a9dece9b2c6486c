// SPDX-License-Identifier: Apache-2.0
// Live-object counters: in debug builds each native class counts its instances, and the test suite asserts
// that every counter is zero once a test has cleaned up. Release builds pay nothing.
#pragma once

#include <atomic>
#include <cstdint>

namespace adt {

enum class Live : unsigned {
    engine,
    ring,
    node,
    peer,
    local_cache,
    remote_cache,
    operation,
    batch,
    region,
    mapping,
    connection,
    served,
    gate,
    lease,
    rdma_device,
    registration,
    queue_pair,
    hixl_engine,
    hixl_endpoint,
    hixl_memory,
    count
};

inline const char *const kLiveNames[] = {"engine",       "ring",       "node",        "peer",          "local_cache",
                                         "remote_cache", "operation",  "batch",       "region",        "mapping",
                                         "connection",   "served",     "gate",        "lease",         "rdma_device",
                                         "registration", "queue_pair", "hixl_engine", "hixl_endpoint", "hixl_memory"};

constexpr unsigned kLiveCount = static_cast<unsigned>(Live::count);

#ifdef AIODATADIST_DEBUG
inline std::atomic<int64_t> g_live[static_cast<unsigned>(Live::count)];

template <Live kind>
class Counted {
  public:
    Counted() { g_live[static_cast<unsigned>(kind)].fetch_add(1, std::memory_order_relaxed); }
    Counted(const Counted &) : Counted() {}
    Counted &operator=(const Counted &) { return *this; }
    ~Counted() { g_live[static_cast<unsigned>(kind)].fetch_sub(1, std::memory_order_relaxed); }
};
inline int64_t live_count(unsigned kind) {
    return g_live[kind].load(std::memory_order_relaxed);
}
constexpr bool kDebugBuild = true;
#else
template <Live kind>
class Counted {};
inline int64_t live_count(unsigned) {
    return 0;
}
constexpr bool kDebugBuild = false;
#endif

}  // namespace adt
