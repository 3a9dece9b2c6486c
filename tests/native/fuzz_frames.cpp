// SPDX-License-Identifier: Apache-2.0
// Fuzzes what a hostile peer can say to the engine: the frames of tcp data connections and the messages of the engine
// connection, in any order and cut anywhere, while this side transfers, cancels, fences, leases and closes.
//
// One input is a list of records, each an operation and its argument (see Victim::play). Whatever they are, at the end
// the engine must be quiet, every operation reported once, and memory that the peer may not write unchanged; memory it
// may not read must not show up in what it received; and what ended or was closed must stay as it was from then on.
//
// Built with libFuzzer, or with fuzz_main.cpp where there is none; always with sanitizers and AIODATADIST_DEBUG.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "engine.hpp"
#include "tcp_frame.hpp"

namespace {

using adt::Engine;
using adt::EventKind;
using adt::FrameHeader;
using adt::FrameRun;
using adt::FrameTrailer;
using adt::FrameType;

constexpr uint64_t kSecond = 1'000'000'000;
constexpr char kSecret[] = "\xc7\x5e\x99\x1b\xd3\x68\xf1\x2a";  // what the peer must never see
constexpr size_t kSecretBytes = 8;
constexpr size_t kMemory = 4096;
constexpr char kPublic = '\x11';
constexpr uint64_t kStrided = 1, kReadOnly = 2, kWriteOnly = 3, kHidden = 4, kOwn = 5, kRemote = 50;
constexpr uint64_t kCluster = 2;
constexpr uint64_t kOwnBlock = 64;
constexpr uint32_t kLayers = 3;  // the one in the middle has nothing to move

[[noreturn]] void fail(const char *what) {
    std::fprintf(stderr, "fuzz_frames: %s\n", what);
    std::abort();
}
void check(bool holds, const char *what) {
    if (!holds) fail(what);
}

class Input {
  public:
    Input(const uint8_t *data, size_t size) : at_(data), end_(data + size) {}
    bool more() const { return at_ < end_; }
    uint8_t byte() { return more() ? *at_++ : 0; }
    uint16_t word() {
        const unsigned low = byte();
        return static_cast<uint16_t>(low | static_cast<unsigned>(byte()) << 8);
    }
    std::string text(size_t size) {
        const size_t n = std::min(size, static_cast<size_t>(end_ - at_));
        std::string out(reinterpret_cast<const char *>(at_), n);
        at_ += n;
        return out;
    }

  private:
    const uint8_t *at_;
    const uint8_t *end_;
};

template <typename T>
void append(std::string &out, const T &value) {
    out.append(reinterpret_cast<const char *>(&value), sizeof(value));
}

// A node that owns caches, and the other end of the sockets of its one link.
class Victim {
  public:
    Victim() : engine_(std::make_shared<Engine>(Engine::Options{0, 0, true})), ring_(std::make_shared<adt::Ring>()) {
        node_ = engine_->open_node(1, ring_, kSecond, 60 * kSecond, 0, 0);
        for (size_t i = 0; i < kMemory; ++i) memory_[i] = kSecret[i % kSecretBytes];
        // Guards between all of them, and gaps between the blocks of the first.
        open(kStrided, 100, {2, 0, 4, 24, 40}, ADT_REMOTE_READ | ADT_REMOTE_WRITE);
        open(kReadOnly, 700, {1, 0, 4, 32, 32}, ADT_REMOTE_READ);
        open(kWriteOnly, 1000, {1, 0, 2, 100, 100}, ADT_REMOTE_WRITE);
        open(kHidden, 1500, {1, 0, 4, 32, 32}, 0);
        open(kOwn, 2000, {1, 0, 8, kOwnBlock, kOwnBlock}, 0);
        std::memset(&memory_[2000 + 4 * kOwnBlock], kPublic, 2 * kOwnBlock);  // what this side pushes
        before_ = memory_;
        connect();
    }

