// SPDX-License-Identifier: Apache-2.0
#include "copy.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "threads.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace adt {
namespace {

void copy_plain(char *dst, const char *src, size_t bytes) {
    std::memcpy(dst, src, bytes);
}

#if defined(__x86_64__)

// Below this a streaming copy's alignment head and tail cost more than the saved line reads.
constexpr size_t kStreamFrom = 512;

size_t align_head(char *&dst, const char *&src, size_t &bytes, size_t alignment) {
    const size_t head = (alignment - (reinterpret_cast<uintptr_t>(dst) & (alignment - 1))) & (alignment - 1);
    std::memcpy(dst, src, head);
    dst += head;
    src += head;
    bytes -= head;
    return head;
}

__attribute__((target("avx512f"))) void stream_avx512(char *dst, const char *src, size_t bytes) {
    if (bytes < kStreamFrom) return copy_plain(dst, src, bytes);
    align_head(dst, src, bytes, 64);
    for (; bytes >= 256; bytes -= 256, dst += 256, src += 256) {
        const __m512i a = _mm512_loadu_si512(src);
        const __m512i b = _mm512_loadu_si512(src + 64);
        const __m512i c = _mm512_loadu_si512(src + 128);
        const __m512i d = _mm512_loadu_si512(src + 192);
        _mm512_stream_si512(reinterpret_cast<__m512i *>(dst), a);
        _mm512_stream_si512(reinterpret_cast<__m512i *>(dst + 64), b);
        _mm512_stream_si512(reinterpret_cast<__m512i *>(dst + 128), c);
        _mm512_stream_si512(reinterpret_cast<__m512i *>(dst + 192), d);
    }
    std::memcpy(dst, src, bytes);
}

__attribute__((target("avx2"))) void stream_avx2(char *dst, const char *src, size_t bytes) {
    if (bytes < kStreamFrom) return copy_plain(dst, src, bytes);
    align_head(dst, src, bytes, 32);
    for (; bytes >= 128; bytes -= 128, dst += 128, src += 128) {
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(src));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(src + 32));
        const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(src + 64));
        const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(src + 96));
        _mm256_stream_si256(reinterpret_cast<__m256i *>(dst), a);
        _mm256_stream_si256(reinterpret_cast<__m256i *>(dst + 32), b);
        _mm256_stream_si256(reinterpret_cast<__m256i *>(dst + 64), c);
        _mm256_stream_si256(reinterpret_cast<__m256i *>(dst + 96), d);
    }
    std::memcpy(dst, src, bytes);
}

void stream_sse2(char *dst, const char *src, size_t bytes) {
    if (bytes < kStreamFrom) return copy_plain(dst, src, bytes);
    align_head(dst, src, bytes, 16);
    for (; bytes >= 64; bytes -= 64, dst += 64, src += 64) {
        const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i *>(src));
        const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(src + 16));
        const __m128i c = _mm_loadu_si128(reinterpret_cast<const __m128i *>(src + 32));
        const __m128i d = _mm_loadu_si128(reinterpret_cast<const __m128i *>(src + 48));
        _mm_stream_si128(reinterpret_cast<__m128i *>(dst), a);
        _mm_stream_si128(reinterpret_cast<__m128i *>(dst + 16), b);
        _mm_stream_si128(reinterpret_cast<__m128i *>(dst + 32), c);
        _mm_stream_si128(reinterpret_cast<__m128i *>(dst + 48), d);
    }
    std::memcpy(dst, src, bytes);
}

#endif

struct Kernel {
    CopyKernel copy;
    const char *name;
};

Kernel choose_kernel() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return {stream_avx512, "avx512-stream"};
    if (__builtin_cpu_supports("avx2")) return {stream_avx2, "avx2-stream"};
    return {stream_sse2, "sse2-stream"};
#else
    return {copy_plain, "memcpy"};
#endif
}

const Kernel &kernel() {
    static const Kernel chosen = choose_kernel();
    return chosen;
}

thread_local const CopyPool *copying_for = nullptr;  // the pool of this thread

// Moves this thread to another processor if it runs on this one. The kernel wakes a thread where it last ran, or beside
// the one that wakes it, if no processor is idle at that moment; and then it may stay there, sharing with a model that
// computes, while another idles (measured: up to a third of all layers, 0.5 ms each).
void leave_processor(int cpu) {
    if (cpu < 0 || sched_getcpu() != cpu) return;
    cpu_set_t all;
    CPU_ZERO(&all);
    if (sched_getaffinity(0, sizeof(all), &all) != 0 || !CPU_ISSET(cpu, &all) || CPU_COUNT(&all) < 2) return;
    cpu_set_t others = all;
    CPU_CLR(cpu, &others);
    if (sched_setaffinity(0, sizeof(others), &others) != 0) return;
    cpu_set_t now;
    // Unless somebody has given it others meanwhile.
    if (sched_getaffinity(0, sizeof(now), &now) == 0 && CPU_EQUAL(&now, &others))
        sched_setaffinity(0, sizeof(all), &all);
}

}  // namespace

