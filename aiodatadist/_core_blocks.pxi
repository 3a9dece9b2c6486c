# SPDX-License-Identifier: Apache-2.0
# What a transfer names on each side: lists of blocks, and slots. A part of _core.pyx.


cdef extern from *:
    """
    // The value of an int that fits into one digit, which block indices do: a call for each of them takes three times
    // as long. False: it does not.
    static bool small_integer(PyObject *item, int64_t &out) {
#if PY_VERSION_HEX >= 0x030C0000
        const auto *const value = reinterpret_cast<const PyLongObject *>(item);
        if (!PyUnstable_Long_IsCompact(value)) return false;
        out = PyUnstable_Long_CompactValue(value);
#else
        const Py_ssize_t digits = Py_SIZE(item);
        if (digits < 0 || digits > 1) return false;
        out = digits == 0 ? 0 : static_cast<int64_t>(reinterpret_cast<const PyLongObject *>(item)->ob_digit[0]);
#endif
        return true;
    }

    // Converts the first `n` items of a list or tuple, up to the first that is no plain int or does not fit; returns
    // how many. Runs no Python code, so that nothing can change the list meanwhile.
    static size_t exact_integers(PyObject *blocks, size_t n, int64_t *out) {
        PyObject *const *const items = PySequence_Fast_ITEMS(blocks);
        // How far ahead items are fetched: each is a small object somewhere, mostly not in a cache after a transfer.
        const size_t ahead = 96;
        for (size_t i = 0; i < n; ++i) {
            PyObject *const item = items[i];
            __builtin_prefetch(items[i + ahead < n ? i + ahead : i]);
            if (!PyLong_CheckExact(item)) return i;
            if (small_integer(item, out[i])) continue;
            int overflow = 0;
            const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
            if (overflow != 0) return i;
            out[i] = value;
        }
        return n;
    }
    """
    size_t exact_integers(object blocks, size_t n, int64_t *out)


cdef bint read_blocks(object blocks, vector[int64_t] &out, str name) except -1:
    """Convert a block list: any integer sequence, or a one-dimensional buffer of integers."""
    cdef Py_ssize_t n
    cdef Py_ssize_t i
    if isinstance(blocks, (list, tuple)):
        n = len(blocks)
        out.resize(n)
        # All at once, and without Python: nothing runs that could change the list under this loop.
        i = exact_integers(blocks, n, out.data())
        if i == n:
            return True
        item = blocks[i]
        if PyLong_CheckExact(item):
            raise BlockIndexError(f"{name}[{i}]={shown(item)} does not fit 64 bits", hint="give block indices")
        # __index__ may run anything: convert a copy first.
        return read_blocks([as_index(x, name, k) for k, x in enumerate(tuple(blocks))], out, name)
    if PyObject_CheckBuffer(blocks):
        return read_block_buffer(blocks, out, name)
    if isinstance(blocks, (str, dict, set, frozenset)) or not hasattr(blocks, "__iter__"):
        raise ArgumentTypeError(f"{name} must be a sequence or array of integers, got {type(blocks).__name__}")
    # Tensors that are no buffers: their elements would pass for integers.
    if getattr(blocks, "ndim", 1) != 1 or str(getattr(blocks, "dtype", "")).endswith("bool"):
        raise ArgumentTypeError(f"{name} must be a one-dimensional array of integers, got {blocks!r:.80}",
                                hint="give block indices, not a mask")
    return read_blocks(list(blocks), out, name)


cdef object as_index(object item, str name, Py_ssize_t i):
    if isinstance(item, bool):
        raise ArgumentTypeError(f"{name}[{i}]={item} is a bool", hint="give block indices, not a mask")
    try:
        return int(PyNumber_Index(item))
    except TypeError:
        raise ArgumentTypeError(f"{name}[{i}]={item!r:.80} of type {type(item).__name__} is not an integer") from None


cdef bint read_block_buffer(object blocks, vector[int64_t] &out, str name) except -1:
    cdef Py_buffer view
    cdef Py_ssize_t n
    cdef Py_ssize_t i
    cdef Py_ssize_t step
    cdef char *at
    try:
        PyObject_GetBuffer(blocks, &view, PyBUF_FORMAT | PyBUF_ND | PyBUF_STRIDES)
    except (BufferError, ValueError, TypeError) as e:
        raise ArgumentTypeError(f"{name}: {e}", hint="use an integer dtype such as numpy.int64") from e
    try:
        form = (<bytes>view.format).decode().lstrip("@=<") if view.format != NULL else "B"
        if view.ndim != 1 or len(form) != 1 or form not in "bhilqnBHILQN":
            raise ArgumentTypeError(
                f"{name} must be a one-dimensional array of integers, got {view.ndim} dimensions of format {form!r}",
                hint="use an integer dtype such as numpy.int64")
        n = view.shape[0]
        step = view.strides[0] if view.strides != NULL else view.itemsize  # ctypes leaves them out
        at = <char *>view.buf
        out.resize(n)
        signed = form.islower()
        if view.itemsize == 8 and step == 8 and n > 0:
            memcpy(out.data(), at, n * 8)
        elif view.itemsize == 8:
            for i in range(n):
                out[i] = (<int64_t *>(at + i * step))[0]
            # Above 2**63 an unsigned index shows as negative here and is refused as out of range.
        elif view.itemsize == 4:
            if signed:
                for i in range(n):
                    out[i] = (<int32_t *>(at + i * step))[0]
            else:
                for i in range(n):
                    out[i] = (<uint32_t *>(at + i * step))[0]
        elif view.itemsize == 2:
            if signed:
                for i in range(n):
                    out[i] = (<int16_t *>(at + i * step))[0]
            else:
                for i in range(n):
                    out[i] = (<uint16_t *>(at + i * step))[0]
        elif signed:
            for i in range(n):
                out[i] = (<int8_t *>(at + i * step))[0]
        else:
            for i in range(n):
                out[i] = (<uint8_t *>(at + i * step))[0]
    finally:
        PyBuffer_Release(&view)
    return True