    void play(Input &in) {
        while (in.more()) {
            const uint8_t op = in.byte();
            switch (op & 0x0f) {
                case 0:
                case 1:
                    send(data_[op & 1], in.text(in.word()));
                    break;
                case 2:
                    send(wire_, in.text(in.byte()));
                    break;
                case 3:
                    send(data_[op >> 7], request(in));
                    break;
                case 4:
                    send(data_[op >> 7], answer(in));
                    break;
                case 5:
                    send(wire_, message(in));
                    break;
                case 6:
                    start(ADT_READ, in.byte());
                    break;
                case 7:
                    start(ADT_WRITE, in.byte());
                    break;
                case 8:
                    if (!running_.empty()) engine_->cancel(*running_.begin());
                    break;
                case 9:
                    engine_->fence(peer_);
                    break;
                case 10: {
                    const size_t which = in.byte() % locals_.size();
                    engine_->close_cache(node_, locals_[which]);
                    break;
                }
                case 11:
                    engine_->step(in.byte() * (kSecond / 16));
                    break;
                case 12:
                    engine_->ping(peer_);
                    break;
                case 13: {
                    const int fd = in.byte() % 3 == 2 ? wire_ : data_[op >> 7];
                    shutdown(fd, SHUT_WR);
                    break;
                }
                case 14: {
                    const uint8_t what = in.byte();  // first: compilers differ in the order of arguments
                    rarely(what, in.byte());
                    break;
                }
                case 15:
                    look();
                    break;
            }
            if ((op & 0x10) == 0) {
                engine_->step(1000);
                listen();
            }
        }
        look();
    }

    void end() {
        engine_->abort_node(node_);
        for (int turn = 0; !engine_->node_quiet(node_); ++turn) {
            check(turn < 10'000, "the node does not become quiet");
            engine_->step(kSecond / 4);
            listen();
        }
        look();
        check(running_.empty(), "an operation was never reported");
        for (auto &cache : locals_) engine_->close_cache(node_, cache);
        look();
        const std::array<char, kMemory> quiet = memory_;
        engine_->close_node(node_);
        for (const int fd : {wire_, data_[0], data_[1]}) close(fd);
        for (int turn = 0; turn < 2; ++turn) engine_->step(2 * kSecond);
        check(quiet == memory_, "memory was touched after quiet");
        check(received_.find(kSecret, 0, kSecretBytes) == std::string::npos || told_secret_,
              "the peer received what it may not read");
    }

  private:
    void open(uint64_t id, size_t at, const adt_geometry_t &geometry, uint32_t access) {
        std::vector<void *> tensors;
        const size_t extent = (geometry.num_blocks - 1) * geometry.block_stride + geometry.block_bytes;
        for (uint32_t t = 0; t < geometry.num_tensors; ++t) {
            const size_t base = at + t * (extent + 32);
            tensors.push_back(&memory_[base]);
            for (uint64_t b = 0; b < geometry.num_blocks; ++b) {
                const size_t block = base + b * geometry.block_stride;
                if ((access & ADT_REMOTE_READ) != 0) std::memset(&memory_[block], kPublic, geometry.block_bytes);
                if ((access & ADT_REMOTE_WRITE) == 0) continue;
                for (uint64_t i = 0; i < geometry.block_bytes; ++i) writer_[block + i] = static_cast<uint8_t>(id);
            }
        }
        adt_memory_t memory{};
        memory.cache_id = id;
        memory.geometry = geometry;
        memory.tensors = tensors.data();
        memory.access = access;
        std::shared_ptr<adt::LocalCache> cache;
        std::string error;
        check(engine_->register_cache(node_, memory, cache, error) == ADT_OK, "register_cache");
        locals_.push_back(std::move(cache));
    }

    void connect() {
        adt::ConnectRequest request;
        int pair[2];
        const auto wired = [&](int &here) {
            check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "socketpair");
            here = pair[0];
            fcntl(here, F_SETFL, O_NONBLOCK);
            return pair[1];
        };
        request.wire = wired(wire_);
        request.cluster = kCluster;
        for (int &fd : data_) request.data.push_back(wired(fd));
        for (unsigned i = 0; i < adt::kTransportCount; ++i) request.use[i] = adt::kTransports[i] == &adt::kTcpOps;
        std::string error;
        check(engine_->connect(node_, request, peer_, error) == ADT_OK, "connect");
        const adt_geometry_t geometry{1, 0, 8, kOwnBlock, kOwnBlock};
        for (unsigned i = 0; i < adt::kTransportCount; ++i) {
            if (!request.use[i]) continue;
            const adt_key_t key{nullptr, 0, -1};
            check(engine_->import_cache(peer_, kRemote, geometry, i, key, remote_, error) == ADT_OK, "import_cache");
        }
    }

    void send(int fd, const std::string &text) {
        told_secret_ |= text.find(kSecret, 0, kSecretBytes) != std::string::npos;
        size_t at = 0;
        for (int turn = 0; at < text.size() && turn < 64; ++turn) {
            const ssize_t n = ::send(fd, text.data() + at, text.size() - at, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n > 0) {
                at += static_cast<size_t>(n);
                continue;
            }
            engine_->step(1000);
            listen();
        }
    }

