// SPDX-License-Identifier: Apache-2.0
#include "hixl_memory.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <utility>

#include "geometry.hpp"
#include "hixl_library.hpp"
#include "hixl_stats.hpp"

namespace adt {
namespace {

constexpr size_t kMostRegistrations = 4096;  // HIXL's documents advise no more in one engine

// Of a key, before the addresses of the tensors.
struct KeyHead {
    uint32_t version;
    uint32_t access;
    uint32_t tensors;
    uint32_t placement;
    uint64_t extent;
    uint64_t generation;
};
constexpr uint32_t kKeyVersion = 1;

std::string words_of(const HixlRange &range) {
    char text[80];
    std::snprintf(text, sizeof(text), "%" PRIu64 " bytes at 0x%" PRIxPTR, range.bytes, range.address);
    return text;
}

}  // namespace

std::unique_ptr<HixlMemory> describe_hixl_memory(const adt_memory_t &memory) {
    auto made = std::make_unique<HixlMemory>();
    made->extent = tensor_extent(memory.geometry);
    made->access = memory.access;
    made->placement = memory.placement;
    for (uint32_t i = 0; i < memory.geometry.num_tensors; ++i) {
        made->tensors.push_back(reinterpret_cast<uintptr_t>(memory.tensors[i]));
    }
    if (memory.region_id != 0) {
        made->ranges.push_back({reinterpret_cast<uintptr_t>(memory.region_base), memory.region_bytes});
    } else {
        for (const uintptr_t tensor : made->tensors) made->ranges.push_back({tensor, made->extent});
    }
    return made;
}

std::string hixl_key(const HixlMemory &memory) {
    const KeyHead head{kKeyVersion,      memory.access, static_cast<uint32_t>(memory.tensors.size()),
                       memory.placement, memory.extent, memory.generation};
    std::string key(reinterpret_cast<const char *>(&head), sizeof(head));
    key.append(reinterpret_cast<const char *>(memory.tensors.data()), memory.tensors.size() * sizeof(uintptr_t));
    return key;
}

std::unique_ptr<HixlRemote> read_hixl_key(const adt_key_t &key, uint64_t cache, const adt_geometry_t &geometry) {
    KeyHead head{};
    if (key.size < sizeof(head)) throw HixlError{ADT_ERR_PROTOCOL, "the peer's key is too short"};
    std::memcpy(&head, key.data, sizeof(head));
    if (head.version != kKeyVersion) {
        throw HixlError{ADT_ERR_UNSUPPORTED, "the peer's keys are of version " + std::to_string(head.version)};
    }
    if (key.size != sizeof(head) + uint64_t{head.tensors} * sizeof(uintptr_t)) {
        throw HixlError{ADT_ERR_PROTOCOL, "the peer's key has another size than it says"};
    }
    if (head.tensors != geometry.num_tensors || head.extent != tensor_extent(geometry)) {
        throw HixlError{ADT_ERR_GEOMETRY, "the peer's key does not fit the geometry that it announced"};
    }
    auto made = std::make_unique<HixlRemote>();
    made->cache = cache;
    made->access = head.access;
    made->extent = head.extent;
    made->generation = head.generation;
    made->tensors.resize(head.tensors);
    std::memcpy(made->tensors.data(), static_cast<const char *>(key.data) + sizeof(head), key.size - sizeof(head));
    for (const uintptr_t tensor : made->tensors) {
        if (tensor == 0 || tensor > UINTPTR_MAX - head.extent) {
            throw HixlError{ADT_ERR_PROTOCOL, "the peer's key names an impossible address"};
        }
    }
    return made;
}

HixlRegistry::HixlRegistry(const adt_hixl_api_t &api, void *engine, uint64_t alignment)
    : api_(api), engine_(engine), alignment_(alignment) {}

// Says what HIXL would refuse by a number.
void HixlRegistry::check(const HixlRange &range, int32_t type) const {
    if (alignment_ > 1 && range.address % alignment_ != 0) {
        throw HixlError{ADT_ERR_INVALID, words_of(range) + " do not begin at a multiple of " +
                                             std::to_string(alignment_) +
                                             ", which HCCS needs: allocate the tensor by huge pages (2 MiB)"};
    }
    const auto after = entries_.lower_bound(range.address);
    const auto refuse = [&](const std::pair<const uintptr_t, Entry> &other) {
        throw HixlError{ADT_ERR_INVALID, words_of(range) + " overlap " + words_of({other.first, other.second.bytes}) +
                                             ", which are registered already, and HIXL takes no overlapping ranges"};
    };
    if (after != entries_.end() && after->first < range.address + range.bytes) {
        const bool same = after->first == range.address && after->second.bytes == range.bytes;
        if (!same) refuse(*after);
        if (after->second.type != type) {
            throw HixlError{ADT_ERR_INVALID, words_of(range) + " are registered already with another placement"};
        }
        return;
    }
    if (after != entries_.begin()) {
        const auto before = std::prev(after);
        if (before->first + before->second.bytes > range.address) refuse(*before);
    }
}

void HixlRegistry::take(HixlMemory &memory) {
    const int32_t type = memory.placement == ADT_PLACEMENT_DEVICE ? ADT_HIXL_MEM_DEVICE : ADT_HIXL_MEM_HOST;
    for (const HixlRange &range : memory.ranges) {
        check(range, type);
        const auto found = entries_.find(range.address);
        if (found != entries_.end() && found->second.refused) {
            throw HixlError{ADT_ERR_UNSUPPORTED, "HIXL does not connect with " + words_of(range) + " of host memory"};
        }
    }
    std::vector<HixlRange> taken;
    size_t added = 0;
    for (const HixlRange &range : memory.ranges) added += entries_.count(range.address) == 0 ? 1 : 0;
    if (entries_.size() + added > kMostRegistrations) {
        throw HixlError{ADT_ERR_NO_MEMORY,
                        std::to_string(entries_.size()) + " ranges are registered, and " + std::to_string(added) +
                            " more would exceed " + std::to_string(kMostRegistrations) +
                            " of one HIXL engine: unregister caches, or use fewer and larger tensors"};
    }
    for (const HixlRange &range : memory.ranges) {
        const auto found = entries_.find(range.address);
        if (found != entries_.end()) {
            ++found->second.users;
        } else {
            void *handle = nullptr;
            const uint32_t status = api_.register_mem(engine_, range.address, range.bytes, type, &handle);
            if (status != ADT_HIXL_SUCCESS) {
                std::vector<HixlRange> unused = count_out(taken);
                deregister(unused);
                throw HixlError{status == ADT_HIXL_RESOURCE_EXHAUSTED ? ADT_ERR_NO_MEMORY : ADT_ERR_IO,
                                "HIXL refuses " + words_of(range) + " of " +
                                    (type == ADT_HIXL_MEM_DEVICE ? "device" : "host") +
                                    " memory: " + hixl_status_words(status)};
            }
            entries_.emplace(range.address, Entry{range.bytes, type, handle, 1, ++generation_});
            hixl_stats().registrations.fetch_add(1, std::memory_order_relaxed);
            hixl_stats().registered_bytes.fetch_add(range.bytes, std::memory_order_relaxed);
        }
        taken.push_back(range);
    }
    memory.generation = generation_;
    taken_.insert(&memory);
}

std::vector<HixlRange> HixlRegistry::give(HixlMemory &memory) {
    taken_.erase(&memory);
    return count_out(memory.ranges);
}

std::vector<HixlRange> HixlRegistry::count_out(const std::vector<HixlRange> &ranges) {
    std::vector<HixlRange> unused;
    for (const HixlRange &range : ranges) {
        const auto found = entries_.find(range.address);
        if (found == entries_.end() || --found->second.users > 0) continue;
        if (found->second.handle == nullptr) {
            entries_.erase(found);
        } else {
            unused.push_back(range);
        }
    }
    return unused;
}

bool HixlRegistry::unproved(const Entry &entry) const {
    return entry.type == ADT_HIXL_MEM_HOST && !entry.refused && entry.generation > proven_;
}

bool HixlRegistry::unproved(const HixlMemory &memory) const {
    return std::any_of(memory.ranges.begin(), memory.ranges.end(), [this](const HixlRange &range) {
        const auto found = entries_.find(range.address);
        return found != entries_.end() && unproved(found->second);
    });
}

std::vector<HixlRange> HixlRegistry::refuse_unproved() {
    std::vector<HixlRange> refused;
    for (HixlMemory *const memory : taken_) {
        if (unproved(*memory)) memory->refused.store(true, std::memory_order_release);
    }
    for (auto &[address, entry] : entries_) {
        if (!unproved(entry)) continue;
        entry.refused = true;
        refused.push_back({address, entry.bytes});
    }
    return refused;
}

void HixlRegistry::deregister(std::vector<HixlRange> &ranges) {
    std::vector<HixlRange> refused;
    for (const HixlRange &range : ranges) {
        const auto found = entries_.find(range.address);
        if (found == entries_.end() || found->second.handle == nullptr) continue;
        if (found->second.users > 0 && !found->second.refused) continue;  // taken anew meanwhile
        if (api_.deregister_mem(engine_, found->second.handle) != ADT_HIXL_SUCCESS) {
            refused.push_back(range);
            continue;
        }
        hixl_stats().registrations.fetch_sub(1, std::memory_order_relaxed);
        hixl_stats().registered_bytes.fetch_sub(found->second.bytes, std::memory_order_relaxed);
        found->second.handle = nullptr;
        if (found->second.users == 0) entries_.erase(found);
    }
    ranges.swap(refused);
}

void HixlRegistry::forget() {
    for (const auto &[address, entry] : entries_) {
        if (entry.handle == nullptr) continue;
        hixl_stats().registrations.fetch_sub(1, std::memory_order_relaxed);
        hixl_stats().registered_bytes.fetch_sub(entry.bytes, std::memory_order_relaxed);
    }
    entries_.clear();
    taken_.clear();
}

}  // namespace adt