CopyKernel stream_copy() {
    return kernel().copy;
}
const char *stream_copy_name() {
    return kernel().name;
}

void store_fence() {
#if defined(__x86_64__)
    _mm_sfence();
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);  // dmb ish on Arm
#endif
}

CopyPool::CopyPool(unsigned threads, Run run)
    : run_(std::move(run)), crowded_(threads > usable_cores()), places_(threads) {
    for (std::atomic<int> &place : places_) place.store(-1, std::memory_order_relaxed);
    threads_.reserve(threads);
    try {
        for (unsigned i = 0; i < threads; ++i) {
            threads_.push_back(start_thread("adt-copy", [this, i] {
                yield_to_whoever_wakes();
                work(i);
            }));
        }
    } catch (...) {
        stop();
        throw;
    }
}

CopyPool::~CopyPool() {
    stop();
}

void CopyPool::stop() {
    {
        const std::lock_guard<std::mutex> lock(mu_);
        stopping_ = true;
        background_.clear();
    }
    wake_.notify_all();
    for (std::thread &thread : threads_) thread.join();
}

void CopyPool::submit(adt_batch_t *const *batches, size_t count) {
    bool taken_here = false;
    {
        const std::lock_guard<std::mutex> lock(mu_);
        // A thread of the pool that posts is done with its own batch and looks into the queue next.
        taken_here = copying_for == this && count == 1 && queue_.empty();
        queue_.insert(queue_.end(), batches, batches + count);
    }
    if (taken_here) return;
    if (count == 1) {
        wake_.notify_one();
    } else {
        wake_.notify_all();
    }
}

void CopyPool::submit_background(std::function<bool()> step) {
    if (threads_.empty()) return;  // step mode: populating is only a matter of speed
    {
        const std::lock_guard<std::mutex> lock(mu_);
        background_.push_back(std::move(step));
    }
    wake_.notify_one();
}

bool CopyPool::run_one() {
    adt_batch_t *batch = nullptr;
    {
        const std::lock_guard<std::mutex> lock(mu_);
        if (queue_.empty()) return false;
        batch = queue_.front();
        queue_.pop_front();
    }
    run_(batch);
    return true;
}

// Moves this thread away from another one of the pool that copies on the same processor. Woken together, two may come
// to one queue, and stay there for a whole transfer while the other processor idles (docs/design.md). `lock`, on `mu_`,
// is let go of meanwhile. Returns whether it was.
bool CopyPool::spread(size_t number, std::unique_lock<std::mutex> &lock) {
    const int cpu = sched_getcpu();
    places_[number].store(cpu, std::memory_order_relaxed);
    if (crowded_) return false;
    for (size_t i = 0; i < places_.size(); ++i) {
        if (i == number || places_[i].load(std::memory_order_relaxed) != cpu) continue;
        // The other one would go as well, if it saw this one here until there is room elsewhere.
        places_[number].store(-1, std::memory_order_relaxed);
        lock.unlock();
        leave_processor(cpu);
        lock.lock();
        places_[number].store(sched_getcpu(), std::memory_order_relaxed);
        return true;
    }
    return false;
}

// Lets go of the processor once where a batch is left over for another thread that was woken and has not come: it may
// wait for this processor, and goes elsewhere as soon as it runs. Returns whether it did.
bool CopyPool::step_aside(std::unique_lock<std::mutex> &lock) {
    if (asleep_ == 0 || queue_.size() < 2 || std::exchange(stepped_aside_, true)) return false;
    lock.unlock();
    sched_yield();
    lock.lock();
    return true;
}

void CopyPool::work(size_t number) {
    copying_for = this;
    bool placed = false;  // for the next batch: with one try, because there may be no better place
    std::unique_lock<std::mutex> lock(mu_);
    for (;;) {
        if (!stopping_ && queue_.empty() && background_.empty()) {
            places_[number].store(-1, std::memory_order_relaxed);
            ++asleep_;
            stepped_aside_ = false;
            wake_.wait(lock, [this] { return stopping_ || !queue_.empty() || !background_.empty(); });
            --asleep_;
            placed = false;
        }
        // Before a batch is taken, which then waits for this thread alone. A layer's has a rule of its own.
        if (!placed && !queue_.empty() && queue_.front()->model_cpu < 0) {
            placed = true;
            if (spread(number, lock) || step_aside(lock)) continue;
        }
        if (!queue_.empty()) {
            adt_batch_t *batch = queue_.front();
            queue_.pop_front();
            placed = false;
            lock.unlock();
            if (batch->model_cpu >= 0) {
                leave_processor(batch->model_cpu);
                places_[number].store(sched_getcpu(), std::memory_order_relaxed);
            }
            run_(batch);
            lock.lock();
        } else if (stopping_) {
            return;
        } else {
            std::function<bool()> step = std::move(background_.front());
            background_.pop_front();
            lock.unlock();
            const bool more = step();
            lock.lock();
            // Dropped when the pool is closing: the mapping that the step holds must not outlive the close.
            if (more && !stopping_) background_.push_back(std::move(step));
        }
    }
}

}  // namespace adt
