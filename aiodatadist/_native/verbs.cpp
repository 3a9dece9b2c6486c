// SPDX-License-Identifier: Apache-2.0
// verbs: one-sided reads and writes over RDMA. Completions turn the engine's event descriptor readable: an epoll set of
// all devices' completion channels. What takes long in the kernel (opening a device, connecting, flushing, taking
// registrations back) has a thread of its own, which exists once something needs it.
#ifdef AIODATADIST_VERBS
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

#include "fd.hpp"
#include "threads.hpp"
#include "transports.hpp"
#include "verbs_endpoint.hpp"

namespace adt {

std::string verbs_status_words(adt_status_t status) {
    if (status > ADT_ERR_WORK) return "posting failed";
    std::string why;
    const VerbsLibrary *const lib = VerbsLibrary::get(why);
    return lib == nullptr ? why : lib->wc_status_str(static_cast<ibv_wc_status>(ADT_ERR_WORK - status));
}

namespace {

constexpr uint64_t kBatchBytes = 1 << 20;
constexpr uint32_t kBatchChunks = 128;
constexpr uint32_t kQueueDepth = 6;    // batches an endpoint has posted: what bounds a cancel
constexpr size_t kMostMessages = 256;  // of one peer that wait for the thread
constexpr std::chrono::milliseconds kStuckPause{50};

using Shared = std::shared_ptr<VerbsEndpoint>;

class Verbs {
  public:
    explicit Verbs(const adt_open_params_t &params) : host_(*params.host), stepped_(params.threads == 0) {
        events_ = Fd(epoll_create1(EPOLL_CLOEXEC));
        if (!events_) throw std::system_error(errno, std::generic_category(), "epoll");
    }

    ~Verbs() {
        {
            const std::lock_guard<std::mutex> lock(tasks_mu_);
            stopping_ = true;
        }
        wake_.notify_all();
        if (thread_.joinable()) thread_.join();
        // Of caches that were never closed.
        for (VerbsMemory *memory : memories_) delete memory;
    }
    Verbs(const Verbs &) = delete;
    Verbs &operator=(const Verbs &) = delete;

    adt_status_t fail(adt_status_t status, std::string text) {
        const std::lock_guard<std::mutex> lock(mu_);
        error_ = std::move(text);
        return status;
    }
    std::string error() {
        const std::lock_guard<std::mutex> lock(mu_);
        return error_;
    }
    int event_fd() const { return events_.get(); }

    std::shared_ptr<RegisteredDevice> device(const std::string &name) {
        std::string why;
        const VerbsLibrary *const lib = VerbsLibrary::get(why);
        if (lib == nullptr) throw VerbsError{ADT_ERR_UNSUPPORTED, why};
        const std::lock_guard<std::mutex> lock(opening_mu_);
        std::shared_ptr<RegisteredDevice> &slot = devices_[name];
        if (slot) return slot;
        slot = std::make_shared<RegisteredDevice>(*lib, name);
        epoll_event interest{};
        interest.events = EPOLLIN;
        epoll_ctl(events_.get(), EPOLL_CTL_ADD, slot->device.channel->fd, &interest);
        const std::lock_guard<std::mutex> also(mu_);
        open_.push_back(slot.get());
        return slot;
    }

    adt_status_t reg_mem(const adt_memory_t &memory, adt_mem_h *out) {
        if (memory.placement != ADT_PLACEMENT_HOST) return fail(ADT_ERR_UNSUPPORTED, "verbs reaches host memory only");
        auto made = register_memory(device(split_place(memory.rdma->device).first), memory);
        const std::lock_guard<std::mutex> lock(mu_);
        memories_.insert(made.get());
        *out = reinterpret_cast<adt_mem_h>(made.release());
        return ADT_OK;
    }

    adt_status_t dereg_mem(VerbsMemory *memory, void *token) {
        {
            const std::lock_guard<std::mutex> lock(mu_);
            memories_.erase(memory);
        }
        for (const auto &piece : memory->pieces) memory->device->give(piece, memory->access);
        if (later([this, memory, token] { let_go(memory, token); })) return ADT_PENDING;
        delete memory;
        return ADT_OK;
    }

