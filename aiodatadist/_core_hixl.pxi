# SPDX-License-Identifier: Apache-2.0
# HIXL: its engine of a DataDist. A part of _core.pyx.


@cython.final
cdef class HixlEngine:
    """An open HIXL engine, for one `Node`. A node that has it keeps it; else it ends with this object.

    Parameters
    ----------
    libraries : tuple of str
        Paths, or names for the dynamic loader, of libmetadef, libcann_hixl, libascendcl and the shim.
    device : int
    host : str
        IP address where peers reach the engine.
    options : mapping of str to str
        As HIXL names them.
    alignment : int
        Bytes of which registered memory must begin at a multiple. 0: any.
    drain_timeout, connect_timeout : float
        Seconds.
    others : bool
        Other transports serve host memory with which HIXL does not connect.

    Raises
    ------
    TransportUnavailable
        The engine cannot be opened; says why.

    Notes
    -----
    Opening may take seconds, without the GIL: for a worker thread.
    """

    def __cinit__(self, libraries, int32_t device, str host, options, *, uint64_t alignment, double drain_timeout,
                  double connect_timeout, bint others=False):
        cdef CHixlSettings settings
        cdef shared_ptr[CHixlAgent] agent
        cdef string words
        metadef, hixl, acl, shim = (os.fsencode(path) for path in libraries)
        settings.places.metadef = metadef
        settings.places.hixl = hixl
        settings.places.acl = acl
        settings.places.shim = shim
        settings.device = device
        settings.host = host.encode()
        settings.alignment = alignment
        settings.drain_ns = <uint64_t>(drain_timeout * 1e9)
        settings.connect_ms = <int32_t>(connect_timeout * 1e3)
        settings.others = others
        for name, value in options.items():
            settings.options.push_back(CHixlOption((<str>name).encode(), (<str>value).encode()))
        with nogil:
            agent = c_open_hixl(settings, words)
        self.words = words.decode(errors="replace")
        if agent.get() == NULL:
            raise TransportUnavailable(f"HIXL cannot be used: {self.words}", transport="hixl", reason=self.words)
        self.agent = move(agent)

    def __dealloc__(self):
        let_go_hixl(self.agent)


def hixl_symbols():
    """Names, as the linker knows them, of what CANN's libraries must define for HIXL to be used."""
    return [kHixlSymbols[i].decode() for i in range(kHixlSymbolCount)]


def hixl_stats():
    """Count what hixl holds and has done in this process."""
    cdef CHixlStats *stats = &c_hixl_stats()
    return {
        "engines": stats.engines.load(),
        "registrations": stats.registrations.load(),
        "registered_bytes": stats.registered_bytes.load(),
        "connections": stats.connections.load(),
        "disconnects": stats.disconnects.load(),
        "forced": stats.forced.load(),
        "requests": stats.requests.load(),
        "failures": stats.failures.load(),
        "polls": stats.polls.load(),
    }
