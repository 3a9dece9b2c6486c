// SPDX-License-Identifier: Apache-2.0
// Block lists and layer ranges become runs of bytes here, and every bound of the initiating side is checked here, once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "aiodatadist/transport.h"

namespace adt {

// `length` bytes of one tensor, counted from its start on each side.
struct Run {
    uint64_t local;
    uint64_t remote;
    uint64_t length;
};

// What one side of a transfer names in every tensor: whole entries of dimension 0 (blocks), or a part of a single one
// (a batch slot).
struct Selection {
    const int64_t *blocks = nullptr;
    bool is_slot = false;
    uint64_t slot = 0;
    uint64_t offset = 0;  // bytes from the start of the slot
};

// As a size: what the slot holds, as far as the list of blocks on the other side reaches.
constexpr uint64_t kWhole = UINT64_MAX;

// Why a selection was refused: which side, at which position of a list, and the value found there.
struct BlockFault {
    enum Kind : int { none = 0, local_range, remote_range, duplicate, size, count, reused };
    Kind kind = none;
    size_t position = 0;
    int64_t value = 0;
};

inline bool contiguous(const adt_geometry_t &g) {
    return g.block_stride == g.block_bytes || g.num_blocks == 1;
}

// Bytes from the start of a tensor to its end.
inline uint64_t tensor_extent(const adt_geometry_t &g) {
    return (g.num_blocks - 1) * g.block_stride + g.block_bytes;
}

// Checks that sizes are positive and that no product overflows.
bool valid_geometry(const adt_geometry_t &g);

// Bytes of each tensor that a transfer moves. `size` counts where a side is a slot.
uint64_t bytes_a_tensor(const Selection &local, const Selection &remote, size_t count, uint64_t size,
                        const adt_geometry_t &local_geometry, const adt_geometry_t &remote_geometry);

// Checks both sides, refuses a destination named twice, and merges neighbours where both sides are contiguous.
// In a copy within one cache (`same_cache`) nothing may be source and destination at once: pieces move in any order.
// `local_is_destination` says which list may not repeat. `count` is the length of the lists, and
// `bytes` what `bytes_a_tensor` said. Where one side is a slot, piece j of a block's size belongs to entry j of the
// list, and the last piece is what is left.
BlockFault make_runs(const Selection &local, const Selection &remote, size_t count, uint64_t bytes,
                     const adt_geometry_t &local_geometry, const adt_geometry_t &remote_geometry,
                     bool local_is_destination, bool same_cache, std::vector<Run> &out);

// True if [offset, offset+length) of a tensor lies inside blocks (not in the gaps of a strided tensor).
bool inside_blocks(const adt_geometry_t &g, uint64_t offset, uint64_t length);

}  // namespace adt
