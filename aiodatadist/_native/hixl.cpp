// SPDX-License-Identifier: Apache-2.0
// hixl: one-sided reads and writes between NPUs, and between NPUs and hosts, by the HIXL of CANN. Each DataDist that
// uses it has an engine of HIXL and a thread of its own (HixlAgent); this file is the table of functions before them.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "hixl_agent.hpp"
#include "hixl_open.hpp"
#include "transports.hpp"

namespace adt {
namespace {

constexpr uint64_t kBatchBytes = 4 << 20;
constexpr uint32_t kBatchChunks = 128;       // HIXL hands so many pieces to a device at a time
constexpr uint32_t kQueueDepth = 6;          // batches an endpoint has posted: what bounds a cancel
constexpr uint32_t kMostMessages = 1 << 17;  // of one peer that wait for the thread

using Shared = std::shared_ptr<HixlEndpoint>;

class Hixl final : public HixlSink {
  public:
    explicit Hixl(const adt_open_params_t &params) : host_(*params.host) {}

    ~Hixl() {
        for (const auto &agent : agents_) agent->stop();
    }
    Hixl(const Hixl &) = delete;
    Hixl &operator=(const Hixl &) = delete;

    // Keeps an engine until its end, which is joined here.
    void adopt(std::shared_ptr<HixlAgent> agent) {
        std::vector<std::shared_ptr<HixlAgent>> over;
        {
            const std::lock_guard<std::mutex> lock(mu_);
            const auto running =
                std::stable_partition(agents_.begin(), agents_.end(), [](const auto &a) { return !a->over(); });
            over.assign(running, agents_.end());
            agents_.erase(running, agents_.end());
            agents_.push_back(std::move(agent));
        }
        for (const auto &ended : over) ended->stop();
    }

    adt_status_t fail(adt_status_t status, std::string text) {
        const std::lock_guard<std::mutex> lock(mu_);
        error_ = std::move(text);
        return status;
    }
    std::string error() {
        const std::lock_guard<std::mutex> lock(mu_);
        return error_;
    }

    adt_status_t dereg_mem(HixlAgent &agent, std::unique_ptr<HixlMemory> memory, void *token) {
        agent.dereg_mem(std::move(memory), [this, token] { host_.mem_gone(host_.ctx, token); });
        return ADT_PENDING;
    }

    void lost(const HixlEndpoint &endpoint, adt_status_t status, const char *reason) {
        host_.endpoint_lost(host_.ctx, endpoint.link, status, reason);
    }

    size_t poll(adt_completion_t *out, size_t capacity) {
        const std::lock_guard<std::mutex> lock(mu_);
        const size_t n = std::min(capacity, done_.size());
        std::copy_n(done_.begin(), n, out);
        done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(n));
        return n;
    }

    void told(const HixlEndpoint &endpoint, const HixlNews &news) override {
        if (!news.done.empty() || !news.reason.empty()) {
            const std::lock_guard<std::mutex> lock(mu_);
            done_.insert(done_.end(), news.done.begin(), news.done.end());
            if (!news.reason.empty()) error_ = news.reason;
        }
        void *const link = endpoint.link;
        for (const adt_message_t &message : news.messages) host_.tell(host_.ctx, link, &message);
        auto *const self = reinterpret_cast<adt_transport_h>(this);
        if (news.settled) host_.endpoint_settled(host_.ctx, link, self, news.status, news.reason.c_str());
        if (!news.done.empty()) host_.notify(host_.ctx, self);
        if (news.lost) host_.endpoint_lost(host_.ctx, link, news.status, news.reason.c_str());
        if (news.gone) host_.endpoint_gone(host_.ctx, link);
    }

