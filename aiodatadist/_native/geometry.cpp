// SPDX-License-Identifier: Apache-2.0
#include "geometry.hpp"

#include <algorithm>
#include <functional>
#include <numeric>

namespace adt {

namespace {

// The peer names the number of its blocks: beyond this, one bit a block is more memory than anybody means to spend.
constexpr uint64_t kMostBits = uint64_t{1} << 26;

constexpr size_t kAhead = 40;  // runs that are fetched before they are written

// One bit a block. Kept by the thread, and cleared by walking the list again, so that a short list into a huge cache
// stays cheap.
class Marks {
  public:
    explicit Marks(uint64_t blocks) : blocks_(blocks), bits_(kept()) {
        if (bits_.size() < (blocks + 63) / 64) bits_.resize((blocks + 63) / 64, 0);
    }
    bool has(int64_t block) const {
        const auto index = static_cast<uint64_t>(block);
        return (bits_[index / 64] >> (index % 64) & 1) != 0;
    }
    void set(int64_t block) {
        const auto index = static_cast<uint64_t>(block);
        bits_[index / 64] |= uint64_t{1} << (index % 64);
    }
    // Marks blocks up to the first that is marked already, and returns the place of that.
    size_t set_new(const int64_t *list, size_t count) {
        uint64_t *const bits = bits_.data();
        for (size_t i = 0; i < count; ++i) {
            const auto index = static_cast<uint64_t>(list[i]);
            const uint64_t bit = uint64_t{1} << (index % 64);
            uint64_t &word = bits[index / 64];
            if ((word & bit) != 0) return i;
            word |= bit;
        }
        return count;
    }
    uint64_t *words() { return bits_.data(); }
    void clear(const int64_t *list, size_t count) {
        const size_t words = (blocks_ + 63) / 64;
        if (words <= count) {
            std::fill_n(bits_.begin(), words, uint64_t{0});
            return;
        }
        for (size_t i = 0; i < count; ++i) bits_[static_cast<uint64_t>(list[i]) / 64] = 0;
    }

