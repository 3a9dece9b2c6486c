// SPDX-License-Identifier: Apache-2.0
// Same-host transport. The initiator moves the bytes itself, between processes of one user that proved themselves:
// plain loads and stores where the peer's cache lies in a memfd that is mapped here, process_vm_readv/writev elsewhere.
// The owner takes no part and spends no CPU, and for the same reason cannot stop a copy: see
// ADT_TRANSPORT_PEER_TOUCHES.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "copy.hpp"
#include "counted.hpp"
#include "fd.hpp"
#include "geometry.hpp"
#include "shm_key.hpp"
#include "transports.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace adt {
namespace {

// A mapped batch takes 50 to 100 us, which bounds a cancel; process_vm wants a full iovec array a call.
constexpr uint64_t kMappedBatchBytes = 1 << 20;
constexpr uint64_t kProcessVmBatchBytes = 4 << 20;
constexpr uint32_t kBatchChunks = 1024;  // IOV_MAX
constexpr uint64_t kPopulateStep = 8 << 20;

class Mapping : Counted<Live::mapping> {
  public:
    Mapping(void *base, size_t bytes, bool writable) : base_(base), bytes_(bytes), writable_(writable) {}
    ~Mapping() { munmap(base_, bytes_); }
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;
    char *base() const { return static_cast<char *>(base_); }
    size_t bytes() const { return bytes_; }
    bool writable() const { return writable_; }

  private:
    void *base_;
    size_t bytes_;
    bool writable_;
};

struct Endpoint {
    pid_t pid = 0;
    Fd pidfd;
    uint64_t populate_left = 0;
    bool process_vm = false;
    std::mutex mu;
    std::unordered_map<uint64_t, std::weak_ptr<Mapping>> regions;
    std::atomic<bool> gone{false};

    // pids are reused: before each call on a pid its own process must still be running.
    bool alive() const {
        if (gone.load(std::memory_order_acquire)) return false;
        pollfd probe{pidfd.get(), POLLIN, 0};
        return ::poll(&probe, 1, 0) == 0;
    }
};

struct Remote {
    std::shared_ptr<Endpoint> endpoint;  // null: memory of this process
    std::shared_ptr<Mapping> mapping;
    std::vector<char *> tensors;  // mapped here, or, of an endpoint without a mapping, addresses over there
    adt_geometry_t geometry;
    uint64_t extent;
    uint32_t access;  // ADT_REMOTE_*
};

struct Memory {
    std::vector<char *> tensors;
    uint32_t access;
    uint64_t region_id;
    const char *region_base;
    uint64_t region_bytes;
};

class Shm {
  public:
    explicit Shm(const adt_open_params_t &params)
        : host_(*params.host),
          stepped_(params.threads == 0),
          pool_(params.threads, [this](adt_batch_t *batch) { run(batch); }) {}

    const adt_host_t host_;
    const bool stepped_;
    std::mutex mu_;
    std::vector<adt_completion_t> done_;
    std::string error_;

    adt_status_t fail(adt_status_t status, std::string text) {
        const std::lock_guard<std::mutex> lock(mu_);
        error_ = std::move(text);
        return status;
    }

    adt_status_t move(const adt_batch_t &batch, bool stream) {
        const auto &remote = *reinterpret_cast<const Remote *>(batch.remote);
        if ((remote.access & (batch.opcode == ADT_WRITE ? ADT_REMOTE_WRITE : ADT_REMOTE_READ)) == 0) {
            return ADT_ERR_PERMISSION;
        }
        // The engine has checked these bounds; a mistake there must not become a stray write.
        for (uint32_t i = 0; i < batch.count; ++i) {
            const adt_chunk_t &c = batch.chunks[i];
            if (c.remote_tensor >= remote.tensors.size() || c.length > remote.extent ||
                c.remote_offset > remote.extent - c.length) {
                return ADT_ERR_BOUNDS;
            }
        }
        const bool direct = remote.mapping || !remote.endpoint;
        return direct ? move_direct(batch, remote, stream) : move_process_vm(batch, remote);
    }

    static adt_status_t move_direct(const adt_batch_t &batch, const Remote &remote, bool stream) {
        const bool reading = batch.opcode == ADT_READ;
        const auto source = [&](const adt_chunk_t &c) {
            return reading ? remote.tensors[c.remote_tensor] + c.remote_offset : static_cast<char *>(c.local);
        };
        const CopyKernel copy = stream ? stream_copy() : nullptr;
        for (uint32_t i = 0; i < batch.count; ++i) {
            const adt_chunk_t &c = batch.chunks[i];
            char *there = remote.tensors[c.remote_tensor] + c.remote_offset;
            char *here = static_cast<char *>(c.local);
            if (copy == nullptr) {
                std::memcpy(reading ? here : there, reading ? there : here, c.length);
                continue;
            }
            if (i + 1 < batch.count) prefetch_block(source(batch.chunks[i + 1]), batch.chunks[i + 1].length);
            copy(reading ? here : there, reading ? there : here, c.length);
        }
        store_fence();
        return ADT_OK;
    }

