// SPDX-License-Identifier: Apache-2.0
// STAND-IN for tests, not Ascend software: memory, connections and the side that is connected to.
#include "engine.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "knobs.hpp"

namespace standin {

namespace {

using std::chrono::milliseconds;

struct Greeting {
    char magic[8];
    int32_t pid;
    uint32_t count;  // of the regions that follow
};
constexpr char kMagic[8] = {'H', 'I', 'X', 'L', 's', 't', 'n', 'd'};

// From a client: goodbye, or a notification whose texts follow. Each is answered by a byte.
struct Message {
    uint32_t kind;
    uint32_t name;
    uint32_t text;
};
constexpr uint32_t kGoodbye = 1, kNotify = 2;
constexpr size_t kMaxNotify = 1024, kMaxNotifies = 4096;

int milliseconds_until(Clock::time_point when) {
    const auto left = std::chrono::duration_cast<milliseconds>(when - Clock::now()).count() + 1;
    return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

// All of it before the deadline.
bool transmit(int fd, void *data, size_t size, bool send_it, Clock::time_point deadline) {
    auto *at = static_cast<char *>(data);
    while (size > 0) {
        const ssize_t n = send_it ? send(fd, at, size, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, at, size, MSG_DONTWAIT);
        if (n > 0) {
            at += n;
            size -= static_cast<size_t>(n);
            continue;
        }
        if (n == 0 || (errno != EAGAIN && errno != EINTR)) return false;
        pollfd waiting{fd, static_cast<short>(send_it ? POLLOUT : POLLIN), 0};
        if (errno == EAGAIN && poll(&waiting, 1, milliseconds_until(deadline)) == 0) {
            errno = ETIMEDOUT;
            return false;
        }
    }
    return true;
}

bool greet(int fd, std::vector<Region> regions, Clock::time_point deadline) {
    Greeting greeting{};
    std::memcpy(greeting.magic, kMagic, sizeof kMagic);
    greeting.pid = getpid();
    greeting.count = static_cast<uint32_t>(regions.size());
    return transmit(fd, &greeting, sizeof greeting, true, deadline) &&
           transmit(fd, regions.data(), regions.size() * sizeof(Region), true, deadline);
}

bool be_greeted(int fd, Greeting *greeting, std::vector<Region> *regions, Clock::time_point deadline) {
    if (!transmit(fd, greeting, sizeof *greeting, false, deadline)) return false;
    if (std::memcmp(greeting->magic, kMagic, sizeof kMagic) != 0 || greeting->count > (1u << 20)) return false;
    regions->resize(greeting->count);
    return transmit(fd, regions->data(), regions->size() * sizeof(Region), false, deadline);
}

socklen_t address_of(const std::string &ip, int port, sockaddr_storage *out) {
    std::memset(out, 0, sizeof *out);
    auto *v4 = reinterpret_cast<sockaddr_in *>(out);
    auto *v6 = reinterpret_cast<sockaddr_in6 *>(out);
    if (inet_pton(AF_INET, ip.c_str(), &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(static_cast<uint16_t>(port));
        return sizeof *v4;
    }
    if (inet_pton(AF_INET6, ip.c_str(), &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons(static_cast<uint16_t>(port));
        return sizeof *v6;
    }
    return 0;
}

// As the engine of the original checks when it connects.
bool retry_settings_fit() {
    const auto within = [](const char *name, int least, int most) {
        const char *text = std::getenv(name);
        return text == nullptr || (std::atoi(text) >= least && std::atoi(text) <= most);
    };
    return within("HCCL_RDMA_RETRY_CNT", 1, 7) && within("HCCL_RDMA_TIMEOUT", 5, 20);
}

}  // namespace

bool parse_engine(const std::string &text, std::string *ip, int *port) {
    std::string rest;
    if (!text.empty() && text[0] == '[') {
        const auto end = text.find(']');
        if (end == std::string::npos) return false;
        *ip = text.substr(1, end - 1);
        rest = text.substr(end + 1);
    } else {
        const auto colon = text.find(':');
        *ip = text.substr(0, colon);
        rest = colon == std::string::npos ? "" : text.substr(colon);
    }
    sockaddr_storage unused;
    if (address_of(*ip, 0, &unused) == 0) return false;
    *port = 0;
    if (rest.empty()) return true;
    if (rest[0] != ':' || rest.size() < 2 || rest.size() > 6) return false;
    if (rest.find_first_not_of("0123456789", 1) != std::string::npos) return false;
    *port = std::atoi(rest.c_str() + 1);
    return *port <= 65535;
}

Fd &Fd::operator=(Fd &&other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}

Fd::~Fd() {
    if (fd_ >= 0) close(fd_);
}

hixl::Status Engine::start() {
    std::string ip;
    int port = 0;
    if (!parse_engine(name_, &ip, &port)) return hixl::PARAM_INVALID;
    // Where the kernel lets only a chosen process in, the peers are let in: no network card would ask.
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    if (port > 0) {
        sockaddr_storage address;
        const socklen_t size = address_of(ip, port, &address);
        listener_ = Fd(socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        const int on = 1;
        setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(listener_.get(), reinterpret_cast<sockaddr *>(&address), size) != 0 || listen(listener_.get(), 512)) {
            return hixl::FAILED;
        }
        waker_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        server_ = std::thread([this] { serve(); });
    }
    worker_ = std::thread([this] { work(); });
    return hixl::SUCCESS;
}

Engine::~Engine() {
    std::vector<std::string> names;
    {
        std::lock_guard lock(mu_);
        for (const auto &[name, link] : links_) names.push_back(name);
    }
    for (const auto &name : names) disconnect(name, 1000);
    {
        std::lock_guard lock(mu_);
        over_ = true;
    }
    work_.notify_all();
    if (server_.joinable()) {
        const uint64_t one = 1;
        (void)!write(waker_.get(), &one, sizeof one);
        server_.join();
    }
    if (worker_.joinable()) worker_.join();
}

bool Engine::right_thread(const char *call) const {
    void *context = nullptr;
    if (knob(kAnyThread) != 0) return true;
    if (aclrtGetCurrentContext(&context) == 0 && context == context_) return true;
    violation(std::string(call) + " in a thread without the ACL context of Initialize");
    return false;
}

// Memory.

std::vector<Region> Engine::table() {
    std::vector<Region> regions;
    for (const auto &[handle, region] : memory_) regions.push_back(region);
    return regions;
}

hixl::Status Engine::add_memory(const hixl::MemDesc &mem, hixl::MemType type, hixl::MemHandle &handle) {
    for (const uint8_t byte : mem.reserved) {
        if (byte != 0) {
            violation("reserved bytes of MemDesc are not zero");
            return hixl::PARAM_INVALID;
        }
    }
    if (mem.addr == 0 || mem.len == 0 || (type != hixl::MEM_DEVICE && type != hixl::MEM_HOST)) {
        return hixl::PARAM_INVALID;
    }
    Region region{mem.addr, mem.len, mem.addr, static_cast<uint32_t>(type), 0};
    if (type == hixl::MEM_DEVICE) {
        region.alias = standin_device_alias(mem.addr, mem.len);
        if (region.alias == 0) return hixl::PARAM_INVALID;
    } else if (standin_touches_device(mem.addr, mem.len) != 0) {
        return hixl::PARAM_INVALID;
    }
    std::lock_guard lock(mu_);
    for (const auto &[number, there] : memory_) {
        if (there.address == region.address && there.size == region.size && there.type == region.type) {
            handle = reinterpret_cast<hixl::MemHandle>(number);
            return hixl::SUCCESS;
        }
        const bool apart = there.address + there.size <= mem.addr || mem.addr + mem.len <= there.address;
        if (!apart && there.type == region.type) return hixl::PARAM_INVALID;
    }
    if (memory_.size() >= static_cast<size_t>(knob(kMaxRegistrations))) return hixl::RESOURCE_EXHAUSTED;
    memory_[++last_handle_] = region;
    handle = reinterpret_cast<hixl::MemHandle>(last_handle_);
    count(kRegistrations);
    return hixl::SUCCESS;
}

hixl::Status Engine::remove_memory(hixl::MemHandle handle) {
    if (handle == nullptr) return hixl::PARAM_INVALID;
    std::lock_guard lock(mu_);
    const auto it = memory_.find(reinterpret_cast<uint64_t>(handle));
    if (it == memory_.end()) return hixl::SUCCESS;
    if (knob(kDeregisterConnected) == 0 && (clients_ > 0 || !links_.empty())) return hixl::FAILED;
    memory_.erase(it);
    return hixl::SUCCESS;
}

// Connections.

std::shared_ptr<Link> Engine::find(const std::string &remote) {
    const auto it = links_.find(remote);
    return it == links_.end() || it->second->closing ? nullptr : it->second;
}

hixl::Status Engine::connect(const std::string &remote, int32_t ms) {
    std::string ip;
    int port = 0;
    if (ms <= 0 || !parse_engine(remote, &ip, &port) || port == 0 || remote == name_ || !retry_settings_fit()) {
        return hixl::PARAM_INVALID;
    }
    const auto deadline = Clock::now() + milliseconds(ms);
    auto link = std::make_shared<Link>();
    link->peer = remote;
    {
        std::lock_guard lock(mu_);
        if (links_.count(remote) != 0) return hixl::ALREADY_CONNECTED;
        if (links_.size() >= static_cast<size_t>(knob(kMaxLinks))) return hixl::RESOURCE_EXHAUSTED;
        link->local = table();
    }
    for (const auto &region : link->local) {
        if (region.type == hixl::MEM_DEVICE) {
            // Over HCCS.
            if (const int64_t align = knob(kAlign); align > 0 && region.address % static_cast<uint64_t>(align) != 0) {
                return hixl::FAILED;
            }
        } else if (knob(kPinnedHost) != 0 && standin_is_pinned_host(region.address, region.size) == 0) {
            return hixl::FAILED;
        }
    }
    sockaddr_storage address;
    const socklen_t size = address_of(ip, port, &address);
    link->socket = Fd(socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int fd = link->socket.get();
    if (::connect(fd, reinterpret_cast<sockaddr *>(&address), size) != 0 && errno != EINPROGRESS) return hixl::FAILED;
    pollfd waiting{fd, POLLOUT, 0};
    if (poll(&waiting, 1, milliseconds_until(deadline)) <= 0) return hixl::TIMEOUT;
    Greeting greeting{};
    if (!greet(fd, link->local, deadline) || !be_greeted(fd, &greeting, &link->remote, deadline)) {
        return errno == ETIMEDOUT ? hixl::TIMEOUT : hixl::FAILED;
    }
    link->pid = greeting.pid;
    std::lock_guard lock(mu_);
    if (!links_.emplace(remote, link).second) return hixl::ALREADY_CONNECTED;
    count(kConnects);
    return hixl::SUCCESS;
}

hixl::Status Engine::disconnect(const std::string &remote, int32_t ms) {
    const auto deadline = Clock::now() + milliseconds(ms);
    std::unique_lock lock(mu_);
    const auto link = find(remote);
    if (!link) return hixl::NOT_CONNECTED;
    link->closing = true;
    if (const int64_t pause = knob(kDisconnectMs); pause > 0) {
        // What was given up goes on writing until this returns.
        moved_.wait_until(lock, Clock::now() + milliseconds(pause), [this] { return over_; });
    }
    link->stop = true;
    work_.notify_all();
    moved_.wait(lock, [&] { return touching_ != link.get(); });
    lock.unlock();
    Message goodbye{kGoodbye, 0, 0};
    char answer = 0;
    if (transmit(link->socket.get(), &goodbye, sizeof goodbye, true, deadline)) {
        transmit(link->socket.get(), &answer, 1, false, deadline);
    }
    lock.lock();
    for (auto it = requests_.begin(); it != requests_.end();) {
        auto &request = *it;
        if (request.link == link && request.status == hixl::TransferStatus::WAITING) {
            // The worst case of the rule: a last write at the last moment.
            if (request.stalling) write_late(request);
            request.status = hixl::TransferStatus::FAILED;
        }
        it = request.link == link && request.forgotten ? drop(it) : std::next(it);
    }
    links_.erase(remote);
    moved_.notify_all();
    count(kDisconnects);
    return hixl::SUCCESS;
}

// Notifications.

hixl::Status Engine::send_notify(const std::string &remote, const hixl::NotifyDesc &notify, int32_t ms) {
    Message message{kNotify, static_cast<uint32_t>(notify.name.GetLength()),
                    static_cast<uint32_t>(notify.notify_msg.GetLength())};
    if (message.name > kMaxNotify || message.text > kMaxNotify) return hixl::PARAM_INVALID;
    const auto deadline = Clock::now() + milliseconds(ms);
    std::lock_guard lock(mu_);
    const auto link = find(remote);
    if (!link) return hixl::NOT_CONNECTED;
    std::string bytes(reinterpret_cast<const char *>(&message), sizeof message);
    bytes.append(notify.name.GetString(), message.name).append(notify.notify_msg.GetString(), message.text);
    char taken = 0;
    if (!transmit(link->socket.get(), &bytes[0], bytes.size(), true, deadline) ||
        !transmit(link->socket.get(), &taken, 1, false, deadline)) {
        return errno == ETIMEDOUT ? hixl::TIMEOUT : hixl::FAILED;
    }
    return taken != 0 ? hixl::SUCCESS : hixl::RESOURCE_EXHAUSTED;
}

void Engine::take_notifies(std::vector<hixl::NotifyDesc> &notifies) {
    std::lock_guard lock(mu_);
    notifies.assign(notifies_.begin(), notifies_.end());
    notifies_.clear();
}

// The side that is connected to.

bool Engine::serve_client(Client &client) {
    const auto deadline = Clock::now() + milliseconds(5000);
    const int fd = client.socket.get();
    if (!client.linked) {
        Greeting greeting{};
        std::vector<Region> regions;
        if (!be_greeted(fd, &greeting, &regions, deadline)) return false;
        client.linked = true;
        client.greet_at = Clock::now() + milliseconds(knob(kConnectMs));
        std::lock_guard lock(mu_);
        ++clients_;
        return true;
    }
    Message message{};
    if (!transmit(fd, &message, sizeof message, false, deadline)) return false;
    char answer = 1;
    if (message.kind == kGoodbye) {
        {
            std::lock_guard lock(mu_);
            --clients_;
            client.linked = false;
        }
        transmit(fd, &answer, 1, true, deadline);
        return false;
    }
    if (message.kind != kNotify || message.name > kMaxNotify || message.text > kMaxNotify) return false;
    std::string text(message.name + message.text, '\0');
    if (!transmit(fd, &text[0], text.size(), false, deadline)) return false;
    {
        std::lock_guard lock(mu_);
        if (notifies_.size() < kMaxNotifies) {
            notifies_.push_back({hixl::AscendString(text.data(), message.name),
                                 hixl::AscendString(text.data() + message.name, message.text)});
        } else {
            answer = 0;
        }
    }
    return transmit(fd, &answer, 1, true, deadline);
}

void Engine::serve() {
    for (;;) {
        std::vector<pollfd> fds{{waker_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
        int timeout = -1;
        for (auto &client : served_) {
            fds.push_back({client.socket.get(), POLLIN, 0});
            if (client.greet_at == Clock::time_point{} || knob(kConnectStalls) != 0) continue;
            const int left = client.greet_at <= Clock::now() ? 0 : milliseconds_until(client.greet_at);
            timeout = timeout < 0 ? left : std::min(timeout, left);
        }
        poll(fds.data(), fds.size(), timeout);
        if (fds[0].revents != 0) break;
        size_t i = 2;
        for (auto it = served_.begin(); it != served_.end(); ++i) {
            bool alive = true;
            if (it->greet_at != Clock::time_point{} && it->greet_at <= Clock::now() && knob(kConnectStalls) == 0) {
                it->greet_at = {};
                std::vector<Region> regions;
                {
                    std::lock_guard lock(mu_);
                    regions = table();
                }
                alive = greet(it->socket.get(), std::move(regions), Clock::now() + milliseconds(5000));
            }
            if (alive && fds[i].revents != 0) alive = serve_client(*it);
            if (!alive && it->linked) {
                std::lock_guard lock(mu_);
                --clients_;
            }
            it = alive ? std::next(it) : served_.erase(it);
        }
        if (fds[1].revents != 0) {
            const int fd = accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
            if (fd >= 0) served_.push_back({Fd(fd), false, {}});
        }
    }
    served_.clear();
}

}  // namespace standin
