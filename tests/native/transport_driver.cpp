// SPDX-License-Identifier: Apache-2.0
// Uses transport.h directly, without the engine: a tiny host, two endpoints of each transport wired to each other in
// one process, and several threads that post, cancel, revoke, poll and disconnect at random. Run under the thread
// sanitizer; its own checks hold everywhere: data arrives, every batch completes, what is quiet stays as it is.
//
//   transport_driver [ROUNDS]
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "aiodatadist/transport.h"
#include "region.hpp"
#include "transports.hpp"

namespace {

constexpr uint64_t kBlock = 16 * 1024;
constexpr uint64_t kBlocks = 16;
constexpr uint32_t kTensors = 2;
constexpr adt_geometry_t kGeometry{kTensors, 0, kBlocks, kBlock, kBlock};
constexpr uint64_t kCache = 7;
constexpr unsigned kPosters = 3;
constexpr unsigned kBatchesEach = 40;

[[noreturn]] void fail(const std::string &what) {
    std::fprintf(stderr, "transport_driver: %s\n", what.c_str());
    std::abort();
}
void check(bool holds, const char *what) {
    if (!holds) fail(what);
}

// Memory of one side: library memory, so that shm maps it, or plain memory for process_vm.
struct Memory {
    explicit Memory(bool library) {
        if (library) {
            region = std::make_unique<adt::Region>(kTensors * kBlocks * kBlock);
        } else {
            plain.resize(kTensors * kBlocks * kBlock);
        }
        for (uint32_t t = 0; t < kTensors; ++t) tensors[t] = base() + t * kBlocks * kBlock;
    }
    char *base() { return region ? region->base() : plain.data(); }
    char *block(uint32_t tensor, uint64_t index) { return static_cast<char *>(tensors[tensor]) + index * kBlock; }

    std::unique_ptr<adt::Region> region;
    std::vector<char> plain;
    void *tensors[kTensors];
};

struct Side;

// One request that the owner's side serves.
struct Served {
    Side *side;
};

// A batch and what belongs to it, until it retires.
struct Posted {
    adt_batch_t batch{};
    std::vector<adt_chunk_t> chunks;
    std::mutex mu;
    std::condition_variable changed;
    bool quiet = false;
    bool retired = false;
    adt_status_t status = ADT_PENDING;
};

struct Side {
    explicit Side(bool library) : memory(library) {}
    Memory memory;
    adt_mem_h mem = nullptr;
    adt_endpoint_h endpoint = nullptr;
    adt_remote_h remote = nullptr;  // the other side's cache
    adt_path_t path{};
    std::atomic<int> serving{0};
    std::atomic<bool> lost{false};
};

// What the engine is to a transport, as little of it as will do.
class Host {
  public:
    explicit Host(const adt_transport_ops_t &ops) : ops_(ops) {
        table_.ctx = this;
        table_.notify = notify;
        table_.now_ns = now;
        table_.begin_serve = begin_serve;
        table_.end_serve = end_serve;
        table_.endpoint_lost = endpoint_lost;
        adt_open_params_t params{};
        params.struct_size = sizeof(params);
        params.threads = 2;
        params.host = &table_;
        check(ops.open(&params, &transport_) == ADT_OK, "open");
    }
    ~Host() { ops_.close(transport_); }
    Host(const Host &) = delete;
    Host &operator=(const Host &) = delete;

    adt_transport_h transport() const { return transport_; }

    // Polls are taken in whole, one after the other: a batch's two completions must keep their order.
    void poll() {
        const std::lock_guard<std::mutex> lock(poll_mu_);
        std::array<adt_completion_t, 16> done{};
        size_t n = 0;
        while ((n = ops_.poll(transport_, done.data(), done.size())) > 0) {
            for (size_t i = 0; i < n; ++i) take(done[i]);
        }
    }

  private:
    static void take(const adt_completion_t &done) {
        auto &posted = *reinterpret_cast<Posted *>(done.batch);
        const std::lock_guard<std::mutex> lock(posted.mu);
        check(!posted.retired, "a batch completed after it was retired");
        check(done.detached == 0 || !posted.quiet, "a batch was detached twice");
        if (!posted.quiet) posted.status = done.status;
        posted.quiet = true;
        posted.retired = done.detached == 0;
        posted.changed.notify_all();
    }

