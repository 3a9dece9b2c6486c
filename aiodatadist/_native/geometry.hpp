// SPDX-License-Identifier: Apache-2.0
// Block lists and layer ranges become runs of bytes here, and every bound of the initiating side is checked here, once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "aiodatadist/transport.h"

namespace adt {

// `count` neighbouring blocks: local [local, local+count) and remote [remote, remote+count).
struct BlockRun {
    uint64_t local;
    uint64_t remote;
    uint64_t count;
};

// Why a block list was refused: which list, at which position, and the value found there.
struct BlockFault {
    enum Kind : int { none = 0, local_range, remote_range, duplicate };
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

// Checks both lists, refuses a destination named twice, and merges neighbours where both sides are contiguous.
// `local_is_destination` says which list may not repeat.
BlockFault make_runs(const int64_t *local, const int64_t *remote, size_t count, const adt_geometry_t &local_geometry,
                     const adt_geometry_t &remote_geometry, bool local_is_destination, std::vector<BlockRun> &out);

// True if [offset, offset+length) of a tensor lies inside blocks (not in the gaps of a strided tensor).
bool inside_blocks(const adt_geometry_t &g, uint64_t offset, uint64_t length);

}  // namespace adt