    adt_status_t move_process_vm(const adt_batch_t &batch, const Remote &remote) {
        iovec here[kBatchChunks];
        iovec there[kBatchChunks];
        uint32_t at = 0;    // first chunk that is not complete
        uint64_t skip = 0;  // bytes of it that are done
        while (at < batch.count) {
            uint32_t n = 0;
            uint64_t want = 0;
            for (uint32_t i = at; i < batch.count && n < kBatchChunks; ++i, ++n) {
                const adt_chunk_t &c = batch.chunks[i];
                const uint64_t from = i == at ? skip : 0;
                here[n] = {static_cast<char *>(c.local) + from, c.length - from};
                there[n] = {remote.tensors[c.remote_tensor] + c.remote_offset + from, c.length - from};
                want += c.length - from;
            }
            if (!remote.endpoint->alive()) return ADT_ERR_PEER_LOST;
            const ssize_t moved = batch.opcode == ADT_READ
                                      ? process_vm_readv(remote.endpoint->pid, here, n, there, n, 0)
                                      : process_vm_writev(remote.endpoint->pid, here, n, there, n, 0);
            if (moved <= 0) {
                const int error = moved == 0 ? EFAULT : errno;
                fail(ADT_ERR_IO, std::string(batch.opcode == ADT_READ ? "process_vm_readv" : "process_vm_writev") +
                                     " on pid " + std::to_string(remote.endpoint->pid) + ": " + std::strerror(error));
                if (error == ESRCH || !remote.endpoint->alive()) return ADT_ERR_PEER_LOST;
                if (error == EPERM) return ADT_ERR_PERMISSION;
                return error == EFAULT ? ADT_ERR_NOT_MAPPED : ADT_ERR_IO;
            }
            // A short count stops at the piece that faulted; going on from there returns its errno.
            uint64_t left = static_cast<uint64_t>(moved);
            if (left == want) {
                at += n;
                skip = 0;
                continue;
            }
            while (left > 0) {
                const uint64_t piece = batch.chunks[at].length - skip;
                if (left < piece) {
                    skip += left;
                    break;
                }
                left -= piece;
                ++at;
                skip = 0;
            }
        }
        return ADT_OK;
    }

    void run(adt_batch_t *batch) {
        const adt_status_t status = move(*batch, true);
        {
            const std::lock_guard<std::mutex> lock(mu_);
            done_.push_back({batch, status, 0});
        }
        if (!stepped_) host_.notify(host_.ctx, reinterpret_cast<adt_transport_h>(this));
    }