    static void notify(void *ctx, adt_transport_h) { static_cast<Host *>(ctx)->poll(); }
    static uint64_t now(void *) {
        return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
    }
    static adt_status_t begin_serve(void *, void *link, adt_request_t *request, void **token) {
        Side &side = *static_cast<Side *>(link);
        if (request->cache_id != kCache) return ADT_ERR_NOT_FOUND;
        for (uint32_t i = 0; i < request->count; ++i) {
            adt_chunk_t &chunk = request->chunks[i];
            if (chunk.remote_tensor >= kTensors || chunk.length > kBlocks * kBlock ||
                chunk.remote_offset > kBlocks * kBlock - chunk.length) {
                return ADT_ERR_BOUNDS;
            }
            chunk.local = static_cast<char *>(side.memory.tensors[chunk.remote_tensor]) + chunk.remote_offset;
        }
        ++side.serving;
        *token = new Served{&side};
        return ADT_OK;
    }
    static void end_serve(void *, void *token) {
        const std::unique_ptr<Served> served(static_cast<Served *>(token));
        --served->side->serving;
    }
    static void endpoint_lost(void *, void *link, adt_status_t, const char *) {
        static_cast<Side *>(link)->lost.store(true);
    }

    const adt_transport_ops_t &ops_;
    adt_host_t table_{};
    adt_transport_h transport_ = nullptr;
    std::mutex poll_mu_;
};

static_assert(offsetof(Posted, batch) == 0, "a completion's batch is the start of what was posted");

// Both sides of one link, in this process.
class Link {
  public:
    Link(Host &host, const adt_transport_ops_t &ops, bool library, unsigned connections)
        : host_(host), ops_(ops), sides_{std::make_unique<Side>(library), std::make_unique<Side>(library)} {
        std::vector<int> fds[2];
        for (unsigned i = 0; i < connections; ++i) {
            int pair[2];
            check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "socketpair");
            fds[0].push_back(pair[0]);
            fds[1].push_back(pair[1]);
        }
        const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
        check(pidfd >= 0, "pidfd_open");
        for (int i = 0; i < 2; ++i) {
            Side &side = *sides_[i];
            adt_memory_t memory{};
            memory.cache_id = kCache;
            memory.geometry = kGeometry;
            memory.tensors = side.memory.tensors;
            memory.access = ADT_REMOTE_READ | ADT_REMOTE_WRITE;
            if (side.memory.region) {
                memory.region_id = side.memory.region->id();
                memory.region_base = side.memory.region->base();
                memory.region_bytes = side.memory.region->bytes();
            }
            memory.placement = ADT_PLACEMENT_DEVICE;
            check(ops.reg_mem(host.transport(), &memory, &side.mem) == ADT_ERR_UNSUPPORTED, "reg_mem of a device");
            memory.placement = ADT_PLACEMENT_HOST;
            check(ops.reg_mem(host.transport(), &memory, &side.mem) == ADT_OK, "reg_mem");
            adt_connect_params_t params{};
            params.struct_size = sizeof(params);
            params.num_fds = connections;
            params.fds = fds[i].data();
            params.link = &side;
            params.peer_pid = getpid();
            params.peer_pidfd = pidfd;
            params.process_vm = 1;
            params.dialed = i == 0 ? 1 : 0;
            params.populate_bytes = 1 << 20;
            check(ops.connect(host.transport(), &params, &side.endpoint) == ADT_OK, "connect");
        }
        close(pidfd);
        for (int i = 0; i < 2; ++i) {
            Side &here = *sides_[i];
            Side &there = *sides_[1 - i];
            size_t size = 0;
            ops.export_key(host.transport(), there.mem, nullptr, 0, &size);
            std::string data(size, '\0');
            check(ops.export_key(host.transport(), there.mem, data.data(), data.size(), &size) == ADT_OK, "export_key");
            const adt_key_t key{data.data(), data.size(), there.memory.region ? there.memory.region->fd() : -1};
            check(ops.import_key(host.transport(), here.endpoint, kCache, &kGeometry, &key, &here.remote, &here.path) ==
                      ADT_OK,
                  "import_key");
        }
    }

    ~Link() {
        for (auto &side : sides_) {
            disconnect(*side);
            ops_.release_key(host_.transport(), side->remote);
            check(ops_.dereg_mem(host_.transport(), side->mem, nullptr) == ADT_OK, "dereg_mem");
            check(side->serving.load() == 0, "serving has not ended with the endpoint");
        }
    }
    Link(const Link &) = delete;
    Link &operator=(const Link &) = delete;

    Side &side(int i) { return *sides_[i]; }