    void listen() {
        static char buffer[65536];
        for (const int fd : {wire_, data_[0], data_[1]}) {
            ssize_t n = 0;
            while ((n = recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT)) > 0)
                received_.append(buffer, static_cast<size_t>(n));
            received_.push_back('|');
        }
        if (received_.size() > (1u << 20)) received_.erase(0, received_.size() - (1u << 18));
    }

    void rarely(uint8_t what, uint8_t argument) {
        const uint64_t lease = argument % 4;
        switch (what % 8) {
            case 0:
                engine_->disconnect(peer_, ADT_ERR_CLOSED);
                break;
            case 1:
                engine_->adopt_lease(peer_, lease);
                break;
            case 2:
                engine_->release_lease(peer_, lease);
                break;
            case 3:
            case 4: {
                const uint64_t cluster = kCluster + (what >> 7);
                engine_->hold(node_, lease, 1u + argument % 5u, (what & 8) != 0 ? nullptr : &cluster, kSecond);
                break;
            }
            case 5:
                engine_->end_lease(node_, lease);
                break;
            case 6:
                if ((argument & 0x80) != 0) {
                    record(argument);
                } else {
                    engine_->end_leases(node_);
                }
                break;
            case 7:
                engine_->release_cache(remote_);
                break;
        }
    }

    // What a gate that some operation waits at says next.
    void record(uint8_t what) {
        if (gates_.empty()) return;
        const size_t which = (what >> 2) % 8 % gates_.size();
        if ((what & 0x40) != 0) {
            gates_.erase(gates_.begin() + static_cast<std::ptrdiff_t>(which));
        } else if ((what & 2) != 0) {
            gates_[which]->gate()->fail(2 * (what & 1u));
        } else {
            gates_[which]->gate()->record(2 * (what & 1u));
        }
    }

    // A request with a sound header, so that inputs get past it.
    std::string request(Input &in) {
        const uint8_t what = in.byte();
        const bool write = (what & 1) != 0;
        const uint8_t number = in.byte();
        const uint64_t cache = number & 7u;
        const size_t count = 1 + (number >> 3) % 6;
        std::string runs;
        uint64_t bytes = 0;
        for (size_t i = 0; i < count; ++i) {
            FrameRun run{};
            run.tensor = in.byte() % 4;
            run.offset = (what & 2) != 0 ? in.word() : in.byte();
            run.length = in.byte();
            if ((what & 4) != 0) run.offset = uint64_t{0} - run.offset;
            bytes += run.length;
            append(runs, run);
        }
        FrameHeader header{};
        header.magic = FrameHeader::kMagic;
        header.type = static_cast<uint8_t>(write ? FrameType::write : FrameType::read);
        header.count = static_cast<uint32_t>(count);
        header.seq = in.byte();
        header.cache = cache;
        header.op = in.byte();
        header.payload = bytes;
        header.epoch = what >> 5;
        std::string out;
        append(out, header);
        out += runs;
        if (write) {
            out.append(bytes, static_cast<char>(in.byte()));
            append(out, FrameTrailer{(what & 8) != 0 ? static_cast<int32_t>(in.byte()) - 128 : 0, 0});
        }
        return (what & 16) != 0 ? out.substr(0, in.byte()) : out;
    }

    static std::string answer(Input &in) {
        const uint8_t what = in.byte();
        FrameHeader header{};
        header.magic = FrameHeader::kMagic;
        header.type = static_cast<uint8_t>((what & 1) != 0 ? FrameType::write_done : FrameType::read_done);
        header.seq = 1u + (what >> 4);
        header.status = (what & 2) != 0 ? static_cast<int32_t>(in.byte()) - 128 : ADT_OK;
        const size_t blocks = (what >> 2) & 3u;
        header.payload = blocks * kOwnBlock;
        std::string out;
        append(out, header);
        if (blocks > 0) {
            out.append(blocks * kOwnBlock, static_cast<char>(in.byte()));
            append(out, FrameTrailer{static_cast<int32_t>(in.byte()) % 3 - 1, 0});
        }
        return out;
    }

    static std::string message(Input &in) {
        adt::WireMessage message{};
        message.type = in.byte() % 16;  // the last ones are unknown
        message.flags = in.byte();
        message.status = static_cast<int8_t>(in.byte());
        message.opcode = in.byte();
        message.a = in.byte();
        message.b = in.byte();
        message.c = uint64_t{in.word()} << in.byte() % 48;
        std::string out;
        append(out, message);
        return out;
    }

