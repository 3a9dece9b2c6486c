// SPDX-License-Identifier: Apache-2.0
// STAND-IN for tests, not Ascend software: the published class, its options, and the pool of asynchronous connects.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "engine.hpp"
#include "knobs.hpp"

namespace hixl {

namespace {

using standin::Engine;
using standin::Kind;
using std::chrono::milliseconds;

using Options = std::map<std::string, std::string>;
constexpr size_t kConnectQueue = 128, kConnectThreads = 2;

bool number_within(const std::string &text, int least, int most, int multiple = 1) {
    if (text.empty() || text.size() > 6 || text.find_first_not_of("0123456789") != std::string::npos) return false;
    const int value = std::atoi(text.c_str());
    return value >= least && value <= most && value % multiple == 0;
}

std::string option(const Options &options, const char *name) {
    const auto it = options.find(name);
    return it == options.end() ? "" : it->second;
}

// Whether this JSON text has the key; enough of a parser for a stand-in.
bool has(const std::string &json, const std::string &key) {
    return json.find('"' + key + '"') != std::string::npos;
}

bool version_1_3(const std::string &json) {
    std::string packed;
    for (const char c : json) {
        if (c != ' ' && c != '\n' && c != '\t') packed += c;
    }
    return packed.find("\"version\":\"1.3\"") != std::string::npos;
}

// The published order: the first that fits.
Kind kind_of(const Options &options) {
    if (const char *forced = std::getenv("HIXL_STANDIN_ENGINE"); forced != nullptr && *forced != '\0') {
        if (std::strcmp(forced, "fabric") == 0) return Kind::fabric;
        return std::strcmp(forced, "client-server") == 0 ? Kind::client_server : Kind::hccl_comm;
    }
    const std::string resources = option(options, "LocalCommRes");
    if (option(options, "EnableUseFabricMem") == "1") return Kind::fabric;
    if (version_1_3(resources)) return Kind::client_server;
    if (!resources.empty()) return Kind::hccl_comm;
    if (has(option(options, "GlobalResourceConfig"), "comm_resource_config.protocol_desc")) return Kind::client_server;
    return std::strncmp(aclrtGetSocName(), "Ascend950", 9) == 0 ? Kind::client_server : Kind::hccl_comm;
}

bool fits(const Options &options, Kind kind) {
    for (const auto &[name, value] : options) {
        bool well = true;
        if (name == "EnableUseFabricMem" || name == "AutoConnect")
            well = value == "0" || value == "1";
        else if (name == "RdmaTrafficClass")
            well = number_within(value, 0, 255, 4);
        else if (name == "RdmaServiceLevel")
            well = number_within(value, 0, 7);
        else if (name == "GlobalResourceConfig")
            well = value.empty() || (value.front() == '{' && value.back() == '}');
        else if (name == "BufferPool" && kind != Kind::hccl_comm)
            well = value == "0:0";
        if (!well) return false;
    }
    return true;
}

}  // namespace

// Engine and context of one Initialize, with the tasks of its asynchronous connects.
class __attribute__((visibility("hidden"))) Hixl::Impl {
  public:
    Impl(std::string name, Kind kind, void *context, bool auto_connect)
        : engine(std::move(name), kind, context), auto_connect(auto_connect), context_(context) {}

    ~Impl() {
        {
            std::lock_guard lock(mu_);
            over_ = true;
        }
        changed_.notify_all();
        for (auto &thread : pool_) thread.join();
    }

    Status enqueue(const std::string &remote, bool connects, int32_t ms) {
        if (ms <= 0) return PARAM_INVALID;
        note_use(remote, true);
        std::lock_guard lock(mu_);
        if (waiting_.size() >= kConnectQueue) return RESOURCE_EXHAUSTED;
        waiting_.push_back({remote, connects, ms});
        states_[remote] = connects ? AsyncConnectStatus::CONNECT_PENDING : AsyncConnectStatus::DISCONNECT_PENDING;
        if (pool_.size() < kConnectThreads) pool_.emplace_back([this] { run(); });
        changed_.notify_all();
        return SUCCESS;
    }

