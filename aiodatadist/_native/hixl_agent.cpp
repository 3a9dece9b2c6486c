// SPDX-License-Identifier: Apache-2.0
#include "hixl_agent.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>

#include "fd.hpp"
#include "hixl_stats.hpp"
#include "threads.hpp"

namespace adt {
namespace {

constexpr uint32_t kMostLinks = 512;  // of one device
constexpr int kPortTries = 8;
constexpr std::chrono::microseconds kLeastPause{20};
constexpr std::chrono::microseconds kMostPause{1000};
constexpr uint64_t kTryNs = 1'000'000'000;  // beside what links may drain, to take memory back
constexpr uint64_t kAskAgainNs = 10'000'000;
constexpr uint64_t kLeastRetry = 500'000'000;
constexpr uint64_t kMostRetry = 30'000'000'000;
// The end of the process must not wait for a peer that does not answer: the end of the engine is the end of all.
constexpr std::chrono::seconds kGrace{3};

// An IP address as adt_message_t carries it.
bool read_address(const std::string &host, adt_message_t &out) {
    unsigned char bytes[16] = {};
    if (inet_pton(AF_INET, host.c_str(), bytes) == 1) {
        out.number = 4;
    } else if (inet_pton(AF_INET6, host.c_str(), bytes) == 1) {
        out.number = 6;
    } else {
        return false;
    }
    std::memcpy(&out.a, bytes, 8);
    std::memcpy(&out.b, bytes + 8, 8);
    return true;
}

// A port that is free at this moment: HIXL does not tell which one it got when it is asked for any.
uint16_t free_port(const std::string &host) {
    adt_message_t address{};
    if (!read_address(host, address)) throw HixlError{ADT_ERR_INVALID, host + " is no IP address of this machine"};
    const bool six = address.number == 6;
    const Fd probe(socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in6 name6{};
    sockaddr_in name4{};
    name6.sin6_family = AF_INET6;
    name4.sin_family = AF_INET;
    std::memcpy(&name6.sin6_addr, &address.a, 8);
    std::memcpy(reinterpret_cast<char *>(&name6.sin6_addr) + 8, &address.b, 8);
    std::memcpy(&name4.sin_addr, &address.a, 4);
    auto *const name = six ? reinterpret_cast<sockaddr *>(&name6) : reinterpret_cast<sockaddr *>(&name4);
    socklen_t size = six ? sizeof(name6) : sizeof(name4);
    if (!probe || bind(probe.get(), name, size) != 0 || getsockname(probe.get(), name, &size) != 0) {
        throw HixlError{ADT_ERR_IO, "no port of " + host +
                                        " for HIXL: " + std::error_code(errno, std::generic_category()).message()};
    }
    return ntohs(six ? name6.sin6_port : name4.sin_port);
}

}  // namespace

HixlStats &hixl_stats() {
    static HixlStats *const instance = new HixlStats;
    return *instance;
}

// --------------------------------------------------------------------------------------------------------- any thread

HixlAgent::HixlAgent(const HixlSettings &settings) : settings_(settings) {
    std::string why;
    library_ = HixlLibrary::get(settings_.places, why);
    if (library_ == nullptr) throw HixlError{ADT_ERR_UNSUPPORTED, why};
    // Shared: whoever waits may be on his way before the thread has left the promise.
    const auto opened = std::make_shared<std::promise<void>>();
    std::future<void> done = opened->get_future();
    try {
        thread_ = start_thread("adt-hixl", [this, opened] { run(*opened); });
    } catch (const std::system_error &) {
        throw HixlError{ADT_ERR_NO_MEMORY, "no thread for HIXL can be started"};
    }
    try {
        done.get();
    } catch (...) {
        thread_.join();
        throw;
    }
}

HixlAgent::~HixlAgent() {
    stop();
}

void HixlAgent::retire() {
    const std::lock_guard<std::mutex> lock(mu_);
    retired_ = true;
    wake_.notify_one();
}

void HixlAgent::stop() {
    {
        const std::lock_guard<std::mutex> lock(mu_);
        stopping_ = true;
        wake_.notify_one();
    }
    const std::lock_guard<std::mutex> lock(joining_);
    if (thread_.joinable()) thread_.join();
}

void HixlAgent::later(std::function<void()> task) {
    {
        const std::lock_guard<std::mutex> lock(mu_);
        if (!over_.load(std::memory_order_relaxed)) {
            tasks_.push_back(std::move(task));
            wake_.notify_one();
            return;
        }
    }
    // There is no engine any more, and nothing to take turns with.
    task();
}

void HixlAgent::later(const std::shared_ptr<HixlEndpoint> &endpoint, std::function<void(HixlNews &)> work) {
    later([this, endpoint, work = std::move(work)] {
        HixlNews news;
        work(news);
        touch(endpoint);
        tell(endpoint, news);
    });
}

std::unique_ptr<HixlMemory> HixlAgent::reg_mem(const adt_memory_t &memory) {
    std::unique_ptr<HixlMemory> made = describe_hixl_memory(memory);
    const auto registered = std::make_shared<std::promise<void>>();
    std::future<void> done = registered->get_future();
    later([this, &made, registered] {
        try {
            if (engine_ == nullptr) throw HixlError{ADT_ERR_CLOSED, "the HIXL engine is closed"};
            registry_->take(*made);
            ++caches_;
            if (!try_memory(*made, registered)) registered->set_value();
        } catch (...) {
            registered->set_exception(std::current_exception());
        }
    });
    done.get();
    return made;
}

void HixlAgent::dereg_mem(std::unique_ptr<HixlMemory> memory, std::function<void()> gone) {
    const std::shared_ptr<HixlMemory> leaving = std::move(memory);
    later([this, leaving, gone = std::move(gone)] {
        --caches_;
        Leaving work;
        if (engine_ != nullptr) work.ranges = registry_->give(*leaving);
        if (work.ranges.empty()) {
            gone();
            return;
        }
        work.gone = gone;
        leaving_.push_back(std::move(work));
    });
}

std::shared_ptr<HixlEndpoint> HixlAgent::connect(HixlSink &sink, void *link) {
    const bool full = links_.fetch_add(1) >= kMostLinks;
    auto endpoint = std::make_shared<HixlEndpoint>(*this, sink, next_endpoint_.fetch_add(1), link);
    later([this, endpoint, full] {
        HixlNews news;
        endpoints_.emplace(endpoint->id, endpoint);
        if (engine_ == nullptr) {
            endpoint->refuse("the HIXL engine is closed", news);
        } else if (full) {
            endpoint->refuse("there are " + std::to_string(kMostLinks) + " links over HIXL, as many as a device bears",
                             news);
        } else {
            endpoint->start(news);
            // Nobody may connect in between.
            for (Leaving &leaving : leaving_) {
                if (leaving.serial == 0) continue;
                leaving.waiting_for.insert(endpoint->id);
                endpoint->hold(leaving.serial, news);
            }
        }
        tell(endpoint, news);
    });
    return endpoint;
}

// --------------------------------------------------------------------------------------------------------- the thread

uint64_t HixlAgent::now() const {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

adt_message_t HixlAgent::offer() const {
    adt_message_t made{};
    made.kind = static_cast<uint8_t>(HixlSay::offer);
    read_address(settings_.host, made);
    made.small = port_;
    made.c = generation();
    return made;
}

uint64_t HixlAgent::name_request(HixlEndpoint &endpoint) {
    requests_.emplace(next_cookie_, &endpoint);
    return next_cookie_++;
}

void HixlAgent::leave_behind(void *request) {
    // Asked for all at once, HIXL lists these by itself.
    if (!bulk_) left_behind_.insert(request);
}

void HixlAgent::drop_left_behind() {
    for (void *const request : left_behind_) {
        int32_t found = 0;
        api().query(engine_, request, &found);
    }
    left_behind_.clear();
}

void HixlAgent::peer_paused(uint64_t serial, uint64_t endpoint) {
    for (Leaving &leaving : leaving_) {
        if (leaving.serial == serial) leaving.waiting_for.erase(endpoint);
    }
}

uint64_t HixlAgent::to_prove() const {
    uint64_t most = 0;
    for (const Trial &trial : trials_) most = std::max(most, trial.memory->generation);
    return most;
}

bool HixlAgent::try_memory(HixlMemory &memory, const std::shared_ptr<std::promise<void>> &registered) {
    if (!settings_.others || !registry_->unproved(memory)) return false;
    bool links = false;
    for (const auto &[id, endpoint] : endpoints_) {
        if (!endpoint->useful()) continue;
        links = true;
        touch(endpoint);
    }
    if (!links) return false;
    const uint64_t limit = settings_.drain_ns + kTryNs + static_cast<uint64_t>(settings_.connect_ms) * 1'000'000;
    trials_.push_back({&memory, registered, now() + limit});
    return true;
}

bool HixlAgent::end_trials(uint64_t now) {
    const bool useless = std::none_of(endpoints_.begin(), endpoints_.end(),
                                      [](const auto &endpoint) { return endpoint.second->useful(); });
    const auto over = std::stable_partition(trials_.begin(), trials_.end(), [&](const Trial &trial) {
        if (trial.memory->refused.load(std::memory_order_relaxed)) return true;  // ends when HIXL has let go
        return registry_->unproved(*trial.memory) && !useless && now < trial.until;
    });
    if (over == trials_.end()) return false;
    for (auto trial = over; trial != trials_.end(); ++trial) trial->registered->set_value();
    trials_.erase(over, trials_.end());
    return true;
}

bool HixlAgent::blame_memory() {
    if (!settings_.others) return false;
    Leaving work;
    work.ranges = registry_->refuse_unproved();
    if (work.ranges.empty()) return false;
    refused_.fetch_add(work.ranges.size(), std::memory_order_relaxed);
    work.gone = [this] { fail_refused(); };
    leaving_.push_back(std::move(work));
    return true;
}

// Tells those who wait for the registration of memory that HIXL has refused and let go of.
void HixlAgent::fail_refused() {
    const auto over = std::stable_partition(trials_.begin(), trials_.end(), [](const Trial &trial) {
        return !trial.memory->refused.load(std::memory_order_relaxed);
    });
    for (auto trial = over; trial != trials_.end(); ++trial) {
        --caches_;
        Leaving rest;
        rest.ranges = registry_->give(*trial->memory);  // what it had beside, and HIXL bears
        rest.gone = [] {};
        if (!rest.ranges.empty()) later([this, rest] { leaving_.push_back(rest); });
        trial->registered->set_exception(std::make_exception_ptr(
            HixlError{ADT_ERR_UNSUPPORTED,
                      "HIXL does not connect with this host memory: over RoCE it must be of aclrtMallocHost"}));
    }
    trials_.erase(over, trials_.end());
}

void HixlAgent::tell(const std::shared_ptr<HixlEndpoint> &endpoint, const HixlNews &news) {
    if (news.gone && endpoints_.erase(endpoint->id) != 0) {
        active_.erase(endpoint->id);
        links_.fetch_sub(1);
        for (Leaving &leaving : leaving_) leaving.waiting_for.erase(endpoint->id);
    }
    endpoint->sink.told(*endpoint, news);
}

void HixlAgent::open_engine() {
    if (const int32_t code = library_->set_device(settings_.device); code != 0) {
        throw HixlError{ADT_ERR_IO,
                        "aclrtSetDevice(" + std::to_string(settings_.device) + ") failed with " + std::to_string(code)};
    }
    std::vector<const char *> names;
    std::vector<const char *> values;
    for (const auto &[name, value] : settings_.options) {
        names.push_back(name.c_str());
        values.push_back(value.c_str());
    }
    uint32_t status = ADT_HIXL_FAILED;
    for (int i = 0; i < kPortTries; ++i) {
        port_ = free_port(settings_.host);
        const bool six = settings_.host.find(':') != std::string::npos;
        address_ = (six ? "[" + settings_.host + "]" : settings_.host) + ":" + std::to_string(port_);
        engine_ = api().create();
        if (engine_ == nullptr) throw HixlError{ADT_ERR_NO_MEMORY, "no memory for a HIXL engine"};
        status = api().initialize(engine_, address_.c_str(), names.data(), values.data(), names.size());
        if (status == ADT_HIXL_SUCCESS) break;
        api().destroy(std::exchange(engine_, nullptr));
        if (status == ADT_HIXL_PARAM_INVALID || status == ADT_HIXL_UNSUPPORTED) break;  // another port is no help
    }
    if (engine_ == nullptr) {
        throw HixlError{ADT_ERR_IO, "HIXL cannot open an engine at " + address_ + " on device " +
                                        std::to_string(settings_.device) + ": " + hixl_status_words(status)};
    }
    registry_.emplace(api(), engine_, settings_.alignment);
    words_ = settings_.places.hixl + ", device " + std::to_string(settings_.device) + ", engine " + address_;
    hixl_stats().engines.fetch_add(1, std::memory_order_relaxed);
}

// Nothing touches memory any more once the engine is gone, whatever was under way.
void HixlAgent::close_engine() {
    if (engine_ == nullptr) return;
    api().finalize(engine_);
    api().destroy(std::exchange(engine_, nullptr));
    hixl_stats().engines.fetch_sub(1, std::memory_order_relaxed);
    left_behind_.clear();
    const auto endpoints = endpoints_;
    for (const auto &[id, endpoint] : endpoints) {
        HixlNews news;
        endpoint->finalized(news);
        tell(endpoint, news);
    }
    for (const Trial &trial : trials_) {
        --caches_;
        trial.registered->set_exception(
            std::make_exception_ptr(HixlError{ADT_ERR_CLOSED, "the HIXL engine is closed"}));
    }
    trials_.clear();
    registry_->forget();
    for (const Leaving &leaving : std::exchange(leaving_, {})) leaving.gone();
}

void HixlAgent::run(std::promise<void> &opened) {
    try {
        open_engine();
    } catch (...) {
        opened.set_exception(std::current_exception());
        return;
    }
    opened.set_value();
    serve();
    close_engine();
    // What came too late hears that all is over; nothing waits for an answer for ever.
    for (;;) {
        std::deque<std::function<void()>> tasks;
        {
            const std::lock_guard<std::mutex> lock(mu_);
            tasks.swap(tasks_);
            if (tasks.empty()) over_.store(true, std::memory_order_release);
        }
        if (tasks.empty()) return;
        for (const auto &task : tasks) task();
    }
}

void HixlAgent::serve() {
    std::chrono::microseconds pause = kLeastPause;
    bool busy = false;
    std::optional<std::chrono::steady_clock::time_point> until;
    for (;;) {
        std::deque<std::function<void()>> tasks;
        {
            std::unique_lock<std::mutex> lock(mu_);
            const auto woken = [this, &until] { return !tasks_.empty() || (stopping_ && !until); };
            const bool idle = endpoints_.empty() && leaving_.empty();
            if (busy || until) {
                wake_.wait_for(lock, pause, woken);
            } else if (!leaving_.empty()) {
                const uint64_t at = next_try();
                const uint64_t from = now();
                wake_.wait_for(lock, std::chrono::nanoseconds(at > from ? at - from : 0), woken);
            } else {
                wake_.wait(lock, [&] { return woken() || (retired_ && idle && caches_ == 0); });
            }
            tasks.swap(tasks_);
            if (stopping_ && !until) until = std::chrono::steady_clock::now() + kGrace;
            if (tasks.empty() && retired_ && idle && caches_ == 0) return;
        }
        for (const auto &task : tasks) task();
        const bool news = progress(now()) || !tasks.empty();
        pause = news ? kLeastPause : std::min(2 * pause, kMostPause);
        busy = !active_.empty() || trying() || !trials_.empty();
        if (until && (!busy || std::chrono::steady_clock::now() >= *until)) return;
    }
}

// Goes on with all that is under way. True: something has changed.
bool HixlAgent::progress(uint64_t now) {
    bool news = false;
    if (!requests_.empty()) news = ask_requests();
    if (!leaving_.empty()) news = ask_leaving(now) || news;
    const auto active = active_;
    for (const auto &[id, endpoint] : active) {
        HixlNews told;
        if (!endpoint->step(now, told)) active_.erase(id);
        news = news || !told.done.empty() || told.settled || !told.messages.empty();
        tell(endpoint, told);
    }
    if (!trials_.empty()) news = end_trials(now) || news;
    if (!left_behind_.empty()) drop_left_behind();
    return news;
}

bool HixlAgent::ask_requests() {
    hixl_stats().polls.fetch_add(1, std::memory_order_relaxed);
    std::map<HixlEndpoint *, HixlNews> all;
    bool one_by_one = !bulk_;
    if (bulk_) {
        std::vector<std::pair<uint64_t, bool>> over;
        const auto take = [](void *context, void *, const void *user_data, int32_t status) {
            static_cast<std::vector<std::pair<uint64_t, bool>> *>(context)->emplace_back(
                static_cast<uint64_t>(reinterpret_cast<uintptr_t>(user_data)), status == ADT_HIXL_COMPLETED);
        };
        const uint32_t status = api().query_all(engine_, take, &over);
        bulk_ = status != ADT_HIXL_UNSUPPORTED;
        one_by_one = status != ADT_HIXL_SUCCESS;
        for (const auto &[cookie, well] : over) {
            // Of a connection that has ended meanwhile there may be some that nobody knows any more.
            const auto found = requests_.find(cookie);
            if (found == requests_.end()) continue;
            HixlEndpoint *const endpoint = found->second;
            endpoint->ended(cookie, well, all[endpoint]);
        }
    }
    if (one_by_one) {
        std::set<HixlEndpoint *> asked;
        for (const auto &[cookie, endpoint] : requests_) asked.insert(endpoint);
        for (HixlEndpoint *const endpoint : asked) {
            HixlNews news;
            if (endpoint->query(news)) all.emplace(endpoint, std::move(news));
        }
    }
    for (const auto &[endpoint, news] : all) {
        const auto found = endpoints_.find(endpoint->id);
        if (found != endpoints_.end()) tell(std::shared_ptr<HixlEndpoint>(found->second), news);
    }
    return !all.empty();
}

bool HixlAgent::trying() const {
    return std::any_of(leaving_.begin(), leaving_.end(), [](const Leaving &leaving) { return leaving.serial != 0; });
}

uint64_t HixlAgent::next_try() const {
    uint64_t at = UINT64_MAX;
    for (const Leaving &leaving : leaving_) at = std::min(at, leaving.retry_at);
    return at;
}

void HixlAgent::hold_links(Leaving &leaving, uint64_t now) {
    leaving.serial = next_serial_++;
    leaving.until = now + settings_.drain_ns + kTryNs;
    for (const auto &[id, endpoint] : endpoints_) {
        leaving.waiting_for.insert(id);
        HixlNews told;
        endpoint->hold(leaving.serial, told);
        touch(endpoint);
        tell(endpoint, told);
    }
}

void HixlAgent::release_links(Leaving &leaving) {
    const uint64_t serial = std::exchange(leaving.serial, 0);
    leaving.waiting_for.clear();
    for (const auto &[id, endpoint] : endpoints_) {
        HixlNews told;
        endpoint->release(serial, told);
        touch(endpoint);
        tell(endpoint, told);
    }
}

bool HixlAgent::ask_leaving(uint64_t now) {
    bool news = false;
    for (auto leaving = leaving_.begin(); leaving != leaving_.end();) {
        if (now < leaving->retry_at) {
            ++leaving;
            continue;
        }
        if (leaving->serial == 0) hold_links(*leaving, now);
        const bool off = leaving->waiting_for.empty() && std::all_of(endpoints_.begin(), endpoints_.end(),
                                                                     [](const auto &e) { return e.second->down(); });
        if (off) registry_->deregister(leaving->ranges);
        if (leaving->ranges.empty()) {
            news = true;
            release_links(*leaving);
            leaving->gone();
            leaving = leaving_.erase(leaving);
            continue;
        }
        if (now >= leaving->until) {
            leaving->pause = std::clamp(2 * leaving->pause, kLeastRetry, kMostRetry);
            leaving->retry_at = now + leaving->pause;
            release_links(*leaving);
        } else if (off) {
            // A client that HIXL still counts as connected. Until it does not, the memory is not quiet.
            leaving->retry_at = now + kAskAgainNs;
        }
        ++leaving;
    }
    return news;
}

}  // namespace adt