    adt_status_t connect(const adt_connect_params_t &params, adt_endpoint_h *out) {
        if (stepped_) return fail(ADT_ERR_UNSUPPORTED, "an engine in step mode has no RDMA");
        if (params.rdma == nullptr) return fail(ADT_ERR_UNSUPPORTED, "no RDMA device was chosen for this DataDist");
        auto handle = std::make_unique<Shared>();
        {
            const std::lock_guard<std::mutex> lock(mu_);
            *handle = std::make_shared<VerbsEndpoint>(next_id_++, params.link, *params.rdma, done_);
            endpoints_.emplace((*handle)->id, *handle);
        }
        const bool started = later([this, ep = *handle] {
            VerbsEndpoint::News news;
            try {
                const auto [name, port] = split_place(ep->device_name);
                ep->start(device(name), static_cast<uint8_t>(std::max(port, 1)), news);
            } catch (const VerbsError &why) {
                ep->fail(why.text, news);
            }
            deal(ep, news);
        });
        if (!started) {
            forget(**handle);
            return fail(ADT_ERR_NO_MEMORY, "no thread for RDMA can be started");
        }
        *out = reinterpret_cast<adt_endpoint_h>(handle.release());
        return ADT_OK;
    }

    adt_status_t disconnect(adt_endpoint_h handle) {
        const std::unique_ptr<Shared> owned(reinterpret_cast<Shared *>(handle));
        later([this, ep = *owned] { close(ep); });
        return ADT_PENDING;
    }

    void hear(const Shared &ep, const adt_message_t &message) {
        if (message.kind < static_cast<uint8_t>(VerbsSay::offer)) return;  // HIXL's, on a link that has both
        if (ep->waiting.fetch_add(1) >= kMostMessages) {
            ep->waiting.fetch_sub(1);
            later([this, ep] {
                host_.endpoint_lost(host_.ctx, ep->link, ADT_ERR_PROTOCOL, "the peer's endpoint never stops talking");
            });
            return;
        }
        later([this, ep, message] { take_up(ep, message); });
    }

    // Called with the engine's lock held, so what came of it is told by the thread.
    adt_status_t post(adt_batch_t *batch) {
        const Shared &ep = *reinterpret_cast<Shared *>(batch->endpoint);
        VerbsEndpoint::News news;
        const adt_status_t status = ep->post(batch, news);
        if (news.broken) later([this, ep] { rebuild(ep); });
        if (!news.error.empty()) fail(status, news.error);
        return status;
    }

    // By value, here and below: the host may end the endpoint within what it is told.
    void cancel(const Shared ep, uint64_t op) {
        VerbsEndpoint::News news;
        ep->cancel(op, news);
        deal(ep, news);
    }

    adt_status_t revoke(const Shared ep, uint64_t cache, uint32_t epoch) {
        VerbsEndpoint::News news;
        ep->revoke(cache, epoch, news);
        deal(ep, news);
        if (!news.stuck) return ADT_OK;
        again([this, ep] { rebuild(ep); });
        return ADT_ERR_AGAIN;
    }

    size_t poll(adt_completion_t *out, size_t capacity) {
        std::vector<Shared> hot;
        {
            const std::lock_guard<std::mutex> lock(mu_);
            for (RegisteredDevice *device : open_) {
                const VerbsLibrary &lib = device->device.lib;
                ibv_cq *cq = nullptr;
                void *context = nullptr;
                while (lib.get_cq_event(device->device.channel, &cq, &context) == 0) {
                    lib.ack_cq_events(cq, 1);
                    const auto found = endpoints_.find(static_cast<uint64_t>(reinterpret_cast<uintptr_t>(context)));
                    if (found != endpoints_.end()) hot_[found->first] = found->second;
                }
            }
            for (const auto &[id, ep] : hot_) hot.push_back(ep);
        }
        for (const Shared &ep : hot) {
            VerbsEndpoint::News news;
            ep->progress(news);
            deal(ep, news, false);
        }
        return done_.take(out, capacity);
    }

    // Completion queues of which an event was read give no other until they are armed again.
    bool arm() {
        std::map<uint64_t, Shared> hot;
        {
            const std::lock_guard<std::mutex> lock(mu_);
            hot.swap(hot_);
        }
        bool armed = true;
        for (const auto &[id, ep] : hot) {
            VerbsEndpoint::News news;
            if (!ep->arm(news)) armed = false;
            deal(ep, news, false);
        }
        return armed;
    }

  private:
    void forget(const VerbsEndpoint &ep) {
        const std::lock_guard<std::mutex> lock(mu_);
        endpoints_.erase(ep.id);
        hot_.erase(ep.id);
    }

    // Has the thread do something. False: there is no thread to be had.
    bool later(std::function<void()> task) {
        const std::lock_guard<std::mutex> lock(tasks_mu_);
        if (!thread_.joinable()) {
            try {
                thread_ = start_thread("adt-verbs", [this] { run(); });
            } catch (const std::system_error &) {
                return false;
            }
        }
        tasks_.push_back(std::move(task));
        wake_.notify_one();
        return true;
    }