@cython.final
cdef class Slot:
    """A part of one entry of dimension 0, as one side of a transfer: `nbytes` from `offset` on, in each tensor.

    `WHOLE` bytes are what the entry holds, as far as a list of blocks on the other side reaches.
    """

    def __cinit__(self, uint64_t index, uint64_t offset, uint64_t nbytes):
        self.index = index
        self.offset = offset
        self.nbytes = nbytes


cdef int read_sides(int opcode, local_side, remote_side, vector[int64_t] &local, vector[int64_t] &remote,
                    CTransferRequest &request) except -1:
    """Convert what both sides of a transfer name: block lists of one length, or a `Slot` on one side or on both."""
    cdef uint64_t size = 0
    request.local_side.is_slot = type(local_side) is Slot
    request.remote_side.is_slot = type(remote_side) is Slot
    # A list replaces what is there, whose places need not be cleared before.
    if request.local_side.is_slot:
        local.clear()
        request.local_side.slot = (<Slot>local_side).index
        request.local_side.offset = (<Slot>local_side).offset
        size = (<Slot>local_side).nbytes
    else:
        read_blocks(local_side, local, "src_blocks" if opcode == ADT_WRITE else "dst_blocks")
    if request.remote_side.is_slot:
        remote.clear()
        request.remote_side.slot = (<Slot>remote_side).index
        request.remote_side.offset = (<Slot>remote_side).offset
        size = (<Slot>remote_side).nbytes
    else:
        read_blocks(remote_side, remote, "dst_blocks" if opcode == ADT_WRITE else "src_blocks")
    request.local_side.blocks = local.data()
    request.remote_side.blocks = remote.data()
    request.size = size
    if request.local_side.is_slot or request.remote_side.is_slot:
        request.count = max(local.size(), remote.size())
        return 0
    request.count = local.size()
    if local.size() != remote.size():
        counts = (local.size(), remote.size())
        src, dst = counts if opcode == ADT_WRITE else counts[::-1]
        raise BlockIndexError(f"src_blocks has {src} entries and dst_blocks has {dst}",
                              hint="give one destination for each source")
    return 0


cdef block_error(const CBlockFault &fault, int opcode, local_blocks, remote_blocks, bint copying):
    """Say what is wrong with a block list; the numbers are those of each side's blocks."""
    here, there = ("the destination cache's", "the source cache's") if copying else (
        "the local cache's", "the peer's cache,")
    local_name, remote_name = ("src_blocks", "dst_blocks") if opcode == ADT_WRITE else ("dst_blocks", "src_blocks")
    at, value = fault.position, fault.value
    if fault.kind == 4:
        return BlockIndexError(f"{value} bytes of a batch slot reach beyond its end", hint="give a smaller size")
    if fault.kind == 5:
        return BlockIndexError(f"the list has {at} blocks, and what is moved of the batch slot fills {value}",
                               hint="give one block for each piece of the slot")
    if fault.kind == 1:
        return BlockIndexError(f"{local_name}[{at}]={value} is outside {here} 0..{local_blocks - 1}",
                               hint="give indices below the cache's number of blocks")
    if fault.kind == 2:
        return BlockIndexError(f"{remote_name}[{at}]={value} is outside {there} 0..{remote_blocks - 1}",
                               hint=f"give indices below the {'cache' if copying else 'peer'}'s number of blocks")
    if fault.kind == 6:
        return BlockIndexError(f"block {value} is source and destination of one copy, whose order is not defined",
                               hint="split it into copies that are awaited one after the other")
    return BlockIndexError(f"dst_blocks[{at}]={value} is named twice", hint="each destination may appear once")


def checked_sides(int opcode, local_side, remote_side, local_geometry, remote_geometry, bint copying=False,
                  bint same_cache=False):
    """Check the sides of a transfer that starts later, and return them in a form that nobody changes.

    Geometries are (num_tensors, num_blocks, block_bytes, block_stride). `copying`: both are caches of this node.
    """
    cdef vector[int64_t] local
    cdef vector[int64_t] remote
    cdef vector[CRun] runs
    cdef CTransferRequest request
    cdef adt_geometry_t here
    cdef adt_geometry_t there
    here.num_tensors, here.num_blocks, here.block_bytes, here.block_stride = local_geometry
    there.num_tensors, there.num_blocks, there.block_bytes, there.block_stride = remote_geometry
    read_sides(opcode, local_side, remote_side, local, remote, request)
    nbytes = bytes_a_tensor(request.local_side, request.remote_side, request.count, request.size, here, there)
    fault = make_runs(request.local_side, request.remote_side, request.count, nbytes, here, there,
                      opcode == ADT_READ, same_cache, runs)
    if fault.kind != 0:
        raise block_error(fault, opcode, here.num_blocks, there.num_blocks, copying)
    return (
        local_side if request.local_side.is_slot else tuple(local),
        remote_side if request.remote_side.is_slot else tuple(remote),
    )


def frozen_blocks(blocks, str name):
    """Convert a list of blocks whose cache is not known yet."""
    cdef vector[int64_t] out
    read_blocks(blocks, out, name)
    return tuple(out)
