// SPDX-License-Identifier: Apache-2.0
// STAND-IN for tests, not Ascend software: one engine. It listens on a TCP port, where clients fetch the table of its
// registered memory; transfers then touch that memory by process_vm_readv and process_vm_writev, as a network card
// would: without a word to the owner, and for as long as the connection lasts.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>
#include <string>
#include <thread>

#include "published.hpp"

namespace standin {

using Clock = std::chrono::steady_clock;
enum class Kind { client_server, hccl_comm, fabric };

// A registration as it goes over the wire, too.
struct Region {
    uint64_t address;
    uint64_t size;
    uint64_t alias;  // where its bytes are in the owner's process
    uint32_t type;
    uint32_t reserved;
};

class Fd {
  public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {}
    Fd(Fd &&other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
    Fd &operator=(Fd &&other) noexcept;
    ~Fd();
    int get() const { return fd_; }

  private:
    int fd_ = -1;
};

// This side's outgoing connection to a peer, with what both had registered when it was made.
struct Link {
    std::string peer;
    Fd socket;
    int32_t pid = 0;
    std::vector<Region> local, remote;
    bool broken = false;   // a failed transfer latches it
    bool closing = false;  // being disconnected
    bool stop = false;     // nothing may be touched any more
};

struct Request {
    uint64_t id = 0;
    const void *user_data = nullptr;
    std::shared_ptr<Link> link;
    hixl::TransferOp op = hixl::READ;
    std::vector<hixl::TransferOpDesc> descs;
    Clock::time_point due;
    bool fails = false;
    bool stalls = false;    // is to
    bool stalling = false;  // does: half of it has been moved
    Clock::time_point stalls_until;
    bool forgotten = false;  // of a TransferSync that timed out: nobody asks
    hixl::TransferStatus status = hixl::TransferStatus::WAITING;
};

class Engine {
  public:
    Engine(std::string name, Kind kind, void *context) : name_(std::move(name)), kind_(kind), context_(context) {}
    ~Engine();
    hixl::Status start();

    hixl::Status add_memory(const hixl::MemDesc &mem, hixl::MemType type, hixl::MemHandle &handle);
    hixl::Status remove_memory(hixl::MemHandle handle);
    hixl::Status connect(const std::string &remote, int32_t ms);
    hixl::Status disconnect(const std::string &remote, int32_t ms);
    hixl::Status post(const std::string &remote, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &descs,
                      const void *user_data, uint64_t *id);
    hixl::Status transfer(const std::string &remote, hixl::TransferOp op,
                          const std::vector<hixl::TransferOpDesc> &descs, int32_t ms);
    hixl::Status query(uint64_t id, hixl::TransferStatus &status);
    hixl::Status query(const hixl::GetTransferStatusArgs &args, std::vector<hixl::TransferResult> &results);
    hixl::Status send_notify(const std::string &remote, const hixl::NotifyDesc &notify, int32_t ms);
    void take_notifies(std::vector<hixl::NotifyDesc> &notifies);
    // The rule: the thread that initialised, or one that shares its ACL context.
    bool right_thread(const char *call) const;

  private:
    struct Client {
        Fd socket;
        bool linked = false;
        Clock::time_point greet_at;  // when the answer to its greeting goes
    };

    void serve();
    bool serve_client(Client &client);
    void work();
    hixl::TransferStatus carry_out(Request &request, std::unique_lock<std::mutex> &lock);
    using Requests = std::list<Request>;
    Requests::iterator look_up(uint64_t id);
    Requests::iterator drop(Requests::iterator it);
    std::vector<Region> table();
    std::shared_ptr<Link> find(const std::string &remote);

    const std::string name_;
    const Kind kind_;
    void *const context_;

    std::mutex mu_;
    std::condition_variable work_;   // the worker has something to do
    std::condition_variable moved_;  // a request changed, or the worker has left memory
    std::map<uint64_t, Region> memory_;
    uint64_t last_handle_ = 0;
    std::map<std::string, std::shared_ptr<Link>> links_;
    std::list<Request> requests_;  // in the order of submission
    uint64_t last_id_ = 0;
    std::vector<uint64_t> freed_;     // handles of requests that are over, to be given out again
    const Link *touching_ = nullptr;  // whose memory the worker is at
    size_t clients_ = 0;
    std::deque<hixl::NotifyDesc> notifies_;
    bool over_ = false;

    Fd listener_;
    Fd waker_;
    std::list<Client> served_;  // of the serving thread
    std::thread worker_, server_;
};

// What a stalled request still does: junk over the first bytes of each destination.
void write_late(const Request &request);
// Whether this range is part of one region; where its bytes are.
const Region *locate(const std::vector<Region> &regions, uint64_t address, uint64_t size);
// "ip:port", "[v6]:port", or without a port (0).
bool parse_engine(const std::string &text, std::string *ip, int *port);

}  // namespace standin
