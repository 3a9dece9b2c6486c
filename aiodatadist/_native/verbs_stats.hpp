// SPDX-License-Identifier: Apache-2.0
// What the transport verbs counts for the whole process, and the limits that tests may lower. Also there in builds
// without verbs.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace adt {

struct VerbsStats {
    std::atomic<uint64_t> registrations{0};         // that exist
    std::atomic<uint64_t> registered_bytes{0};      // of those
    std::atomic<uint64_t> registrations_made{0};    // since the start of the process
    std::atomic<uint64_t> registrations_shared{0};  // asked for, and there already
    std::atomic<uint64_t> queue_pairs{0};           // that exist
    std::atomic<uint64_t> rebuilds{0};              // queue pairs that were flushed and made anew
};
VerbsStats &verbs_stats();

// 0: what the device says. For tests: as if a device could do no more.
struct VerbsLimits {
    std::atomic<uint64_t> registration_bytes{0};
    std::atomic<uint64_t> message_bytes{0};
    std::atomic<uint32_t> sge{0};
    std::atomic<uint32_t> requests{0};
    std::atomic<uint32_t> stuck_queue_pairs{0};    // how often the device will not destroy one
    std::atomic<uint32_t> stuck_registrations{0};  // how often it will not take one back
};
VerbsLimits &verbs_limits();

// The device, port and address that a node would use: "name:port", the index of the address, and words for people.
// False: none, and why. `devices` in order of preference; empty: any.
bool choose_rdma(const std::vector<std::string> &devices, int32_t gid_index, std::string &device, int32_t &chosen,
                 std::string &words);

}  // namespace adt
