// SPDX-License-Identifier: Apache-2.0
// What a same-host peer is told of a cache: where its tensors lie, in a memfd region or in the owner's address space.
#pragma once

#include <cstdint>

namespace adt {

// Followed by num_tensors u64: offsets in the region, or addresses.
struct ShmKeyHead {
    static constexpr uint32_t kMagic = 0x314b5341;  // "ASK1"
    uint32_t magic;
    uint32_t num_tensors;
    uint32_t access;  // ADT_REMOTE_*
    uint32_t reserved;
    uint64_t region_id;  // 0: addresses for process_vm
    uint64_t region_bytes;
};

}  // namespace adt