    void start(adt_opcode_t opcode, uint8_t what) {
        if (running_.size() >= 8) return;
        const int64_t into[2] = {1, 3};
        const int64_t from[2] = {4, 5};
        const int64_t there[2] = {what % 8, (what + 1) % 8};
        adt::TransferRequest request;
        request.local = locals_.back();
        request.remote = remote_;
        request.opcode = opcode;
        request.local_side.blocks = opcode == ADT_READ ? into : from;
        request.remote_side.blocks = there;
        request.count = 1u + (what >> 4) % 2;
        request.num_tensors = 1;
        request.timeout_ns = (what & 8) != 0 ? kSecond : 0;
        request.allow_inline = false;
        request.cookie = this;
        const bool layered = opcode == ADT_WRITE && (what & 0x80) != 0;
        const adt::SubmitResult result = layered ? start_layers(request, what) : engine_->submit(request);
        if (result.status != ADT_PENDING) return;
        running_.insert(result.op);
        if (opcode != ADT_READ) return;
        reading_.insert(result.op);
        for (uint64_t i = 0; i < kOwnBlock; ++i) {
            writer_[2000 + kOwnBlock + i] = writer_[2000 + 3 * kOwnBlock + i] = static_cast<uint8_t>(kOwn);
        }
    }

    // Two layers of the same blocks, and one between them.
    adt::SubmitResult start_layers(const adt::TransferRequest &request, uint8_t what) {
        gates_.push_back(std::make_shared<adt::Recorder>(kLayers));
        if (gates_.size() > 8) gates_.erase(gates_.begin());
        adt::LayerRequest wanted;
        wanted.gate = gates_.back()->gate();
        wanted.gate->record(1);
        if ((what & 0x40) != 0) wanted.gate->record(2 * ((what >> 5) & 1u));
        wanted.tensors = {{0, 0, 0}, {0, 0, 0}};
        wanted.starts = {0, 1, 1, 2};
        wanted.remote_view = {1, 0, 8, kOwnBlock, kOwnBlock};
        return engine_->submit_layers(request, wanted);
    }

    // Takes the events, and compares memory: what could be written until now may be written no more once its event says
    // that it is quiet.
    void look() {
        compare();
        std::vector<adt::Event> events;
        ring_->take(events);
        for (const adt::Event &event : events) {
            if (event.kind == EventKind::transfer_done) {
                check(event.cookie == this, "a foreign cookie");
                check(running_.erase(event.token) == 1, "an operation was reported twice");
                if (reading_.erase(event.token) == 1 && reading_.empty()) freeze(kOwn);
            } else if (event.kind == EventKind::layer_done) {
                check(event.cookie == this && event.token < kLayers && !running_.empty(), "a foreign layer");
            } else if (event.kind == EventKind::layer_arrived) {
                check(event.cache == kStrided || event.cache == kWriteOnly, "a layer arrived where none can");
                check(event.bytes < 2 && event.status >= 0, "a layer arrived that is not there");
            } else if (event.kind == EventKind::cache_quiet) {
                freeze(static_cast<uint8_t>(event.cache));
            }
        }
    }

    void compare() const {
        for (size_t i = 0; i < kMemory; ++i) {
            check(writer_[i] != 0 || memory_[i] == before_[i], "memory was written that may not be");
        }
    }

    void freeze(uint64_t cache) {
        for (size_t i = 0; i < kMemory; ++i) {
            if (writer_[i] != cache) continue;
            writer_[i] = 0;
            before_[i] = memory_[i];
        }
    }

    std::shared_ptr<Engine> engine_;
    std::shared_ptr<adt::Ring> ring_;
    std::shared_ptr<adt::Node> node_;
    std::shared_ptr<adt::Peer> peer_;
    std::shared_ptr<adt::RemoteCache> remote_;
    std::vector<std::shared_ptr<adt::LocalCache>> locals_;
    std::array<char, kMemory> memory_{};
    std::array<char, kMemory> before_{};
    std::array<uint8_t, kMemory> writer_{};  // the cache through which a byte may be written right now, or 0
    std::set<uint64_t> running_;
    std::set<uint64_t> reading_;
    std::vector<std::shared_ptr<adt::Recorder>> gates_;
    int wire_ = -1;
    int data_[2] = {-1, -1};
    std::string received_;
    bool told_secret_ = false;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    {
        Victim victim;
        Input in(data, size);
        victim.play(in);
        victim.end();
    }
    for (unsigned kind = 0; kind < adt::kLiveCount; ++kind) {
        if (adt::live_count(kind) == 0) continue;
        std::fprintf(stderr, "fuzz_frames: %s left over\n", adt::kLiveNames[kind]);
        std::abort();
    }
    return 0;
}
