// SPDX-License-Identifier: Apache-2.0
// A gate says which layers of a model have been computed. Whoever computes records a layer, in any thread; the
// engine then posts that layer of every transfer that waits at the gate, in the recording thread itself. Nothing on
// this path waits for an event loop or for Python: a model thread may keep the GIL for as long as it likes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "counted.hpp"

namespace adt {

class Engine;

class Gate : Counted<Live::gate> {
  public:
    enum class Outcome : int { ok = 0, repeated, range, dropped };

    // One entry of the log: a layer in the order of its recording, or why none will come.
    struct Entry {
        uint32_t layer;
        bool failed;
        uint64_t at_ns;  // CLOCK_MONOTONIC, when the call began
        int32_t cpu;     // of the thread that called
    };

    explicit Gate(uint32_t layers) : state_(layers, State::open) {}

    uint32_t layers() const { return static_cast<uint32_t>(state_.size()); }
    bool recorded(uint32_t layer);
    uint32_t count();  // of recorded layers

    // The layer's memory is final: transfers may read it until they are done.
    Outcome record(uint32_t layer);
    // The layer will not come: transfers whose range holds it end with ADT_ERR_LAYER.
    Outcome fail(uint32_t layer);
    // Nobody can record any more: every layer that is still open fails.
    void drop();

    // An operation waits here from now on; it looks at the log from its start.
    void subscribe(const std::shared_ptr<Engine> &engine, uint64_t op);
    // It waits no more. A gate may outlive any number of operations, and is not to remember them.
    void leave(const Engine *engine, uint64_t op);
    size_t waiting();
    // Appends what was logged from entry `from` on.
    void read(size_t from, std::vector<Entry> &out);

  private:
    enum class State : uint8_t { open, recorded, failed };
    // Engines number their operations each by itself. In order, so that who came first is served first.
    using Waiter = std::pair<const Engine *, uint64_t>;
    Outcome log(uint32_t layer, bool failed);
    void tell();

    std::mutex mu_;  // a leaf: taken under Engine::mu_, and alone
    std::vector<State> state_;
    std::vector<Entry> log_;
    std::map<Waiter, std::weak_ptr<Engine>> waiters_;
    bool dropped_ = false;
};

// Whoever can record holds one. When the last is gone, so is every hope of the layers that are still open.
class Recorder {
  public:
    explicit Recorder(uint32_t layers) : gate_(std::make_shared<Gate>(layers)) {}
    ~Recorder() { gate_->drop(); }
    Recorder(const Recorder &) = delete;
    Recorder &operator=(const Recorder &) = delete;
    const std::shared_ptr<Gate> &gate() const { return gate_; }

  private:
    const std::shared_ptr<Gate> gate_;
};

// One-shot signals for C callbacks (transport.h, adt_layer_signal_t). The context is a number that is used once, not
// an address: a second call, or one after the release, finds nothing and does nothing.
uint64_t make_layer_signal(const std::shared_ptr<Recorder> &recorder, uint32_t layer);
void release_layer_signal(uint64_t context);
bool layer_signal_pending(uint64_t context);
uint64_t layer_signal_function();

}  // namespace adt
