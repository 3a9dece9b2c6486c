// SPDX-License-Identifier: Apache-2.0
// Frames of a tcp data connection, little endian. Both ends may ask and answer on one connection; answers come in the
// order of the requests.
//
//   request   FrameHeader, count x FrameRun, and for a write the payload and a FrameTrailer
//   answer    FrameHeader, and for a successful read the payload and a FrameTrailer
//
// The trailer carries the sender's last word on the payload: a sender that must leave its memory before the payload is
// out finishes the frame from a filler page and says so there, instead of breaking the connection under the others.
#pragma once

#include <cstdint>

namespace adt {

enum class FrameType : uint8_t { read = 1, write = 2, read_done = 3, write_done = 4 };

struct FrameHeader {
    static constexpr uint32_t kMagic = 0x31465441;  // "ATF1"
    uint32_t magic;
    uint8_t type;
    uint8_t reserved8;
    uint16_t reserved16;
    int32_t status;    // answers
    uint32_t count;    // requests: runs that follow
    uint64_t seq;      // the request's number on this connection, repeated in the answer
    uint64_t cache;    // requests: cache of the receiver
    uint64_t op;       // requests: the initiator's operation
    uint64_t payload;  // bytes of payload that follow, or (read) that are asked for
    uint32_t epoch;    // requests: the newest fence of the receiver that the operation had seen
    uint32_t reserved32;
};
static_assert(sizeof(FrameHeader) == 56, "the wire format has no padding");

struct FrameRun {
    uint64_t offset;  // from the start of the tensor
    uint32_t tensor;
    uint32_t length;
};
static_assert(sizeof(FrameRun) == 16, "the wire format has no padding");

struct FrameTrailer {
    int32_t status;
    uint32_t reserved;
};
static_assert(sizeof(FrameTrailer) == 8, "the wire format has no padding");

// Checked before anything is allocated.
constexpr uint32_t kFrameMaxRuns = 1024;
constexpr uint64_t kFrameMaxPayload = 4u << 20;
constexpr uint32_t kMaxOutstanding = 64;  // requests that one side may leave unanswered on a connection

}  // namespace adt