    // Moves blocks `mine` of tensor `tensor`; `theirs` are those of the other side.
    void post(Side &side, Posted &posted, adt_opcode_t opcode, uint32_t tensor, const std::vector<uint64_t> &mine,
              const std::vector<uint64_t> &theirs, uint64_t op, bool loop_waits) {
        for (size_t i = 0; i < mine.size(); ++i) {
            posted.chunks.push_back({side.memory.block(tensor, mine[i]), theirs[i] * kBlock, tensor, kBlock});
        }
        adt_batch_t &batch = posted.batch;
        batch.opcode = opcode;
        batch.count = static_cast<uint32_t>(mine.size());
        batch.chunks = posted.chunks.data();
        batch.bytes = mine.size() * kBlock;
        batch.local_mem = side.mem;
        batch.remote = side.remote;
        batch.op_id = op;
        batch.loop_waits = loop_waits ? 1 : 0;
        batch.model_cpu = -1;
        adt_batch_t *const pointer = &batch;
        // As the engine does it: endpoints are guarded against disconnecting while they are used.
        const std::lock_guard<std::mutex> lock(endpoints_);
        batch.endpoint = side.endpoint;
        size_t taken = 0;
        if (side.endpoint == nullptr || ops_.post(host_.transport(), &pointer, 1, &taken) != ADT_OK || taken != 1) {
            const std::lock_guard<std::mutex> done(posted.mu);
            posted.quiet = posted.retired = true;
            posted.status = ADT_ERR_PEER_LOST;
        }
    }

    // Waits for a batch; short answers are received by whoever waits, as the loop would.
    void wait(Side &side, Posted &posted, bool retired) {
        for (;;) {
            {
                std::unique_lock<std::mutex> lock(posted.mu);
                const auto over = [&] { return retired ? posted.retired : posted.quiet; };
                if (over()) return;
                posted.changed.wait_for(lock, std::chrono::milliseconds(posted.batch.loop_waits != 0 ? 1 : 50), over);
                if (over()) return;
            }
            if (posted.batch.loop_waits != 0) {
                const std::lock_guard<std::mutex> lock(endpoints_);
                if (side.endpoint != nullptr) ops_.loop_progress(host_.transport(), side.endpoint);
            }
            host_.poll();
        }
    }

    void cancel(Side &side, uint64_t op) {
        const std::lock_guard<std::mutex> lock(endpoints_);
        if (side.endpoint != nullptr) ops_.cancel(host_.transport(), side.endpoint, op);
        host_.poll();
    }
    void revoke(Side &side) {
        const std::lock_guard<std::mutex> lock(endpoints_);
        if (side.endpoint != nullptr) ops_.revoke(host_.transport(), side.endpoint, 0, 0);
    }
    void take_over(Side &side) {
        const std::lock_guard<std::mutex> lock(endpoints_);
        if (side.endpoint != nullptr) ops_.take_over(host_.transport(), side.endpoint);
    }
    void disconnect(Side &side) {
        const std::lock_guard<std::mutex> lock(endpoints_);
        if (side.endpoint == nullptr) return;
        ops_.disconnect(host_.transport(), std::exchange(side.endpoint, nullptr));
        host_.poll();
    }

  private:
    Host &host_;
    const adt_transport_ops_t &ops_;
    std::mutex endpoints_;
    std::unique_ptr<Side> sides_[2];
};

// One poster's blocks on both sides are its own: block 4 * poster and the three after it.
void post_all(Link &link, int number, unsigned poster, uint64_t seed, bool short_too, std::atomic<uint64_t> &succeeded,
              std::atomic<uint64_t> &next_op) {
    Side &side = link.side(number);
    std::mt19937_64 random(seed);
    const uint32_t tensor = static_cast<uint32_t>(number);
    const uint64_t first = 4 * poster;
    for (unsigned round = 0; round < kBatchesEach; ++round) {
        const bool read = random() % 2 == 0;
        const size_t count = 1 + random() % 2;
        std::vector<uint64_t> mine;
        std::vector<uint64_t> theirs;
        for (size_t i = 0; i < count; ++i) {
            mine.push_back(first + i);
            theirs.push_back(first + 2 + i);
        }
        const char mark = static_cast<char>(random());
        if (!read) {
            for (const uint64_t block : mine) std::memset(side.memory.block(tensor, block), mark, kBlock);
        }
        const uint64_t op = next_op.fetch_add(1);
        auto posted = std::make_unique<Posted>();
        link.post(side, *posted, read ? ADT_READ : ADT_WRITE, tensor, mine, theirs, op, short_too && random() % 2 == 0);
        if (random() % 4 == 0) link.cancel(side, op);
        if (random() % 16 == 0) link.take_over(side);
        link.wait(side, *posted, false);
        adt_status_t status = ADT_OK;
        {
            const std::lock_guard<std::mutex> lock(posted->mu);
            status = posted->status;
        }
        // Quiet is a promise: what is written now stays.
        for (const uint64_t block : mine) std::memset(side.memory.block(tensor, block), 0x5a, kBlock);
        link.wait(side, *posted, true);
        for (const uint64_t block : mine) {
            const char *at = side.memory.block(tensor, block);
            for (uint64_t i = 0; i < kBlock; ++i) check(at[i] == 0x5a, "memory was written after quiet");
        }
        if (status == ADT_OK) ++succeeded;
    }
}

