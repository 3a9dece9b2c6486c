// SPDX-License-Identifier: Apache-2.0
// Threads of the library: named, and with every signal blocked, so that handlers run in the application's threads.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace adt {

template <typename Function>
std::thread start_thread(const char *name, Function &&function) {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread thread;
    try {
        thread = std::thread(std::forward<Function>(function));
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);  // no thread to be had: the caller keeps its signals
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread.native_handle(), name);
    return thread;
}

// Processors that this thread may run on.
inline unsigned usable_cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof(set), &set) != 0) return std::max(1U, std::thread::hardware_concurrency());
    return static_cast<unsigned>(CPU_COUNT(&set));
}

// For threads that others wake in the middle of a call. Where no core is idle, the kernel would let the one that wakes
// take the core of the one that posts: the event loop's, or a model's, which records a layer. Under this policy it
// waits for its turn, with the same share of time. A policy that somebody chose for the process is kept, and where the
// kernel refuses only that turn comes too early. 0: the calling thread. Returns whether the policy is another now.
inline bool yield_to_whoever_wakes(pid_t thread = 0) {
    const sched_param none{};
    return sched_getscheduler(thread) == SCHED_OTHER && sched_setscheduler(thread, SCHED_BATCH, &none) == 0;
}

// The calling thread is over with that.
inline void yield_no_more() {
    const sched_param none{};
    sched_setscheduler(0, SCHED_OTHER, &none);
}

}  // namespace adt
