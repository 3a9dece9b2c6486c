// SPDX-License-Identifier: Apache-2.0
#ifdef AIODATADIST_VERBS
#include "verbs_memory.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace adt {
namespace {

// Followed by num_tensors u64 and num_pieces VerbsRemote::Piece.
struct KeyHead {
    static constexpr uint32_t kMagic = 0x31425641;  // "AVB1"
    uint32_t magic;
    uint32_t num_tensors;
    uint32_t num_pieces;
    uint32_t access;
};

std::string limit_words(rlim_t value) {
    return value == RLIM_INFINITY ? "unlimited" : std::to_string(value) + " bytes";
}

[[noreturn]] void fail_registration(int code, uint64_t bytes, const std::string &device) {
    const VerbsStats &stats = verbs_stats();
    std::string text = "cannot register " + std::to_string(bytes) + " bytes with " + device + ": " + errno_text(code) +
                       "; " + std::to_string(stats.registered_bytes.load()) + " bytes in " +
                       std::to_string(stats.registrations.load()) + " registrations are pinned already";
    rlimit limit{};
    if ((code == ENOMEM || code == EPERM || code == EAGAIN) && getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
        text += "; RLIMIT_MEMLOCK is " + limit_words(limit.rlim_cur) + " (hard limit " + limit_words(limit.rlim_max) +
                "): raise it by ulimit -l unlimited, LimitMEMLOCK=infinity (systemd) or --ulimit memlock=-1 (docker)";
    }
    throw VerbsError{code == ENOMEM ? ADT_ERR_NO_MEMORY : code == EFAULT ? ADT_ERR_NOT_MAPPED : ADT_ERR_IO, text};
}

}  // namespace

Registration::Registration(VerbsDevice &device, char *base, uint64_t bytes, uint32_t access)
    : device_(device), base_(base), bytes_(bytes) {
    int rights = 0;
    if ((access & ADT_REMOTE_READ) != 0) rights |= IBV_ACCESS_REMOTE_READ;
    if ((access & ADT_REMOTE_WRITE) != 0) rights |= IBV_ACCESS_REMOTE_WRITE;
    mr_ = device.lib.reg_mr(device.pd, base, bytes, rights | IBV_ACCESS_LOCAL_WRITE);
    if (mr_ == nullptr && (access & ADT_REMOTE_WRITE) == 0 && (errno == EFAULT || errno == EPERM || errno == EACCES)) {
        mr_ = device.lib.reg_mr(device.pd, base, bytes, rights);  // memory that may only be read
    }
    if (mr_ == nullptr) fail_registration(errno, bytes, device.name);
    VerbsStats &stats = verbs_stats();
    stats.registrations.fetch_add(1, std::memory_order_relaxed);
    stats.registrations_made.fetch_add(1, std::memory_order_relaxed);
    stats.registered_bytes.fetch_add(bytes, std::memory_order_relaxed);
}

Registration::~Registration() {
    std::string why;
    end(why);
}

bool Registration::end(std::string &why) {
    if (mr_ == nullptr) return true;
    std::atomic<uint32_t> &faults = verbs_limits().stuck_registrations;
    const bool fault = faults.load(std::memory_order_relaxed) > 0;
    if (fault) faults.fetch_sub(1, std::memory_order_relaxed);
    const int code = fault ? EBUSY : device_.lib.dereg_mr(mr_);
    // A device that was taken away has let go of everything.
    if (code != 0 && code != EIO && code != ENODEV) {
        why = "ibv_dereg_mr of " + std::to_string(bytes_) + " bytes on " + device_.name + ": " + errno_text(code);
        return false;
    }
    mr_ = nullptr;
    verbs_stats().registrations.fetch_sub(1, std::memory_order_relaxed);
    verbs_stats().registered_bytes.fetch_sub(bytes_, std::memory_order_relaxed);
    return true;
}

std::shared_ptr<Registration> RegisteredDevice::take(char *base, uint64_t bytes, uint32_t access) {
    const std::tuple<char *, uint64_t, uint32_t> key{base, bytes, access};
    const auto share = [&]() -> std::shared_ptr<Registration> {
        const auto found = entries_.find(key);
        if (found == entries_.end()) return nullptr;
        ++found->second.users;
        verbs_stats().registrations_shared.fetch_add(1, std::memory_order_relaxed);
        return found->second.registration;
    };
    {
        const std::lock_guard<std::mutex> lock(mu_);
        if (auto shared = share()) return shared;
    }
    // Without the lock: others must not wait for this one's pages.
    auto made = std::make_shared<Registration>(device, base, bytes, access);
    const std::lock_guard<std::mutex> lock(mu_);
    if (auto shared = share()) return shared;
    entries_.emplace(key, Entry{made, 1});
    return made;
}

void RegisteredDevice::give(const std::shared_ptr<Registration> &registration, uint32_t access) {
    const std::lock_guard<std::mutex> lock(mu_);
    const auto found = entries_.find({registration->base(), registration->bytes(), access});
    if (found == entries_.end() || found->second.registration != registration || --found->second.users > 0) return;
    entries_.erase(found);
}

const Registration *VerbsMemory::find(const char *at) const {
    const auto after = std::upper_bound(pieces.begin(), pieces.end(), at,
                                        [](const char *a, const auto &piece) { return a < piece->base(); });
    if (after == pieces.begin()) return nullptr;
    const Registration &piece = **std::prev(after);
    return at < piece.base() + piece.bytes() ? &piece : nullptr;
}