// Data goes there and comes back the same, with nobody else around.
void move_and_compare(Link &link, bool loop_waits) {
    for (const int number : {0, 1}) {
        Side &side = link.side(number);
        for (uint64_t i = 0; i < kBlock; ++i) side.memory.block(0, 0)[i] = static_cast<char>(i * 7 + 3);
        std::memset(side.memory.block(0, 1), 0, kBlock);
        Posted there;
        link.post(side, there, ADT_WRITE, 0, {0}, {9}, 1, loop_waits);
        link.wait(side, there, true);
        check(there.status == ADT_OK, "a write failed");
        Posted back;
        link.post(side, back, ADT_READ, 0, {1}, {9}, 2, loop_waits);
        link.wait(side, back, true);
        check(back.status == ADT_OK, "a read failed");
        check(std::memcmp(side.memory.block(0, 0), side.memory.block(0, 1), kBlock) == 0, "the bytes differ");
    }
}

void race(Host &host, const adt_transport_ops_t &ops, bool library, unsigned connections, uint64_t seed) {
    Link link(host, ops, library, connections);
    const bool short_too = connections >= 3;
    move_and_compare(link, false);
    if (short_too) move_and_compare(link, true);
    std::atomic<uint64_t> succeeded{0};
    std::atomic<uint64_t> next_op{100};
    std::atomic<bool> over{false};
    std::vector<std::thread> posters;
    for (const int number : {0, 1}) {
        for (unsigned poster = 0; poster < kPosters; ++poster) {
            posters.emplace_back([&, number, poster] {
                post_all(link, number, poster, seed * 100 + static_cast<unsigned>(number) * 10 + poster, short_too,
                         succeeded, next_op);
            });
        }
    }
    std::thread meddler([&] {
        std::mt19937_64 random(seed);
        while (!over.load()) {
            host.poll();
            if (random() % 8 == 0) link.revoke(link.side(static_cast<int>(random() % 2)));
            // Half of the links end in the middle, from either side.
            if (seed % 2 == 1 && succeeded.load() > 20) link.disconnect(link.side(static_cast<int>(seed / 2 % 2)));
            std::this_thread::yield();
        }
    });
    for (std::thread &poster : posters) poster.join();
    over.store(true);
    meddler.join();
    check(succeeded.load() > 0, "nothing was moved");
}

}  // namespace

int main(int argc, char **argv) {
    const uint64_t rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 4;
    for (const adt_transport_ops_t *ops : adt::kTransports) {
        check(ops->abi_version == ADT_ABI_VERSION && ops->struct_size == sizeof(*ops), "another version of the table");
        if (ops == &adt::kSimOps) continue;    // one thread drives it, with its network: see tests/engine_rig.py
        if (ops == &adt::kVerbsOps) continue;  // needs a device, and ends that talk: see tests/vm
        if (ops == &adt::kHixlOps) continue;   // needs an engine of HIXL, likewise: see tests/test_hixl.py
        adt_probe_t probe{};
        ops->probe(&probe);
        check(probe.usable == 1, probe.reason);
        Host host(*ops);
        const bool shm = ops == &adt::kShmOps;
        for (uint64_t seed = 0; seed < rounds; ++seed) {
            for (const bool library : {true, false}) {
                if (!shm && library) continue;  // one memory is like the other to it
                race(host, *ops, library, shm ? 0 : (seed % 2 == 0 ? 2 : 4), seed);
            }
        }
        std::printf("transport_driver: %s passed\n", ops->name);
    }
    return 0;
}
