// SPDX-License-Identifier: Apache-2.0
// Copy kernels, and the pool of threads that runs batches of copies.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "aiodatadist/transport.h"

namespace adt {

// Copies with stores that bypass the cache where the CPU has them: the copy threads move more than the caches
// hold, and a plain store would first read the line it overwrites. Follow with store_fence().
using CopyKernel = void (*)(char *dst, const char *src, size_t bytes);
CopyKernel stream_copy();
const char *stream_copy_name();

// Makes earlier streaming stores visible before anything that says "done" is published.
void store_fence();

// Touches the beginning of the next block ahead of its copy: the hardware's prefetcher starts anew in each page, and
// needs some lines to find the pattern. More lines than that displace what it does by itself (docs/design.md).
inline void prefetch_block(const char *start, size_t bytes) {
    constexpr size_t kAhead = 1024;
    for (size_t at = 0; at < std::min(bytes, kAhead); at += 64) __builtin_prefetch(start + at, 0, 0);
}

// Threads that run queued batches in order. Background work (populating mappings) runs only when no batch waits.
class CopyPool {
  public:
    using Run = std::function<void(adt_batch_t *)>;

    CopyPool(unsigned threads, Run run);
    ~CopyPool();  // joins; queued batches are run first, background work is dropped
    CopyPool(const CopyPool &) = delete;
    CopyPool &operator=(const CopyPool &) = delete;

    void submit(adt_batch_t *const *batches, size_t count);
    // `step` does one bounded piece and returns true while more is left.
    void submit_background(std::function<bool()> step);
    bool run_one();  // step mode: runs one queued batch in the calling thread

  private:
    void work(size_t number);
    void stop();
    bool spread(size_t number, std::unique_lock<std::mutex> &lock);
    bool step_aside(std::unique_lock<std::mutex> &lock);

    const Run run_;
    const bool crowded_;                    // more threads than processors: there is nowhere else to go
    std::vector<std::atomic<int>> places_;  // the processor on which each thread copies, or -1
    std::mutex mu_;
    std::condition_variable wake_;
    std::deque<adt_batch_t *> queue_;
    std::deque<std::function<bool()>> background_;
    unsigned asleep_ = 0;         // threads that wait, or were woken and had no processor since
    bool stepped_aside_ = false;  // for one of them
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace adt