    CopyPool pool_;  // last: its threads use everything above
};

Shm &shm(adt_transport_h handle) {
    return *reinterpret_cast<Shm *>(handle);
}
std::shared_ptr<Endpoint> &endpoint(adt_endpoint_h handle) {
    return *reinterpret_cast<std::shared_ptr<Endpoint> *>(handle);
}

void probe(adt_probe_t *out) {
    const int fd = memfd_create("aiodatadist-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        out->usable = 0;
        std::snprintf(out->reason, sizeof(out->reason), "memfd_create: %s", std::strerror(errno));
        return;
    }
    close(fd);
    out->usable = 1;
    std::snprintf(out->reason, sizeof(out->reason), "memfd, process_vm; copies with %s", stream_copy_name());
}

adt_status_t open_shm(const adt_open_params_t *params, adt_transport_h *out) {
    try {
        *out = reinterpret_cast<adt_transport_h>(new Shm(*params));
        return ADT_OK;
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

void close_shm(adt_transport_h handle) {
    delete &shm(handle);
}

adt_status_t reg_mem(adt_transport_h, const adt_memory_t *memory, adt_mem_h *out) {
    if (memory->placement != ADT_PLACEMENT_HOST) return ADT_ERR_UNSUPPORTED;
    try {
        auto m = std::make_unique<Memory>();
        for (uint32_t i = 0; i < memory->geometry.num_tensors; ++i) {
            m->tensors.push_back(static_cast<char *>(memory->tensors[i]));
        }
        m->access = memory->access;
        m->region_id = memory->region_id;
        m->region_base = static_cast<const char *>(memory->region_base);
        m->region_bytes = memory->region_bytes;
        *out = reinterpret_cast<adt_mem_h>(m.release());
        return ADT_OK;
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

adt_status_t dereg_mem(adt_transport_h, adt_mem_h mem, void *) {
    delete reinterpret_cast<Memory *>(mem);
    return ADT_OK;
}

adt_status_t export_key(adt_transport_h, adt_mem_h mem, void *buffer, size_t capacity, size_t *size) {
    const auto &m = *reinterpret_cast<const Memory *>(mem);
    *size = sizeof(ShmKeyHead) + m.tensors.size() * sizeof(uint64_t);
    if (capacity < *size) return ADT_ERR_AGAIN;
    const ShmKeyHead head{ShmKeyHead::kMagic, static_cast<uint32_t>(m.tensors.size()), m.access, 0, m.region_id,
                          m.region_bytes};
    char *at = static_cast<char *>(buffer);
    std::memcpy(at, &head, sizeof(head));
    at += sizeof(head);
    for (const char *tensor : m.tensors) {
        const uint64_t where = m.region_id != 0 ? static_cast<uint64_t>(tensor - m.region_base)
                                                : static_cast<uint64_t>(reinterpret_cast<uintptr_t>(tensor));
        std::memcpy(at, &where, sizeof(where));
        at += sizeof(where);
    }
    return ADT_OK;
}

adt_status_t map_region(Shm &self, Endpoint &ep, const ShmKeyHead &head, int fd, std::shared_ptr<Mapping> &out) {
    const std::lock_guard<std::mutex> lock(ep.mu);
    auto &slot = ep.regions[head.region_id];
    const bool writable = (head.access & ADT_REMOTE_WRITE) != 0;
    out = slot.lock();
    if (out && out->bytes() != head.region_bytes) {
        return self.fail(ADT_ERR_PROTOCOL, "two keys of one memfd differ in its size");
    }
    // One that was mapped for a read-only cache does not do for a writable one beside it in the same memfd.
    if (out && (out->writable() || !writable)) return ADT_OK;
    out.reset();
    if (fd < 0) return self.fail(ADT_ERR_INVALID, "the peer's memfd did not arrive");
    struct stat info{};
    if (fstat(fd, &info) != 0 || static_cast<uint64_t>(info.st_size) < head.region_bytes || head.region_bytes == 0) {
        return self.fail(ADT_ERR_PROTOCOL, "the peer's memfd is smaller than its key says");
    }
    // Unsealed, the peer could shrink it and every later copy here would die of SIGBUS.
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        return self.fail(ADT_ERR_PROTOCOL, "the peer's memfd is not sealed against shrinking");
    }
    void *base = mmap(nullptr, head.region_bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        return self.fail(ADT_ERR_NO_MEMORY, std::string("mmap of the peer's memfd: ") + std::strerror(errno));
    }
    madvise(base, head.region_bytes, MADV_DONTFORK);
    out = std::make_shared<Mapping>(base, head.region_bytes, writable);
    slot = out;
    // First touches would halve the speed of the first transfers: populate in steps while no copy waits.
    const uint64_t populate = std::min<uint64_t>(ep.populate_left, head.region_bytes);
    ep.populate_left -= populate;
    self.pool_.submit_background(
        [mapping = std::weak_ptr<Mapping>(out), at = uint64_t{0}, populate, writable]() mutable {
            const std::shared_ptr<Mapping> alive = mapping.lock();
            if (!alive || at >= populate) return false;
            const uint64_t step = std::min(kPopulateStep, populate - at);
            if (madvise(alive->base() + at, step, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) != 0)
                return false;
            at += step;
            return at < populate;
        });
    return ADT_OK;
}

adt_status_t import_key(adt_transport_h handle, adt_endpoint_h ep_handle, uint64_t, const adt_geometry_t *geometry,
                        const adt_key_t *key, adt_remote_h *out, adt_path_t *path) {
    Shm &self = shm(handle);
    try {
        ShmKeyHead head;
        if (key->size < sizeof(head)) return self.fail(ADT_ERR_PROTOCOL, "the shm key is too short");
        std::memcpy(&head, key->data, sizeof(head));
        if (head.magic != ShmKeyHead::kMagic || head.num_tensors != geometry->num_tensors ||
            key->size != sizeof(head) + head.num_tensors * sizeof(uint64_t)) {
            return self.fail(ADT_ERR_PROTOCOL, "the shm key does not fit its cache");
        }
        auto remote = std::make_unique<Remote>();
        remote->endpoint = endpoint(ep_handle);
        remote->geometry = *geometry;
        remote->extent = tensor_extent(*geometry);
        remote->access = head.access;
        if (head.region_id != 0) {
            const adt_status_t status = map_region(self, *remote->endpoint, head, key->fd, remote->mapping);
            if (status != ADT_OK) return status;
            *path = {"shm-mapped", kMappedBatchBytes, kBatchChunks, 1};
        } else if (remote->endpoint->process_vm) {
            *path = {"shm-process_vm", kProcessVmBatchBytes, kBatchChunks, 1};
        } else {
            return self.fail(ADT_ERR_UNSUPPORTED, "ordinary memory, and process_vm is not allowed on the peer");
        }
        const char *at = static_cast<const char *>(key->data) + sizeof(head);
        for (uint32_t i = 0; i < head.num_tensors; ++i, at += sizeof(uint64_t)) {
            uint64_t where = 0;
            std::memcpy(&where, at, sizeof(where));
            if (remote->mapping) {
                if (where > head.region_bytes || remote->extent > head.region_bytes - where) {
                    return self.fail(ADT_ERR_PROTOCOL, "a tensor lies outside the peer's memfd");
                }
                remote->tensors.push_back(remote->mapping->base() + where);
            } else {
                remote->tensors.push_back(reinterpret_cast<char *>(static_cast<uintptr_t>(where)));
            }
        }
        *out = reinterpret_cast<adt_remote_h>(remote.release());
        return ADT_OK;
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

void release_key(adt_transport_h, adt_remote_h remote) {
    delete reinterpret_cast<Remote *>(remote);
}

adt_status_t import_local(adt_transport_h, adt_mem_h mem, const adt_geometry_t *geometry, adt_remote_h *out,
                          adt_path_t *path) {
    try {
        auto remote = std::make_unique<Remote>();
        remote->tensors = reinterpret_cast<const Memory *>(mem)->tensors;
        remote->geometry = *geometry;
        remote->extent = tensor_extent(*geometry);
        remote->access = ADT_REMOTE_READ;  // whatever peers may do: this process reads its own memory
        *path = {"local", kMappedBatchBytes, kBatchChunks, 1};
        *out = reinterpret_cast<adt_remote_h>(remote.release());
        return ADT_OK;
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

adt_status_t connect_shm(adt_transport_h handle, const adt_connect_params_t *params, adt_endpoint_h *out) {
    if (params->peer_pid <= 0 || params->peer_pidfd < 0) {
        return shm(handle).fail(ADT_ERR_UNSUPPORTED, "the peer is not proved to be on this host");
    }
    try {
        auto ep = std::make_shared<Endpoint>();
        ep->pid = params->peer_pid;
        ep->pidfd = Fd(fcntl(params->peer_pidfd, F_DUPFD_CLOEXEC, 0));
        if (!ep->pidfd) return shm(handle).fail(ADT_ERR_NO_MEMORY, std::string("dup: ") + std::strerror(errno));
        ep->populate_left = params->populate_bytes;
        ep->process_vm = params->process_vm != 0;
        *out = reinterpret_cast<adt_endpoint_h>(new std::shared_ptr<Endpoint>(std::move(ep)));
        return ADT_OK;
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

adt_status_t disconnect_shm(adt_transport_h, adt_endpoint_h handle) {
    endpoint(handle)->gone.store(true, std::memory_order_release);
    delete &endpoint(handle);
    return ADT_OK;
}

adt_status_t post(adt_transport_h handle, adt_batch_t *const *batches, size_t count, size_t *posted) {
    shm(handle).pool_.submit(batches, count);
    *posted = count;
    return ADT_OK;
}

adt_status_t execute(adt_transport_h handle, const adt_batch_t *batch) {
    return shm(handle).move(*batch, false);
}

size_t poll_shm(adt_transport_h handle, adt_completion_t *out, size_t capacity) {
    Shm &self = shm(handle);
    if (self.stepped_) {
        while (self.pool_.run_one()) {
        }
    }
    const std::lock_guard<std::mutex> lock(self.mu_);
    const size_t n = std::min(capacity, self.done_.size());
    std::copy_n(self.done_.begin(), n, out);
    self.done_.erase(self.done_.begin(), self.done_.begin() + static_cast<std::ptrdiff_t>(n));
    return n;
}

void last_error(adt_transport_h handle, char *buffer, size_t capacity) {
    Shm &self = shm(handle);
    const std::lock_guard<std::mutex> lock(self.mu_);
    std::snprintf(buffer, capacity, "%s", self.error_.c_str());
}

}  // namespace

const adt_transport_ops_t kShmOps = {
    ADT_ABI_VERSION,
    sizeof(adt_transport_ops_t),
    "shm",
    ADT_TRANSPORT_SHARED_QUEUE | ADT_TRANSPORT_PEER_TOUCHES,
    4,  // two threads, each with the next batch waiting: enough to stay busy, few enough to rotate and to cancel
    probe,
    open_shm,
    close_shm,
    reg_mem,
    dereg_mem,
    export_key,
    import_key,
    release_key,
    import_local,
    connect_shm,
    disconnect_shm,
    adt_no_hear,
    post,
    execute,
    poll_shm,
    adt_no_event_fd,
    adt_always_armed,
    adt_no_loop_fd,
    adt_no_loop_progress,
    adt_no_take_over,
    adt_unsupported_cancel,
    adt_unsupported_revoke,
    last_error,
};

}  // namespace adt