    // Has the thread do something once more, after a pause.
    void again(std::function<void()> task) {
        const std::lock_guard<std::mutex> lock(tasks_mu_);
        stuck_.push_back(std::move(task));
        wake_.notify_one();
    }

    // What the thread does. A device that does not let go is asked again, in the place of a promise that it has.
    void rebuild(const Shared &ep) {
        VerbsEndpoint::News news;
        ep->rebuild(news);
        deal(ep, news);
        if (news.stuck) again([this, ep] { rebuild(ep); });
    }

    void take_up(const Shared &ep, const adt_message_t &message) {
        VerbsEndpoint::News news;
        ep->hear(message, news);
        deal(ep, news);
        if (news.stuck) {
            again([this, ep, message] { take_up(ep, message); });
        } else {
            ep->waiting.fetch_sub(1);
        }
    }

    void close(const Shared &ep) {
        VerbsEndpoint::News news;
        ep->close(news);
        deal(ep, news);
        if (news.stuck) {
            again([this, ep] { close(ep); });
            return;
        }
        forget(*ep);
        host_.endpoint_gone(host_.ctx, ep->link);
    }

    void let_go(VerbsMemory *memory, void *token) {
        std::string why;
        if (!memory->let_go(why)) {
            fail(ADT_ERR_BUSY, why);
            again([this, memory, token] { let_go(memory, token); });
            return;
        }
        delete memory;
        host_.mem_gone(host_.ctx, token);
    }

    void run() {
        std::unique_lock<std::mutex> lock(tasks_mu_);
        for (;;) {
            const auto due = [this] { return stopping_ || !tasks_.empty(); };
            wake_.wait(lock, [&] { return due() || !stuck_.empty(); });
            if (!wake_.wait_for(lock, kStuckPause, due)) tasks_.swap(stuck_);
            if (tasks_.empty()) return;
            {
                const std::function<void()> task = std::move(tasks_.front());
                tasks_.pop_front();
                lock.unlock();
                task();
            }
            lock.lock();
        }
    }

    // Tells the host what came of a call.
    void deal(const Shared &ep, const VerbsEndpoint::News &news, bool notify = true) {
        if (!news.error.empty()) fail(ADT_OK, news.error);
        // First: a loss is what all that was posted has to end with.
        if (news.lost) host_.endpoint_lost(host_.ctx, ep->link, news.lost->status, news.lost->reason.c_str());
        for (const adt_message_t &message : news.messages) host_.tell(host_.ctx, ep->link, &message);
        if (news.broken) later([this, ep] { rebuild(ep); });
        auto *const self = reinterpret_cast<adt_transport_h>(this);
        if (news.settled) {
            host_.endpoint_settled(host_.ctx, ep->link, self, news.settled->status, news.settled->reason.c_str());
        }
        if (!news.done || !notify) return;
        // The host polls here, and may take an event of some queue; the host's own thread, which would arm that queue
        // again, then hears nothing of it.
        do {
            host_.notify(host_.ctx, self);
        } while (!arm());
    }