  private:
    const adt_host_t host_;
    std::mutex mu_;  // a leaf
    std::vector<std::shared_ptr<HixlAgent>> agents_;
    std::vector<adt_completion_t> done_;
    std::string error_;
};

// A registered cache, and the engine that has it.
struct Registered {
    HixlAgent &agent;
    std::unique_ptr<HixlMemory> memory;
};

Hixl &hixl(adt_transport_h handle) {
    return *reinterpret_cast<Hixl *>(handle);
}
const Shared &endpoint(adt_endpoint_h handle) {
    return *reinterpret_cast<Shared *>(handle);
}

// Runs what may throw, and keeps the error's text.
template <typename Function>
adt_status_t guarded(adt_transport_h handle, Function &&function) {
    try {
        return function();
    } catch (const HixlError &why) {
        return hixl(handle).fail(why.status, why.text);
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

void probe(adt_probe_t *out) {
    out->usable = 0;
    std::snprintf(out->reason, sizeof(out->reason), "HIXL is asked by each DataDist that uses it, with its own Config");
}

adt_status_t open_hixl_transport(const adt_open_params_t *params, adt_transport_h *out) {
    try {
        *out = reinterpret_cast<adt_transport_h>(new Hixl(*params));
        return ADT_OK;
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

void close_hixl(adt_transport_h handle) {
    delete &hixl(handle);
}

adt_status_t reg_mem(adt_transport_h handle, const adt_memory_t *memory, adt_mem_h *out) {
    return guarded(handle, [&] {
        if (memory->hixl == nullptr) return hixl(handle).fail(ADT_ERR_UNSUPPORTED, "the DataDist does not use HIXL");
        HixlAgent &agent = *reinterpret_cast<HixlAgent *>(memory->hixl);
        auto made = std::make_unique<Registered>(Registered{agent, agent.reg_mem(*memory)});
        *out = reinterpret_cast<adt_mem_h>(made.release());
        return adt_status_t{ADT_OK};
    });
}

adt_status_t dereg_mem(adt_transport_h handle, adt_mem_h mem, void *token) {
    const std::unique_ptr<Registered> owned(reinterpret_cast<Registered *>(mem));
    return guarded(handle, [&] { return hixl(handle).dereg_mem(owned->agent, std::move(owned->memory), token); });
}

const HixlMemory *memory_of(adt_mem_h mem) {
    return mem == nullptr ? nullptr : reinterpret_cast<const Registered *>(mem)->memory.get();
}

adt_status_t export_key(adt_transport_h, adt_mem_h mem, void *buffer, size_t capacity, size_t *size) {
    try {
        const HixlMemory &memory = *reinterpret_cast<const Registered *>(mem)->memory;
        if (memory.refused.load(std::memory_order_acquire)) return ADT_ERR_UNSUPPORTED;
        const std::string key = hixl_key(memory);
        *size = key.size();
        if (capacity < key.size()) return ADT_ERR_AGAIN;
        std::memcpy(buffer, key.data(), key.size());
        return ADT_OK;
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

adt_status_t import_key(adt_transport_h handle, adt_endpoint_h, uint64_t cache_id, const adt_geometry_t *geometry,
                        const adt_key_t *key, adt_remote_h *out, adt_path_t *path) {
    return guarded(handle, [&] {
        *out = reinterpret_cast<adt_remote_h>(read_hixl_key(*key, cache_id, *geometry).release());
        *path = {"hixl", kBatchBytes, kBatchChunks, 0};
        return adt_status_t{ADT_OK};
    });
}

void release_key(adt_transport_h, adt_remote_h remote) {
    delete reinterpret_cast<HixlRemote *>(remote);
}

adt_status_t connect_hixl(adt_transport_h handle, const adt_connect_params_t *params, adt_endpoint_h *out) {
    return guarded(handle, [&] {
        if (params->hixl == nullptr) return hixl(handle).fail(ADT_ERR_UNSUPPORTED, "the DataDist does not use HIXL");
        auto made = std::make_unique<Shared>();
        *made = reinterpret_cast<HixlAgent *>(params->hixl)->connect(hixl(handle), params->link);
        *out = reinterpret_cast<adt_endpoint_h>(made.release());
        return adt_status_t{ADT_OK};
    });
}

adt_status_t disconnect_hixl(adt_transport_h handle, adt_endpoint_h named) {
    const std::unique_ptr<Shared> owned(reinterpret_cast<Shared *>(named));
    return guarded(handle, [&] {
        (*owned)->agent.later(*owned, [ep = *owned](HixlNews &news) { ep->close(news); });
        return adt_status_t{ADT_PENDING};
    });
}

void hear(adt_transport_h handle, adt_endpoint_h named, const adt_message_t *message) {
    if (message->kind > static_cast<uint8_t>(HixlSay::resume)) return;  // of verbs, on a link that has both
    const Shared &ep = endpoint(named);
    guarded(handle, [&] {
        if (ep->waiting.fetch_add(1) >= kMostMessages) {
            ep->waiting.fetch_sub(1);
            ep->agent.later(ep, [&transport = hixl(handle), ep](HixlNews &) {
                transport.lost(*ep, ADT_ERR_PROTOCOL, "the peer's endpoint of HIXL never stops talking");
            });
            return adt_status_t{ADT_OK};
        }
        ep->agent.later(ep, [ep, told = *message](HixlNews &news) {
            ep->waiting.fetch_sub(1);
            ep->hear(told, news);
        });
        return adt_status_t{ADT_OK};
    });
}

// The engine has checked these bounds; a mistake there must not end the connection for all others.
adt_status_t check(const adt_batch_t &batch) {
    const auto &remote = *reinterpret_cast<const HixlRemote *>(batch.remote);
    const uint32_t needed = batch.opcode == ADT_READ ? ADT_REMOTE_READ : ADT_REMOTE_WRITE;
    if ((remote.access & needed) == 0) return ADT_ERR_PERMISSION;
    if (batch.local_mem == nullptr || batch.endpoint == nullptr) return ADT_ERR_UNSUPPORTED;
    for (uint32_t i = 0; i < batch.count; ++i) {
        const adt_chunk_t &c = batch.chunks[i];
        if (c.remote_tensor >= remote.tensors.size() || c.length > remote.extent ||
            c.remote_offset > remote.extent - c.length) {
            return ADT_ERR_BOUNDS;
        }
    }
    return ADT_OK;
}

adt_status_t post(adt_transport_h handle, adt_batch_t *const *batches, size_t count, size_t *posted) {
    *posted = 0;
    return guarded(handle, [&] {
        for (; *posted < count; ++*posted) {
            adt_batch_t *const batch = batches[*posted];
            if (const adt_status_t status = check(*batch); status != ADT_OK) return status;
            const Shared &ep = endpoint(batch->endpoint);
            ep->agent.later(ep, [ep, batch](HixlNews &news) { ep->post(batch, *memory_of(batch->local_mem), news); });
        }
        return adt_status_t{ADT_OK};
    });
}

size_t poll_hixl(adt_transport_h handle, adt_completion_t *out, size_t capacity) {
    return hixl(handle).poll(out, capacity);
}

adt_status_t cancel(adt_transport_h handle, adt_endpoint_h named, uint64_t op) {
    const Shared &ep = endpoint(named);
    return guarded(handle, [&] {
        ep->agent.later(ep, [ep, op](HixlNews &news) { ep->cancel(op, news); });
        return adt_status_t{ADT_OK};
    });
}

void last_error(adt_transport_h handle, char *buffer, size_t capacity) {
    try {
        std::snprintf(buffer, capacity, "%s", hixl(handle).error().c_str());
    } catch (...) {
        std::snprintf(buffer, capacity, "%s", "no memory");
    }
}

}  // namespace

void adopt_hixl(adt_transport_h transport, std::shared_ptr<HixlAgent> agent) {
    hixl(transport).adopt(std::move(agent));
}

std::shared_ptr<HixlAgent> open_hixl(const HixlSettings &settings, std::string &words) {
    try {
        auto made = std::make_shared<HixlAgent>(settings);
        words = made->words();
        return made;
    } catch (const HixlError &why) {
        words = why.text;
    } catch (const std::bad_alloc &) {
        words = "no memory";
    }
    return nullptr;
}

const adt_transport_ops_t kHixlOps = {
    ADT_ABI_VERSION,
    sizeof(adt_transport_ops_t),
    "hixl",
    ADT_TRANSPORT_PINS | ADT_TRANSPORT_SETTLES | ADT_TRANSPORT_DEVICE | ADT_TRANSPORT_PEER_TOUCHES,
    kQueueDepth,
    probe,
    open_hixl_transport,
    close_hixl,
    reg_mem,
    dereg_mem,
    export_key,
    import_key,
    release_key,
    adt_unsupported_import_local,
    connect_hixl,
    disconnect_hixl,
    hear,
    post,
    adt_unsupported_execute,
    poll_hixl,
    adt_no_event_fd,
    adt_always_armed,
    adt_no_loop_fd,
    adt_no_loop_progress,
    adt_no_take_over,
    cancel,
    adt_unsupported_revoke,
    last_error,
};

}  // namespace adt
