// SPDX-License-Identifier: Apache-2.0
// STAND-IN for tests, not Ascend software: what is switched (README.md lists it), counted and complained about.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace standin {

enum Knob {
    kBulk,
    kDelayUs,
    kConnectMs,
    kConnectStalls,
    kDisconnectMs,
    kMaxRegistrations,
    kMaxLinks,
    kMaxRequests,
    kAlign,
    kPinnedHost,
    kDeregisterConnected,
    kFail,
    kStall,
    kStallMs,
    kQueryFails,
    kAnyThread,
    kReuse,
    kKnobs
};

enum Counter {
    kRegistrations,  // made
    kConnects,       // that succeeded, on the side that asked
    kDisconnects,    // that have returned
    kRequests,       // posted
    kQueries,        // calls of either kind
    kBulkQueries,
    kStalls,      // requests that began to stall
    kLateWrites,  // of stalled requests
    kCopied,      // bytes
    kViolationsMade,
    kCounters
};

int64_t knob(Knob which);
// Counts down a knob that says how many events there are still to go; true for the one that is meant. -1: all are.
bool hits(Knob which);
// Takes over what the environment says, except for what standin_set has set.
void read_environment();
void count(Counter which, uint64_t more = 1);
void violation(const std::string &what);

}  // namespace standin