    const adt_host_t host_;
    const bool stepped_;
    std::mutex opening_mu_;
    std::map<std::string, std::shared_ptr<RegisteredDevice>> devices_;  // until the end
    Fd events_;
    VerbsDone done_;
    std::mutex mu_;  // a leaf
    std::vector<RegisteredDevice *> open_;
    std::string error_;
    uint64_t next_id_ = 1;
    std::unordered_map<uint64_t, Shared> endpoints_;
    std::map<uint64_t, Shared> hot_;  // of which an event was read
    std::set<VerbsMemory *> memories_;
    std::mutex tasks_mu_;  // a leaf
    std::condition_variable wake_;
    std::deque<std::function<void()>> tasks_;
    std::deque<std::function<void()>> stuck_;  // to be done again after a pause
    bool stopping_ = false;
    std::thread thread_;
};

Verbs &verbs(adt_transport_h handle) {
    return *reinterpret_cast<Verbs *>(handle);
}
const Shared &endpoint(adt_endpoint_h handle) {
    return *reinterpret_cast<Shared *>(handle);
}

void probe(adt_probe_t *out) {
    VerbsPlace place;
    std::string why;
    out->usable = choose_verbs_place({}, -1, place, why) ? 1 : 0;
    std::snprintf(out->reason, sizeof(out->reason), "%s", out->usable != 0 ? place.words.c_str() : why.c_str());
}

adt_status_t open_verbs(const adt_open_params_t *params, adt_transport_h *out) {
    try {
        *out = reinterpret_cast<adt_transport_h>(new Verbs(*params));
        return ADT_OK;
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

void close_verbs(adt_transport_h handle) {
    delete &verbs(handle);
}

// Runs what may throw, and keeps the error's text.
template <typename Function>
adt_status_t guarded(adt_transport_h handle, Function &&function) {
    try {
        return function();
    } catch (const VerbsError &why) {
        return verbs(handle).fail(why.status, why.text);
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

adt_status_t reg_mem(adt_transport_h handle, const adt_memory_t *memory, adt_mem_h *out) {
    return guarded(handle, [&] { return verbs(handle).reg_mem(*memory, out); });
}

adt_status_t dereg_mem(adt_transport_h handle, adt_mem_h mem, void *token) {
    return verbs(handle).dereg_mem(reinterpret_cast<VerbsMemory *>(mem), token);
}

adt_status_t export_key(adt_transport_h, adt_mem_h mem, void *buffer, size_t capacity, size_t *size) {
    try {
        const std::string key = verbs_key(*reinterpret_cast<const VerbsMemory *>(mem));
        *size = key.size();
        if (capacity < key.size()) return ADT_ERR_AGAIN;
        std::memcpy(buffer, key.data(), key.size());
        return ADT_OK;
    } catch (...) {
        return ADT_ERR_NO_MEMORY;
    }
}

adt_status_t import_key(adt_transport_h handle, adt_endpoint_h ep, uint64_t cache_id, const adt_geometry_t *geometry,
                        const adt_key_t *key, adt_remote_h *out, adt_path_t *path) {
    return guarded(handle, [&] {
        auto remote = read_verbs_key(*key, cache_id, *geometry);
        remote->endpoint = endpoint(ep);
        endpoint(ep)->imported(cache_id);
        *out = reinterpret_cast<adt_remote_h>(remote.release());
        *path = {"verbs", kBatchBytes, kBatchChunks, 0};
        return ADT_OK;
    });
}

void release_key(adt_transport_h, adt_remote_h remote) {
    const std::unique_ptr<VerbsRemote> owned(reinterpret_cast<VerbsRemote *>(remote));
    if (const Shared ep = owned->endpoint.lock()) ep->released(owned->cache);
}

adt_status_t connect_verbs(adt_transport_h handle, const adt_connect_params_t *params, adt_endpoint_h *out) {
    return guarded(handle, [&] { return verbs(handle).connect(*params, out); });
}

adt_status_t disconnect_verbs(adt_transport_h handle, adt_endpoint_h ep) {
    return verbs(handle).disconnect(ep);
}

void hear(adt_transport_h handle, adt_endpoint_h ep, const adt_message_t *message) {
    verbs(handle).hear(endpoint(ep), *message);
}

adt_status_t post(adt_transport_h handle, adt_batch_t *const *batches, size_t count, size_t *posted) {
    *posted = 0;
    return guarded(handle, [&] {
        for (; *posted < count; ++*posted) {
            const adt_status_t status = verbs(handle).post(batches[*posted]);
            if (status != ADT_OK) return status;
        }
        return adt_status_t{ADT_OK};
    });
}

size_t poll_verbs(adt_transport_h handle, adt_completion_t *out, size_t capacity) {
    return verbs(handle).poll(out, capacity);
}

int event_fd(adt_transport_h handle) {
    return verbs(handle).event_fd();
}

adt_status_t arm(adt_transport_h handle) {
    return verbs(handle).arm() ? ADT_OK : ADT_ERR_AGAIN;
}

adt_status_t cancel(adt_transport_h handle, adt_endpoint_h ep, uint64_t op_id) {
    verbs(handle).cancel(endpoint(ep), op_id);
    return ADT_OK;
}

adt_status_t revoke(adt_transport_h handle, adt_endpoint_h ep, uint64_t cache_id, uint32_t epoch) {
    return verbs(handle).revoke(endpoint(ep), cache_id, epoch);
}

void last_error(adt_transport_h handle, char *buffer, size_t capacity) {
    std::snprintf(buffer, capacity, "%s", verbs(handle).error().c_str());
}

}  // namespace

const adt_transport_ops_t kVerbsOps = {
    ADT_ABI_VERSION,
    sizeof(adt_transport_ops_t),
    "verbs",
    ADT_TRANSPORT_PINS | ADT_TRANSPORT_SETTLES,
    kQueueDepth,
    probe,
    open_verbs,
    close_verbs,
    reg_mem,
    dereg_mem,
    export_key,
    import_key,
    release_key,
    adt_unsupported_import_local,
    connect_verbs,
    disconnect_verbs,
    hear,
    post,
    adt_unsupported_execute,
    poll_verbs,
    event_fd,
    arm,
    adt_no_loop_fd,
    adt_no_loop_progress,
    adt_no_take_over,
    cancel,
    revoke,
    last_error,
};

}  // namespace adt
#endif
