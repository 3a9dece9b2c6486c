// SPDX-License-Identifier: Apache-2.0
// STAND-IN for tests, not Ascend software.
#include "knobs.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "published.hpp"

namespace standin {

namespace {

struct Setting {
    const char *name;
    int64_t usual;
    std::atomic<int64_t> value;
    std::atomic<bool> set;
};

Setting settings[kKnobs] = {
    {"BULK", 1, {1}, {false}},
    {"DELAY_US", 0, {0}, {false}},
    {"CONNECT_MS", 0, {0}, {false}},
    {"CONNECT_STALLS", 0, {0}, {false}},
    {"DISCONNECT_MS", 0, {0}, {false}},
    {"MAX_REGISTRATIONS", 4096, {4096}, {false}},
    {"MAX_LINKS", 512, {512}, {false}},
    {"MAX_REQUESTS", 4096, {4096}, {false}},
    {"ALIGN", 0, {0}, {false}},
    {"PINNED_HOST", 0, {0}, {false}},
    {"DEREGISTER_CONNECTED", 0, {0}, {false}},
    {"FAIL", 0, {0}, {false}},
    {"STALL", 0, {0}, {false}},
    {"STALL_MS", 0, {0}, {false}},
    {"QUERY_FAILS", 0, {0}, {false}},
    {"ANY_THREAD", 0, {0}, {false}},
    {"REUSE", 0, {0}, {false}},
};

constexpr const char *kCounterNames[kCounters] = {"registrations", "connects", "disconnects", "requests", "queries",
                                                  "bulk_queries",  "stalls",   "late_writes", "copied",   "violations"};
std::atomic<uint64_t> counters[kCounters];

// Never destroyed: threads may still complain at the end of the process.
std::mutex &violations_mu() {
    static auto *it = new std::mutex;
    return *it;
}

std::string &violations() {
    static auto *it = new std::string;
    return *it;
}

}  // namespace

int64_t knob(Knob which) {
    return settings[which].value;
}

bool hits(Knob which) {
    auto &value = settings[which].value;
    int64_t now = value;
    while (now > 0) {
        if (value.compare_exchange_weak(now, now - 1)) return now == 1;
    }
    return now < 0;
}

void read_environment() {
    for (auto &setting : settings) {
        if (setting.set) continue;
        const char *text = std::getenv((std::string("HIXL_STANDIN_") + setting.name).c_str());
        setting.value = text != nullptr ? std::atoll(text) : setting.usual;
    }
}

void count(Counter which, uint64_t more) {
    counters[which] += more;
}

void violation(const std::string &what) {
    count(kViolationsMade);
    std::fprintf(stderr, "HIXL stand-in: the caller breaks a rule: %s\n", what.c_str());
    if (const char *ends = std::getenv("HIXL_STANDIN_ABORT"); ends != nullptr && *ends == '1') std::abort();
    std::lock_guard lock(violations_mu());
    violations() += what + "\n";
}

}  // namespace standin

extern "C" {

void standin_reset() {
    for (auto &setting : standin::settings) setting.set = false;
    standin::read_environment();
}

int standin_set(const char *name, int64_t value) {
    for (auto &setting : standin::settings) {
        if (std::strcmp(setting.name, name) != 0) continue;
        setting.set = true;
        setting.value = value;
        return 0;
    }
    return -1;
}

uint64_t standin_count(const char *counter) {
    for (int i = 0; i < standin::kCounters; ++i) {
        if (std::strcmp(standin::kCounterNames[i], counter) == 0) return standin::counters[i];
    }
    return UINT64_MAX;
}

size_t standin_violations(char *buffer, size_t capacity) {
    std::lock_guard lock(standin::violations_mu());
    auto &text = standin::violations();
    const size_t size = std::min(capacity, text.size());
    std::memcpy(buffer, text.data(), size);
    text.clear();
    return size;
}

}  // extern "C"
