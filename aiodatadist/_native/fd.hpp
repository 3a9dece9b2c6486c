// SPDX-License-Identifier: Apache-2.0
// An owned file descriptor that does not survive fork.
//
// A forked child that keeps a link's sockets open would hide its parent's death from every peer. So each
// descriptor of the library is noted in a lock-free table, and the child closes them all before fork returns.
// From then on the child's native objects are inert: no lock of theirs may be taken, no thread of theirs exists.
#pragma once

#include <utility>

namespace adt {

bool in_forked_child();  // true in a child forked while an engine was open
void note_descriptor(int fd, bool ours);

// A member of each engine, for as long as it has threads or descriptors.
class EngineAlive {
  public:
    EngineAlive();
    ~EngineAlive();
    EngineAlive(const EngineAlive &) = delete;
    EngineAlive &operator=(const EngineAlive &) = delete;
};

class Fd {
  public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {
        if (fd_ >= 0) note_descriptor(fd_, true);
    }
    Fd(Fd &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd &operator=(Fd &&other) noexcept {
        if (this != &other) {
            reset();
            fd_ = std::exchange(other.fd_, -1);
        }
        return *this;
    }
    Fd(const Fd &) = delete;
    Fd &operator=(const Fd &) = delete;
    ~Fd() { reset(); }

    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }
    void reset();
    // Gives it away, to another Fd in the end: a forked child still closes it.
    int release() { return std::exchange(fd_, -1); }

  private:
    int fd_ = -1;
};

}  // namespace adt
