// SPDX-License-Identifier: Apache-2.0
// Memory that is registered with HIXL, and the keys by which peers find it.
//
// HIXL itself has no keys: whoever is connected reaches all memory that was registered before he connected. A key says
// where a cache's tensors lie, and when they were registered.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "aiodatadist/transport.h"
#include "counted.hpp"
#include "hixl_api.h"

namespace adt {

// Raised in the files of hixl; says what failed and why.
struct HixlError {
    adt_status_t status;
    std::string text;
};

struct HixlRange {
    uintptr_t address;
    uint64_t bytes;
};

// A registered cache.
struct HixlMemory : Counted<Live::hixl_memory> {
    std::vector<uintptr_t> tensors;
    uint64_t extent = 0;  // of each
    uint32_t access = 0;
    uint32_t placement = 0;
    uint64_t generation = 0;  // of the engine's memory when all of this was registered
    std::vector<HixlRange> ranges;
    std::atomic<bool> refused{false};  // HIXL does not connect with it, and lets go of it
};

// A peer's cache.
struct HixlRemote {
    uint64_t cache = 0;
    uint32_t access = 0;
    uint64_t extent = 0;
    uint64_t generation = 0;
    std::vector<uintptr_t> tensors;  // addresses over there
};

// Which memory of a cache is to be registered. Throws HixlError.
std::unique_ptr<HixlMemory> describe_hixl_memory(const adt_memory_t &memory);

std::string hixl_key(const HixlMemory &memory);
// Throws HixlError: the key is no key, or does not fit the geometry.
std::unique_ptr<HixlRemote> read_hixl_key(const adt_key_t &key, uint64_t cache, const adt_geometry_t &geometry);

// What an engine of HIXL has registered. Caches over the same range share its registration. Used in one thread.
class HixlRegistry {
  public:
    HixlRegistry(const adt_hixl_api_t &api, void *engine, uint64_t alignment);
    HixlRegistry(const HixlRegistry &) = delete;
    HixlRegistry &operator=(const HixlRegistry &) = delete;

    // Registers all ranges of a cache, or none. Throws HixlError, which names the range and the limit.
    void take(HixlMemory &memory);
    // Counts the cache's ranges out and returns those that nobody uses any more, which HIXL still has.
    std::vector<HixlRange> give(HixlMemory &memory);
    // Has HIXL let go of ranges that `give` returned; those that it refused to stay in the list.
    void deregister(std::vector<HixlRange> &ranges);
    // A connection was made when memory was of this generation: HIXL bears all of it.
    void proved(uint64_t generation) { proven_ = std::max(proven_, generation); }
    // Whether no connection has borne all of a cache's host memory yet.
    bool unproved(const HixlMemory &memory) const;
    // Marks all host memory that no connection has borne as refused, and returns it, to be deregistered.
    std::vector<HixlRange> refuse_unproved();
    // Grows with each registration.
    uint64_t generation() const { return generation_; }
    // The engine is gone, and all registrations with it.
    void forget();

  private:
    struct Entry {
        uint64_t bytes;
        int32_t type;
        void *handle;  // null: HIXL has let go of it, because it refused it
        uint32_t users;
        uint64_t generation;
        bool refused = false;
    };
    void check(const HixlRange &range, int32_t type) const;
    bool unproved(const Entry &entry) const;
    std::vector<HixlRange> count_out(const std::vector<HixlRange> &ranges);

    const adt_hixl_api_t &api_;
    void *const engine_;
    const uint64_t alignment_;
    uint64_t generation_ = 0;
    uint64_t proven_ = 0;
    std::map<uintptr_t, Entry> entries_;
    std::set<HixlMemory *> taken_;
};

}  // namespace adt
