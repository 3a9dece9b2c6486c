// SPDX-License-Identifier: Apache-2.0
// What the transport hixl counts for the whole process.
#pragma once

#include <atomic>
#include <cstdint>

namespace adt {

struct HixlStats {
    std::atomic<uint64_t> engines{0};           // that are open
    std::atomic<uint64_t> registrations{0};     // that exist
    std::atomic<uint64_t> registered_bytes{0};  // of those
    std::atomic<uint64_t> connections{0};       // that exist, made from this side
    std::atomic<uint64_t> disconnects{0};       // connections that were ended, mostly to be made anew
    std::atomic<uint64_t> forced{0};            // of those, before what was under way had drained
    std::atomic<uint64_t> requests{0};          // handed to HIXL
    std::atomic<uint64_t> failures{0};          // of those, that HIXL said had failed
    std::atomic<uint64_t> polls{0};             // rounds in which HIXL was asked
};
HixlStats &hixl_stats();

}  // namespace adt
