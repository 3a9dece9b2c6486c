# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, freethreading_compatible=False
"""What `aiodatadist bench` holds the library against: raw copies, process_vm and sockets over the same blocks.

The GIL is released in all of it. Memory comes as addresses, and blocks as the address of an array of int64: the caller
has checked the bounds and keeps everything alive. Durations are nanoseconds. What the kernel refuses is an OSError.
"""
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uintptr_t

import os

cdef extern from "limits.hpp" namespace "adt" nogil:
    const char *c_build_fault "adt::build_fault"()

    cdef cppclass Blocks:
        uintptr_t base
        const int64_t *index
        size_t bytes

    cdef enum class CopyLoop(int):
        plain
        stream
        stream_prefetch

    int64_t limit_copy(Blocks, Blocks, size_t count, unsigned threads, CopyLoop) except +
    int64_t limit_process_vm(Blocks, int pid, Blocks, size_t count, unsigned threads, unsigned iovecs, bint) except +
    int64_t limit_sockets(const int *fds, unsigned streams, Blocks, size_t count, bint sends, bint asks) except +
    int64_t limit_copy_each(Blocks, Blocks, size_t count, int64_t *took) except +
    int64_t limit_process_vm_each(Blocks, int pid, Blocks, size_t count, bint write, int64_t *took) except +
    int64_t limit_socket_each(int fd, Blocks, size_t count, bint sends, bint asks, int64_t *took) except +

cdef enum:
    MAX_STREAMS = 64

_LOOPS = ("memcpy", "stream", "stream-prefetch")


cdef Blocks blocks_of(uintptr_t base, uintptr_t index, size_t size):
    cdef Blocks blocks
    blocks.base = base
    blocks.index = <const int64_t *>index
    blocks.bytes = size
    return blocks


cdef int64_t checked(int64_t result) except -1:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def build_fault():
    """Return what makes this build unfit for measuring, or an empty string."""
    return c_build_fault().decode()


def copy(uintptr_t to, uintptr_t to_blocks, uintptr_t source, uintptr_t source_blocks, size_t count, size_t size, *,
         unsigned threads, str loop):
    """Copy `count` blocks of `size` bytes within this process; return the nanoseconds."""
    cdef CopyLoop chosen = <CopyLoop><int>_LOOPS.index(loop)
    cdef Blocks there = blocks_of(to, to_blocks, size), here = blocks_of(source, source_blocks, size)
    cdef int64_t took
    with nogil:
        took = limit_copy(there, here, count, threads, chosen)
    return checked(took)


def process_vm(uintptr_t local, uintptr_t local_blocks, int pid, uintptr_t remote, uintptr_t remote_blocks,
               size_t count, size_t size, *, unsigned threads, unsigned iovecs, bint write):
    """Read blocks of another process, or write them there; return the nanoseconds."""
    cdef Blocks here = blocks_of(local, local_blocks, size), there = blocks_of(remote, remote_blocks, size)
    cdef int64_t took
    with nogil:
        took = limit_process_vm(here, pid, there, count, threads, iovecs, write)
    return checked(took)


def sockets(list descriptors, uintptr_t local, uintptr_t local_blocks, size_t count, size_t size, *, bint sends,
            bint asks):
    """Send or receive blocks over connected, blocking sockets, one thread each; return the nanoseconds.

    The other end must be in the same call, with the opposite of both flags.
    """
    cdef int[MAX_STREAMS] fds
    cdef unsigned streams = len(descriptors)
    if not 1 <= streams <= MAX_STREAMS:
        raise ValueError(f"{streams} sockets, outside 1..{MAX_STREAMS}")
    for i in range(streams):
        fds[i] = descriptors[i]
    cdef Blocks here = blocks_of(local, local_blocks, size)
    cdef int64_t took
    with nogil:
        took = limit_sockets(fds, streams, here, count, sends, asks)
    return checked(took)


def copy_each(uintptr_t to, uintptr_t to_blocks, uintptr_t source, uintptr_t source_blocks, size_t count, size_t size,
              uintptr_t took):
    """Copy block by block; write the nanoseconds of each to `took`, an array of int64."""
    cdef Blocks there = blocks_of(to, to_blocks, size), here = blocks_of(source, source_blocks, size)
    with nogil:
        limit_copy_each(there, here, count, <int64_t *>took)


def process_vm_each(uintptr_t local, uintptr_t local_blocks, int pid, uintptr_t remote, uintptr_t remote_blocks,
                    size_t count, size_t size, uintptr_t took, *, bint write):
    """Move block by block with process_vm; write the nanoseconds of each to `took`, an array of int64."""
    cdef Blocks here = blocks_of(local, local_blocks, size), there = blocks_of(remote, remote_blocks, size)
    cdef int64_t result
    with nogil:
        result = limit_process_vm_each(here, pid, there, count, write, <int64_t *>took)
    checked(result)


def socket_each(int descriptor, uintptr_t local, uintptr_t local_blocks, size_t count, size_t size, uintptr_t took, *,
                bint sends, bint asks):
    """Move block by block over a blocking socket, a request and an answer each; write the nanoseconds to `took`.

    The other end must be in the same call, with the opposite of both flags.
    """
    cdef Blocks here = blocks_of(local, local_blocks, size)
    cdef int64_t result
    with nogil:
        result = limit_socket_each(descriptor, here, count, sends, asks, <int64_t *>took)
    checked(result)