bool VerbsMemory::let_go(std::string &why) {
    while (!pieces.empty()) {
        // One that others share is theirs to end.
        if (pieces.back().use_count() == 1 && !pieces.back()->end(why)) return false;
        pieces.pop_back();
    }
    return true;
}

std::unique_ptr<VerbsMemory> register_memory(const std::shared_ptr<RegisteredDevice> &device,
                                             const adt_memory_t &memory) {
    auto made = std::make_unique<VerbsMemory>();
    made->device = device;
    made->extent = tensor_extent(memory.geometry);
    made->access = memory.access;
    std::vector<std::pair<char *, char *>> ranges;
    for (uint32_t i = 0; i < memory.geometry.num_tensors; ++i) {
        made->tensors.push_back(static_cast<char *>(memory.tensors[i]));
        ranges.emplace_back(made->tensors.back(), made->tensors.back() + made->extent);
    }
    std::sort(ranges.begin(), ranges.end());
    // Tensors that overlap or touch are one range. Library memory is the cache's own, with less than a page between two
    // tensors.
    constexpr std::ptrdiff_t kGap = 4096;
    std::vector<std::pair<char *, char *>> merged;
    for (const auto &range : ranges) {
        const std::ptrdiff_t gap = memory.region_id != 0 ? kGap : 0;
        if (!merged.empty() && range.first - merged.back().second <= gap) {
            merged.back().second = std::max(merged.back().second, range.second);
        } else {
            merged.push_back(range);
        }
    }
    const uint64_t most = device->device.max_registration();
    try {
        for (const auto &[first, last] : merged) {
            for (char *at = first; at < last;) {
                // Up to a page boundary, so that no page is pinned twice.
                const auto past = reinterpret_cast<uintptr_t>(at) % 4096;
                const uint64_t step =
                    std::min<uint64_t>(static_cast<uint64_t>(last - at), most - (most > past ? past : 0));
                made->pieces.push_back(device->take(at, step, memory.access));
                at += step;
            }
        }
    } catch (...) {
        for (const auto &piece : made->pieces) device->give(piece, memory.access);
        throw;
    }
    return made;
}

const VerbsRemote::Piece *VerbsRemote::find(uint64_t address) const {
    const auto after = std::upper_bound(pieces.begin(), pieces.end(), address,
                                        [](uint64_t a, const Piece &piece) { return a < piece.base; });
    if (after == pieces.begin()) return nullptr;
    const Piece &piece = *std::prev(after);
    return address - piece.base < piece.bytes ? &piece : nullptr;
}

std::string verbs_key(const VerbsMemory &memory) {
    const KeyHead head{KeyHead::kMagic, static_cast<uint32_t>(memory.tensors.size()),
                       static_cast<uint32_t>(memory.pieces.size()), memory.access};
    std::string key(reinterpret_cast<const char *>(&head), sizeof(head));
    for (const char *tensor : memory.tensors) {
        const auto address = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(tensor));
        key.append(reinterpret_cast<const char *>(&address), sizeof(address));
    }
    for (const auto &piece : memory.pieces) {
        const VerbsRemote::Piece told{static_cast<uint64_t>(reinterpret_cast<uintptr_t>(piece->base())), piece->bytes(),
                                      piece->mr().rkey, 0};
        key.append(reinterpret_cast<const char *>(&told), sizeof(told));
    }
    return key;
}

std::unique_ptr<VerbsRemote> read_verbs_key(const adt_key_t &key, uint64_t cache, const adt_geometry_t &geometry) {
    const auto wrong = [](const char *text) { return VerbsError{ADT_ERR_PROTOCOL, text}; };
    KeyHead head;
    if (key.size < sizeof(head)) throw wrong("the verbs key is too short");
    std::memcpy(&head, key.data, sizeof(head));
    const size_t pieces = size_t{head.num_pieces} * sizeof(VerbsRemote::Piece);
    if (head.magic != KeyHead::kMagic || head.num_tensors != geometry.num_tensors ||
        key.size != sizeof(head) + size_t{head.num_tensors} * sizeof(uint64_t) + pieces) {
        throw wrong("the verbs key does not fit its cache");
    }
    auto remote = std::make_unique<VerbsRemote>();
    remote->cache = cache;
    remote->access = head.access;
    remote->extent = tensor_extent(geometry);
    remote->tensors.resize(head.num_tensors);
    remote->pieces.resize(head.num_pieces);
    const char *at = static_cast<const char *>(key.data) + sizeof(head);
    std::memcpy(remote->tensors.data(), at, head.num_tensors * sizeof(uint64_t));
    if (pieces > 0) std::memcpy(remote->pieces.data(), at + head.num_tensors * sizeof(uint64_t), pieces);
    uint64_t end = 0;
    for (const VerbsRemote::Piece &piece : remote->pieces) {
        if (piece.base < end || piece.bytes == 0 || piece.bytes > UINT64_MAX - piece.base) {
            throw wrong("the pieces of the verbs key overlap");
        }
        end = piece.base + piece.bytes;
    }
    for (const uint64_t tensor : remote->tensors) {
        if (remote->extent > UINT64_MAX - tensor) throw wrong("a tensor of the verbs key ends behind all memory");
        for (uint64_t covered = tensor; covered < tensor + remote->extent;) {
            const VerbsRemote::Piece *const piece = remote->find(covered);
            if (piece == nullptr) throw wrong("a tensor of the verbs key is not registered");
            covered = piece->base + piece->bytes;
        }
    }
    return remote;
}

}  // namespace adt
#endif