    // Synchronous and asynchronous calls for one peer must not be mixed.
    void note_use(const std::string &remote, bool asynchronous) {
        std::lock_guard lock(mu_);
        const auto [it, first] = asynchronous_.emplace(remote, asynchronous);
        if (!first && it->second != asynchronous) standin::violation("Connect and ConnectAsync are mixed for a peer");
    }

    AsyncConnectStatus state(const std::string &remote) {
        std::lock_guard lock(mu_);
        const auto it = states_.find(remote);
        return it == states_.end() ? AsyncConnectStatus::NOT_CONNECT : it->second;
    }

    std::map<std::string, AsyncConnectStatus> states() {
        std::lock_guard lock(mu_);
        return states_;
    }

    Engine engine;
    const bool auto_connect;

  private:
    struct Task {
        std::string remote;
        bool connects;
        int32_t ms;
    };

    // One task a remote at a time, in order.
    void run() {
        aclrtSetCurrentContext(context_);
        std::unique_lock lock(mu_);
        while (!over_) {
            const auto it = std::find_if(waiting_.begin(), waiting_.end(),
                                         [&](const Task &task) { return busy_.count(task.remote) == 0; });
            if (it == waiting_.end()) {
                changed_.wait(lock);
                continue;
            }
            const Task task = *it;
            waiting_.erase(it);
            busy_[task.remote] = true;
            states_[task.remote] = task.connects ? AsyncConnectStatus::CONNECTING : AsyncConnectStatus::DISCONNECTING;
            lock.unlock();
            const Status status =
                task.connects ? engine.connect(task.remote, task.ms) : engine.disconnect(task.remote, task.ms);
            lock.lock();
            const bool more = std::any_of(waiting_.begin(), waiting_.end(),
                                          [&](const Task &other) { return other.remote == task.remote; });
            if (!more) {
                const bool linked = status == SUCCESS || status == ALREADY_CONNECTED;
                states_[task.remote] = !task.connects ? AsyncConnectStatus::NOT_CONNECT
                                       : linked       ? AsyncConnectStatus::CONNECTED
                                                      : AsyncConnectStatus::CONNECT_FAILED;
            }
            busy_.erase(task.remote);
            changed_.notify_all();
        }
    }

