// SPDX-License-Identifier: Apache-2.0
// The raw operations that `aiodatadist bench` holds the library against: the same scattered blocks moved by plain
// loops, without protocol, checks or safety. Not part of the engine; built into a module of its own.
//
// Everything blocks. Durations are nanoseconds; a negative result is a negated errno.
#pragma once

#include <cstddef>
#include <cstdint>

namespace adt {

// What makes this build unfit for measuring, or an empty string.
const char *build_fault();

// Blocks of `bytes` bytes: number i lies at base + index[i] * bytes. The caller has checked the bounds.
struct Blocks {
    uintptr_t base;
    const int64_t *index;
    size_t bytes;

    uintptr_t at(size_t i) const { return base + static_cast<size_t>(index[i]) * bytes; }
};

enum class CopyLoop : int { plain, stream, stream_prefetch };

// Whole pattern at once; each of `threads` threads takes a contiguous part of the list.
int64_t limit_copy(Blocks to, Blocks from, size_t count, unsigned threads, CopyLoop loop);
int64_t limit_process_vm(Blocks local, int pid, Blocks remote, size_t count, unsigned threads, unsigned iovecs,
                         bool write);
// One thread a connected stream socket. Both ends call this with lists of one length: the end that `asks` says go with
// one byte a stream, and is through when the last byte is where it belongs. Leaves the sockets ready for more.
int64_t limit_sockets(const int *fds, unsigned streams, Blocks local, size_t count, bool sends, bool asks);

// One block after the other, each timed; durations go to took[0..count). 0 or a negated errno.
int64_t limit_copy_each(Blocks to, Blocks from, size_t count, int64_t *took);
int64_t limit_process_vm_each(Blocks local, int pid, Blocks remote, size_t count, bool write, int64_t *took);
int64_t limit_socket_each(int fd, Blocks local, size_t count, bool sends, bool asks, int64_t *took);

}  // namespace adt
