// SPDX-License-Identifier: Apache-2.0
// Threads of the library: named, and with every signal blocked, so that handlers run in the application's threads.
#pragma once

#include <pthread.h>
#include <signal.h>

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

}  // namespace adt
