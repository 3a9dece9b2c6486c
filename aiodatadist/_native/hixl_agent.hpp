// SPDX-License-Identifier: Apache-2.0
// The HIXL engine of one DataDist, and the one thread that calls it: HIXL wants the thread that set the device, offers
// no descriptor to wait on, and can only be asked. While nothing is under way the thread sleeps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aiodatadist/transport.h"
#include "counted.hpp"
#include "hixl_endpoint.hpp"
#include "hixl_library.hpp"
#include "hixl_memory.hpp"

namespace adt {

struct HixlSettings {
    HixlPlaces places;
    int32_t device = 0;
    std::string host;  // IP address of this machine where peers reach the engine; its port is any free one
    std::vector<std::pair<std::string, std::string>> options;
    uint64_t alignment = 0;  // of registered memory; 0: any
    uint64_t drain_ns = 0;   // how long what is under way may take before a connection is ended
    int32_t connect_ms = 1000;
    bool others = false;  // other transports serve host memory that HIXL refuses
};

class HixlAgent : Counted<Live::hixl_engine> {
  public:
    // Opens the libraries and an engine, which may take seconds. Throws HixlError.
    explicit HixlAgent(const HixlSettings &settings);
    ~HixlAgent();  // as `stop`
    HixlAgent(const HixlAgent &) = delete;
    HixlAgent &operator=(const HixlAgent &) = delete;

    // Any thread.

    // No DataDist uses it any more: its thread ends when the last link and the last registration are gone.
    void retire();
    // Ends all, and joins: after this HIXL touches no memory.
    void stop();
    bool over() const { return over_.load(std::memory_order_acquire); }
    const std::string &words() const { return words_; }
    // How many ranges of host memory HIXL has refused so far.
    uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
    // Registers in the agent's thread, and waits for it. Throws HixlError.
    std::unique_ptr<HixlMemory> reg_mem(const adt_memory_t &memory);
    // `gone` is called when HIXL has let go of the memory; at once where it has already.
    void dereg_mem(std::unique_ptr<HixlMemory> memory, std::function<void()> gone);
    std::shared_ptr<HixlEndpoint> connect(HixlSink &sink, void *link);
    // Has the thread do something for an endpoint, and tell what came of it.
    void later(const std::shared_ptr<HixlEndpoint> &endpoint, std::function<void(HixlNews &)> work);

    // The agent's thread only: what endpoints need.

    const adt_hixl_api_t &api() const { return *library_->api; }
    void *engine() const { return engine_; }
    const HixlSettings &settings() const { return settings_; }
    uint64_t generation() const { return registry_->generation(); }
    adt_message_t offer() const;
    uint64_t now() const;
    // A number for a request, which never comes again.
    uint64_t name_request(HixlEndpoint &endpoint);
    void forget_request(uint64_t cookie) { requests_.erase(cookie); }
    // HIXL may use the name of a request that it has freed for a new one.
    void took_request(void *request) { left_behind_.erase(request); }
    // Requests that a connection has taken with it, to be asked for once so that HIXL frees them.
    void leave_behind(void *request);
    void drop_left_behind();
    void peer_paused(uint64_t serial, uint64_t endpoint);
    // A connection reaches memory up to a generation.
    void proved(uint64_t generation) { registry_->proved(generation); }
    // Up to which generation connections must reach, for host memory that waits to be proven. 0: none does.
    uint64_t to_prove() const;
    // HIXL has refused to connect. Over RoCE it does as long as it has host memory that it cannot reach, and says no
    // more. True: there is some that no connection has borne yet; it is taken back, and then it is tried again.
    bool blame_memory();

  private:
    // Memory that is being taken back: peers and this side disconnect first. While they do, no link moves anything; so
    // a peer that does not answer, or that HIXL still counts as connected, ends the try, and the next one comes later.
    struct Leaving {
        uint64_t serial = 0;  // of this try; 0: none is under way
        std::vector<HixlRange> ranges;
        std::set<uint64_t> waiting_for;  // endpoints whose peers have not said that they are off it
        uint64_t until = 0;              // the end of this try
        uint64_t retry_at = 0;
        uint64_t pause = 0;  // between tries
        std::function<void()> gone;
    };

    // Host memory that was registered while links are there: they connect anew, which shows whether HIXL bears it.
    struct Trial {
        HixlMemory *memory;
        std::shared_ptr<std::promise<void>> registered;
        uint64_t until;
    };

    void run(std::promise<void> &opened);
    bool try_memory(HixlMemory &memory, const std::shared_ptr<std::promise<void>> &registered);
    bool end_trials(uint64_t now);
    void fail_refused();
    void open_engine();
    void close_engine();
    void later(std::function<void()> task);
    void serve();
    bool progress(uint64_t now);
    bool ask_requests();
    bool ask_leaving(uint64_t now);
    void hold_links(Leaving &leaving, uint64_t now);
    void release_links(Leaving &leaving);
    bool trying() const;
    uint64_t next_try() const;
    void tell(const std::shared_ptr<HixlEndpoint> &endpoint, const HixlNews &news);
    void touch(const std::shared_ptr<HixlEndpoint> &endpoint) { active_[endpoint->id] = endpoint; }

    const HixlSettings settings_;
    const HixlLibrary *library_ = nullptr;
    std::string words_;
    std::atomic<bool> over_{false};
    std::atomic<uint32_t> links_{0};
    std::atomic<uint64_t> refused_{0};
    std::atomic<uint64_t> next_endpoint_{1};
    std::mutex mu_;  // a leaf
    std::condition_variable wake_;
    std::deque<std::function<void()>> tasks_;
    bool stopping_ = false;
    bool retired_ = false;
    std::mutex joining_;
    std::thread thread_;
    // Of the thread.
    void *engine_ = nullptr;
    std::string address_;
    uint16_t port_ = 0;
    bool bulk_ = true;  // until HIXL says that it cannot be asked for all requests at once
    uint64_t caches_ = 0;
    uint64_t next_cookie_ = 1;
    uint64_t next_serial_ = 1;
    std::optional<HixlRegistry> registry_;
    std::map<uint64_t, std::shared_ptr<HixlEndpoint>> endpoints_;
    std::map<uint64_t, std::shared_ptr<HixlEndpoint>> active_;  // that have something to look after
    std::unordered_map<uint64_t, HixlEndpoint *> requests_;
    std::set<void *> left_behind_;
    std::deque<Leaving> leaving_;
    std::vector<Trial> trials_;
};

}  // namespace adt
