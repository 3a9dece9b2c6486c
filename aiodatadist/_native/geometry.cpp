// SPDX-License-Identifier: Apache-2.0
#include "geometry.hpp"

#include <algorithm>
#include <numeric>

namespace adt {

namespace {

// The peer names the number of its blocks: beyond this, one bit a block is more memory than anybody means to spend.
constexpr uint64_t kMostBits = uint64_t{1} << 26;

// Finds the first entry that repeats an earlier one, in memory of the list's own size.
BlockFault find_repeat(const int64_t *list, size_t count) {
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(),
              [list](size_t a, size_t b) { return list[a] != list[b] ? list[a] < list[b] : a < b; });
    size_t first = count;
    for (size_t i = 1; i < count; ++i) {
        if (list[order[i]] == list[order[i - 1]]) first = std::min(first, order[i]);
    }
    return first == count ? BlockFault{} : BlockFault{BlockFault::duplicate, first, list[first]};
}

}  // namespace

bool valid_geometry(const adt_geometry_t &g) {
    if (g.num_tensors == 0 || g.num_blocks == 0 || g.block_bytes == 0 || g.block_stride < g.block_bytes) return false;
    uint64_t extent = 0;
    if (__builtin_mul_overflow(g.num_blocks - 1, g.block_stride, &extent)) return false;
    if (__builtin_add_overflow(extent, g.block_bytes, &extent)) return false;
    uint64_t all = 0;
    return !__builtin_mul_overflow(extent, uint64_t{g.num_tensors}, &all) && all <= uint64_t{INT64_MAX};
}

BlockFault make_runs(const int64_t *local, const int64_t *remote, size_t count, const adt_geometry_t &local_geometry,
                     const adt_geometry_t &remote_geometry, bool local_is_destination, std::vector<BlockRun> &out) {
    out.clear();
    const uint64_t local_blocks = local_geometry.num_blocks;
    const uint64_t remote_blocks = remote_geometry.num_blocks;
    const bool merge = contiguous(local_geometry) && contiguous(remote_geometry);
    const int64_t *destination = local_is_destination ? local : remote;

    // One bit a destination block finds repeats in O(blocks); a list in rising order needs none of it.
    bool rising = true;
    for (size_t i = 0; i < count; ++i) {
        // A negative index is out of range too: as unsigned it is huge.
        if (static_cast<uint64_t>(local[i]) >= local_blocks) return {BlockFault::local_range, i, local[i]};
        if (static_cast<uint64_t>(remote[i]) >= remote_blocks) return {BlockFault::remote_range, i, remote[i]};
        if (i > 0 && destination[i] <= destination[i - 1]) rising = false;
    }
    const uint64_t blocks = local_is_destination ? local_blocks : remote_blocks;
    if (!rising && blocks > kMostBits) {
        const BlockFault fault = find_repeat(destination, count);
        if (fault.kind != BlockFault::none) return fault;
    } else if (!rising) {
        // Kept by the thread, and cleared by walking the list again, so that a short list into a huge cache stays
        // cheap.
        static thread_local std::vector<uint64_t> seen;
        if (seen.size() < (blocks + 63) / 64) seen.resize((blocks + 63) / 64, 0);
        BlockFault fault;
        size_t marked = 0;
        for (; marked < count; ++marked) {
            const auto index = static_cast<uint64_t>(destination[marked]);
            const uint64_t mask = uint64_t{1} << (index % 64);
            if ((seen[index / 64] & mask) != 0) {
                fault = {BlockFault::duplicate, marked, destination[marked]};
                break;
            }
            seen[index / 64] |= mask;
        }
        for (size_t i = 0; i < marked; ++i) seen[static_cast<uint64_t>(destination[i]) / 64] = 0;
        if (fault.kind != BlockFault::none) return fault;
    }

    for (size_t i = 0; i < count; ++i) {
        const auto l = static_cast<uint64_t>(local[i]);
        const auto r = static_cast<uint64_t>(remote[i]);
        if (merge && !out.empty()) {
            BlockRun &last = out.back();
            if (last.local + last.count == l && last.remote + last.count == r) {
                ++last.count;
                continue;
            }
        }
        out.push_back({l, r, 1});
    }
    return {};
}

bool inside_blocks(const adt_geometry_t &g, uint64_t offset, uint64_t length) {
    const uint64_t extent = tensor_extent(g);
    if (length == 0 || length > extent || offset > extent - length) return false;
    if (contiguous(g)) return true;
    return length <= g.block_bytes && offset % g.block_stride <= g.block_bytes - length;
}

}  // namespace adt
