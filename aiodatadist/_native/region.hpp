// SPDX-License-Identifier: Apache-2.0
// Library memory: a memfd that same-host peers can map, and small checks on memory and processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "counted.hpp"
#include "fd.hpp"

namespace adt {

class Region : Counted<Live::region> {
  public:
    // Throws std::system_error. Sealed against shrinking, so that no peer's copy can die of SIGBUS.
    explicit Region(size_t bytes);
    ~Region();
    Region(const Region &) = delete;
    Region &operator=(const Region &) = delete;

    uint64_t id() const { return id_; }
    int fd() const { return fd_.get(); }
    char *base() const { return base_; }
    size_t bytes() const { return bytes_; }
    // Populates [at, at + step); false when the kernel refuses (then the first transfers are slower, no more).
    bool populate(size_t at, size_t step) const;

  private:
    uint64_t id_ = 0;
    Fd fd_;
    char *base_ = nullptr;
    size_t bytes_ = 0;
};

// 32 random bytes at a fixed address: a peer that reads them by process_vm has the right process and the right. They
// stay as long as the process's memory: a peer that does not find them any more knows that exec has replaced it.
struct Secret {
    static constexpr size_t kBytes = 32;
    static const Secret &of_process();
    Secret();
    unsigned char value[kBytes];
};

// Reads `bytes` at `address` of `pid` and compares. 0, an errno, or EBADMSG when they differ.
int probe_process_vm(int pid, uint64_t address, const void *expected, size_t bytes);
int allow_ptracer(long pid);  // prctl(PR_SET_PTRACER); 0 or an errno

}  // namespace adt