  private:
    static std::vector<uint64_t> &kept() {
        static thread_local std::vector<uint64_t> bits;
        return bits;
    }
    const uint64_t blocks_;
    std::vector<uint64_t> &bits_;
};

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

// A list in rising order repeats nothing.
bool rises(const int64_t *list, size_t count) {
    return std::adjacent_find(list, list + count, std::greater_equal<>()) == list + count;
}

// A slot must lie in its cache, and hold what is to be moved.
bool slot_fits(const Selection &side, const adt_geometry_t &g, uint64_t size) {
    return size <= g.block_bytes && side.offset <= g.block_bytes - size;
}

// A negative index is outside, too: as unsigned it is huge.
bool any_outside(const int64_t *list, size_t count, uint64_t blocks) {
    uint64_t outside = 0;
    for (size_t i = 0; i < count; ++i) outside |= static_cast<uint64_t>(list[i]) >= blocks ? 1 : 0;
    return outside != 0;
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
        const uint64_t pieces = size / piece + (size % piece != 0 ? 1 : 0);
        if (count != pieces) return {BlockFault::count, count, static_cast<int64_t>(pieces)};
    }
    // Looked for without a branch for each block; which one it is, is of interest only where there is one.
    if ((!local.is_slot && any_outside(local.blocks, count, local_blocks)) ||
        (!remote.is_slot && any_outside(remote.blocks, count, remote_blocks))) {
        for (size_t i = 0; i < count; ++i) {
            if (!local.is_slot && static_cast<uint64_t>(local.blocks[i]) >= local_blocks) {
                return {BlockFault::local_range, i, local.blocks[i]};
            }
            if (!remote.is_slot && static_cast<uint64_t>(remote.blocks[i]) >= remote_blocks) {
                return {BlockFault::remote_range, i, remote.blocks[i]};
            }
        }
    }
    // One bit a destination block finds repeats in O(blocks).
    const Selection &into = local_is_destination ? local : remote;
    const int64_t *destination = into.blocks;
    if (into.is_slot || rises(destination, count)) return {};
    const uint64_t blocks = local_is_destination ? local_blocks : remote_blocks;
    if (blocks > kMostBits) return find_repeat(destination, count);
    Marks seen(blocks);
    const size_t marked = seen.set_new(destination, count);
    seen.clear(destination, marked);
    return marked == count ? BlockFault{} : BlockFault{BlockFault::duplicate, marked, destination[marked]};
}

// Finds what a copy within one cache reads and writes. All indices lie in the cache.
BlockFault find_reuse(const Selection &from, const Selection &into, size_t count, uint64_t size, uint64_t blocks) {
    if (from.is_slot && into.is_slot) {
        const uint64_t distance = from.offset > into.offset ? from.offset - into.offset : into.offset - from.offset;
        if (from.slot != into.slot || distance >= size) return {};
        return {BlockFault::reused, 0, static_cast<int64_t>(into.slot)};
    }
    if (from.is_slot || into.is_slot) {
        const int64_t *list = from.is_slot ? into.blocks : from.blocks;
        const auto slot = static_cast<int64_t>(from.is_slot ? from.slot : into.slot);
        const auto at = static_cast<size_t>(std::find(list, list + count, slot) - list);
        return at == count ? BlockFault{} : BlockFault{BlockFault::reused, at, slot};
    }
    size_t at = 0;
    if (blocks > kMostBits) {
        std::vector<int64_t> sorted(into.blocks, into.blocks + count);
        std::sort(sorted.begin(), sorted.end());
        while (at < count && !std::binary_search(sorted.begin(), sorted.end(), from.blocks[at])) ++at;
    } else {
        Marks written(blocks);
        for (size_t i = 0; i < count; ++i) written.set(into.blocks[i]);
        while (at < count && !written.has(from.blocks[at])) ++at;
        written.clear(into.blocks, count);
    }
    return at == count ? BlockFault{} : BlockFault{BlockFault::reused, at, from.blocks[at]};
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

uint64_t bytes_a_tensor(const Selection &local, const Selection &remote, size_t count, uint64_t size,
                        const adt_geometry_t &local_geometry, const adt_geometry_t &remote_geometry) {
    if (!local.is_slot && !remote.is_slot) return count * local_geometry.block_bytes;
    if (size != kWhole) return size;
    const auto holds = [](const Selection &side, const adt_geometry_t &g) {
        return g.block_bytes - std::min(side.offset, g.block_bytes);
    };
    if (!remote.is_slot) {
        const uint64_t all = holds(local, local_geometry);
        return count > all / remote_geometry.block_bytes ? all : count * remote_geometry.block_bytes;
    }
    const uint64_t all = holds(remote, remote_geometry);
    if (local.is_slot) return std::min(all, holds(local, local_geometry));
    return count > all / local_geometry.block_bytes ? all : count * local_geometry.block_bytes;
}

namespace {

// Makes runs of two lists of blocks, up to the first that lies outside or is marked already; returns the place of that.
// In one pass, because each takes as long as all checks together. `marks`, unless null, are those of `into`.
// Written by place: `out` keeps what it had for this, and appending costs as much again.
size_t pair_blocks(const int64_t *local, const int64_t *remote, size_t count, const adt_geometry_t &local_geometry,
                   const adt_geometry_t &remote_geometry, const int64_t *into, uint64_t *marks, std::vector<Run> &out) {
    const bool merge = contiguous(local_geometry) && contiguous(remote_geometry);
    const uint64_t local_blocks = local_geometry.num_blocks;
    const uint64_t remote_blocks = remote_geometry.num_blocks;
    const uint64_t local_stride = local_geometry.block_stride;
    const uint64_t remote_stride = remote_geometry.block_stride;
    const uint64_t bytes = local_geometry.block_bytes;
    if (out.size() < count) out.resize(count);
    Run *const runs = out.data();
    Run *run = runs;
    uint64_t local_end = UINT64_MAX;  // of the run before: no block begins there yet
    uint64_t remote_end = UINT64_MAX;
    size_t i = 0;
    for (; i < count; ++i) {
        const auto l = static_cast<uint64_t>(local[i]);  // a negative index is outside, too: as unsigned it is huge
        const auto r = static_cast<uint64_t>(remote[i]);
        if (l >= local_blocks || r >= remote_blocks) break;
        if (marks != nullptr) {
            const auto index = static_cast<uint64_t>(into[i]);
            const uint64_t bit = uint64_t{1} << (index % 64);
            const uint64_t word = marks[index / 64];
            if ((word & bit) != 0) break;
            marks[index / 64] = word | bit;
        }
        // What is written lies in another core's cache, which read the runs of an earlier transfer.
        if (i + kAhead < count) __builtin_prefetch(run + kAhead, 1);
        const uint64_t here = l * local_stride;
        const uint64_t there = r * remote_stride;
        if (merge && here == local_end && there == remote_end) {
            run[-1].length += bytes;
        } else {
            *run++ = {here, there, bytes};
        }
        local_end = here + bytes;
        remote_end = there + bytes;
    }
    out.resize(static_cast<size_t>(run - runs));
    return i;
}

// Checks two lists of blocks and makes their runs. False: `check` finds out what is wrong, or that nothing is.
bool checked_pair(const Selection &local, const Selection &remote, size_t count, const adt_geometry_t &local_geometry,
                  const adt_geometry_t &remote_geometry, bool local_is_destination, std::vector<Run> &out) {
    const int64_t *const into = local_is_destination ? local.blocks : remote.blocks;
    const uint64_t blocks = local_is_destination ? local_geometry.num_blocks : remote_geometry.num_blocks;
    const auto pair = [&](uint64_t *marks) {
        return pair_blocks(local.blocks, remote.blocks, count, local_geometry, remote_geometry, into, marks, out);
    };
    if (rises(into, count)) return pair(nullptr) == count;
    if (blocks > kMostBits) return false;
    Marks seen(blocks);
    const size_t marked = pair(seen.words());
    seen.clear(into, marked);
    return marked == count;
}

}  // namespace

BlockFault make_runs(const Selection &local, const Selection &remote, size_t count, uint64_t bytes,
                     const adt_geometry_t &local_geometry, const adt_geometry_t &remote_geometry,
                     bool local_is_destination, bool same_cache, std::vector<Run> &out) {
    const bool lists = !local.is_slot && !remote.is_slot;
    if (lists && !same_cache &&
        checked_pair(local, remote, count, local_geometry, remote_geometry, local_is_destination, out)) {
        return {};
    }
    BlockFault fault = check(local, remote, count, bytes, local_geometry, remote_geometry, local_is_destination);
    if (fault.kind == BlockFault::none && same_cache) {
        fault = find_reuse(local_is_destination ? remote : local, local_is_destination ? local : remote, count, bytes,
                           local_geometry.num_blocks);
    }
    if (fault.kind != BlockFault::none) return fault;
    if (lists) {
        pair_blocks(local.blocks, remote.blocks, count, local_geometry, remote_geometry, nullptr, nullptr, out);
        return {};
    }
    // A slot is one piece of memory; blocks are where none of the lists' sides has gaps.
    const bool merge = (local.is_slot || contiguous(local_geometry)) && (remote.is_slot || contiguous(remote_geometry));
    out.clear();
    if (local.is_slot && remote.is_slot) {
        if (bytes > 0) {
            out.push_back({local.slot * local_geometry.block_stride + local.offset,
                           remote.slot * remote_geometry.block_stride + remote.offset, bytes});
        }
        return {};
    }
    const uint64_t piece = local.is_slot ? remote_geometry.block_bytes : local_geometry.block_bytes;
    const auto offset = [piece](const Selection &side, const adt_geometry_t &g, size_t i) {
        return side.is_slot ? side.slot * g.block_stride + side.offset + i * piece
                            : static_cast<uint64_t>(side.blocks[i]) * g.block_stride;
    };
    out.reserve(count);
    uint64_t done = 0;
    for (size_t i = 0; i < count; ++i) {
        const uint64_t length = std::min(piece, bytes - done);
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