    void *const context_;
    std::mutex mu_;
    std::condition_variable changed_;
    std::deque<Task> waiting_;
    std::map<std::string, bool> busy_;
    std::map<std::string, bool> asynchronous_;  // by peer: how its first call was
    std::map<std::string, AsyncConnectStatus> states_;
    std::vector<std::thread> pool_;
    bool over_ = false;
};

Hixl::Hixl() = default;
Hixl::~Hixl() = default;

Status Hixl::Initialize(const AscendString &local_engine, const std::map<AscendString, AscendString> &options) {
    standin::read_environment();
    void *context = nullptr;
    if (aclrtGetCurrentContext(&context) != 0) {
        standin::violation("Initialize without aclrtSetDevice");
        return FAILED;
    }
    Options texts;
    for (const auto &[name, value] : options) texts[name.GetString()] = value.GetString();
    const Kind kind = kind_of(texts);
    if (!fits(texts, kind)) return PARAM_INVALID;
    impl_.reset();
    auto made = std::make_unique<Impl>(local_engine.GetString(), kind, context, option(texts, "AutoConnect") == "1");
    const Status status = made->engine.start();
    if (status == SUCCESS) impl_ = std::move(made);
    return status;
}

void Hixl::Finalize() {
    impl_.reset();
}

// What every call checks first.
#define USABLE(call) \
    if (!impl_ || !impl_->engine.right_thread(call)) return FAILED

Status Hixl::RegisterMem(const MemDesc &mem, MemType type, MemHandle &mem_handle) {
    USABLE("RegisterMem");
    return impl_->engine.add_memory(mem, type, mem_handle);
}

Status Hixl::DeregisterMem(MemHandle mem_handle) {
    USABLE("DeregisterMem");
    return impl_->engine.remove_memory(mem_handle);
}

Status Hixl::Connect(const AscendString &remote_engine, int32_t timeout_in_millis) {
    USABLE("Connect");
    impl_->note_use(remote_engine.GetString(), false);
    return impl_->engine.connect(remote_engine.GetString(), timeout_in_millis);
}

Status Hixl::Disconnect(const AscendString &remote_engine, int32_t timeout_in_millis) {
    USABLE("Disconnect");
    impl_->note_use(remote_engine.GetString(), false);
    return impl_->engine.disconnect(remote_engine.GetString(), timeout_in_millis);
}

Status Hixl::ConnectAsync(const AscendString &remote_engine, int32_t timeout_in_millis) {
    USABLE("ConnectAsync");
    return impl_->enqueue(remote_engine.GetString(), true, timeout_in_millis);
}

Status Hixl::DisconnectAsync(const AscendString &remote_engine, int32_t timeout_in_millis) {
    USABLE("DisconnectAsync");
    return impl_->enqueue(remote_engine.GetString(), false, timeout_in_millis);
}

Status Hixl::GetAsyncConnectStatus(const AscendString &remote_engine, AsyncConnectStatus &status) {
    USABLE("GetAsyncConnectStatus");
    status = impl_->state(remote_engine.GetString());
    return SUCCESS;
}

Status Hixl::GetAsyncConnectStatus(std::map<AscendString, AsyncConnectStatus> &statuses) {
    USABLE("GetAsyncConnectStatus");
    statuses.clear();
    for (const auto &[remote, state] : impl_->states()) statuses[AscendString(remote.c_str())] = state;
    return SUCCESS;
}

Status Hixl::TransferSync(const AscendString &remote_engine, TransferOp operation,
                          const std::vector<TransferOpDesc> &op_descs, int32_t timeout_in_millis) {
    USABLE("TransferSync");
    if (impl_->auto_connect) impl_->engine.connect(remote_engine.GetString(), timeout_in_millis);
    return impl_->engine.transfer(remote_engine.GetString(), operation, op_descs, timeout_in_millis);
}

Status Hixl::TransferAsync(const AscendString &remote_engine, TransferOp operation,
                           const std::vector<TransferOpDesc> &op_descs, const TransferArgs &optional_args,
                           TransferReq &req) {
    USABLE("TransferAsync");
    for (const uint8_t byte : optional_args.reserved) {
        if (byte != 0) {
            standin::violation("reserved bytes of TransferArgs are not zero");
            return PARAM_INVALID;
        }
    }
    if (impl_->auto_connect) impl_->engine.connect(remote_engine.GetString(), 1000);
    uint64_t id = 0;
    const Status status =
        impl_->engine.post(remote_engine.GetString(), operation, op_descs, optional_args.user_data, &id);
    if (status == SUCCESS) req = reinterpret_cast<TransferReq>(id);
    return status;
}

Status Hixl::GetTransferStatus(const TransferReq &req, TransferStatus &status) {
    USABLE("GetTransferStatus");
    return impl_->engine.query(reinterpret_cast<uint64_t>(req), status);
}

Status Hixl::GetTransferStatus(const GetTransferStatusArgs &args, std::vector<TransferResult> &results) {
    USABLE("GetTransferStatus");
    return impl_->engine.query(args, results);
}

Status Hixl::SendNotify(const AscendString &remote_engine, const NotifyDesc &notify, int32_t timeout_in_millis) {
    USABLE("SendNotify");
    return impl_->engine.send_notify(remote_engine.GetString(), notify, timeout_in_millis);
}

Status Hixl::GetNotifies(std::vector<NotifyDesc> &notifies) {
    USABLE("GetNotifies");
    impl_->engine.take_notifies(notifies);
    return SUCCESS;
}

Status Hixl::GetCapability(FeatureType feature, int32_t &value) {
    const bool known = feature == FeatureType::AUTO_CONNECT || feature == FeatureType::CLIENT_SERVER_COMM;
    value = known ? 1 : 0;
    return SUCCESS;
}

}  // namespace hixl
