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

// A slot must lie in its cache, and hold what is to be moved.
bool slot_fits(const Selection &side, const adt_geometry_t &g, uint64_t size) {
    return size <= g.block_bytes && side.offset <= g.block_bytes - size;
}

BlockFault check(const Selection &local, const Selection &remote, size_t count, uint64_t size,
                 const adt_geometry_t &local_geometry, const adt_geometry_t &remote_geometry,
                 bool local_is_destination) {
    const uint64_t local_blocks = local_geometry.num_blocks;
    const uint64_t remote_blocks = remote_geometry.num_blocks;
    if (local.is_slot) {
        if (local.slot >= local_blocks) return {BlockFault::local_range, 0, static_cast<int64_t>(local.slot)};
        if (!slot_fits(local, local_geometry, size)) return {BlockFault::size, 0, static_cast<int64_t>(size)};
    }
    if (remote.is_slot) {
        if (remote.slot >= remote_blocks) return {BlockFault::remote_range, 0, static_cast<int64_t>(remote.slot)};
        if (!slot_fits(remote, remote_geometry, size)) return {BlockFault::size, 0, static_cast<int64_t>(size)};
    }
    if (local.is_slot && remote.is_slot) return {};
    if (local.is_slot || remote.is_slot) {
        const uint64_t piece = local.is_slot ? remote_geometry.block_bytes : local_geometry.block_bytes;
        if (count != size / piece + (size % piece != 0 ? 1 : 0)) {
            return {BlockFault::size, 0, static_cast<int64_t>(size)};
        }
    }
    // One bit a destination block finds repeats in O(blocks); a list in rising order needs none of it.
    const Selection &into = local_is_destination ? local : remote;
    const int64_t *destination = into.blocks;
    bool rising = true;
    for (size_t i = 0; i < count; ++i) {
        // A negative index is out of range too: as unsigned it is huge.
        if (!local.is_slot && static_cast<uint64_t>(local.blocks[i]) >= local_blocks) {
            return {BlockFault::local_range, i, local.blocks[i]};
        }
        if (!remote.is_slot && static_cast<uint64_t>(remote.blocks[i]) >= remote_blocks) {
            return {BlockFault::remote_range, i, remote.blocks[i]};
        }
        if (!into.is_slot && i > 0 && destination[i] <= destination[i - 1]) rising = false;
    }
    const uint64_t blocks = local_is_destination ? local_blocks : remote_blocks;
    if (rising) return {};
    if (blocks > kMostBits) return find_repeat(destination, count);
    // Kept by the thread, and cleared by walking the list again, so that a short list into a huge cache stays cheap.
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
    return fault;
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

BlockFault make_runs(const Selection &local, const Selection &remote, size_t count, uint64_t size,
                     const adt_geometry_t &local_geometry, const adt_geometry_t &remote_geometry,
                     bool local_is_destination, std::vector<Run> &out) {
    out.clear();
    const BlockFault fault = check(local, remote, count, size, local_geometry, remote_geometry, local_is_destination);
    if (fault.kind != BlockFault::none) return fault;
    if (local.is_slot && remote.is_slot) {
        if (size > 0) {
            out.push_back({local.slot * local_geometry.block_stride + local.offset,
                           remote.slot * remote_geometry.block_stride + remote.offset, size});
        }
        return {};
    }
    // A slot is one piece of memory; blocks are where none of the lists' sides has gaps.
    const bool merge = (local.is_slot || contiguous(local_geometry)) && (remote.is_slot || contiguous(remote_geometry));
    const uint64_t piece = local.is_slot ? remote_geometry.block_bytes : local_geometry.block_bytes;
    const uint64_t total = local.is_slot || remote.is_slot ? size : count * piece;
    const auto offset = [piece](const Selection &side, const adt_geometry_t &g, size_t i) {
        return side.is_slot ? side.slot * g.block_stride + side.offset + i * piece
                            : static_cast<uint64_t>(side.blocks[i]) * g.block_stride;
    };
    uint64_t done = 0;
    for (size_t i = 0; i < count; ++i) {
        const uint64_t length = std::min(piece, total - done);
        const uint64_t l = offset(local, local_geometry, i);
        const uint64_t r = offset(remote, remote_geometry, i);
        done += length;
        if (merge && !out.empty()) {
            Run &last = out.back();
            if (last.local + last.length == l && last.remote + last.length == r) {
                last.length += length;
                continue;
            }
        }
        out.push_back({l, r, length});
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
