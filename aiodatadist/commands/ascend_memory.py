"""Memory of an NPU by ACL, the runtime of CANN, opened at run time: for checks that must not need torch_npu."""

from __future__ import annotations

import ctypes
from typing import Final

from aiodatadist import Placement
from aiodatadist._cann import find_libraries

from .failure import CommandError

__all__ = ["NpuMemory", "PinnedMemory"]

_HUGE_FIRST: Final = 0
_TO_DEVICE: Final = 1
_TO_HOST: Final = 2


class _Acl:
    """The functions of libascendcl.so that are needed, with one NPU set for the calling thread."""

    def __init__(self, library: str | None, device: int) -> None:
        path = find_libraries(library).acl
        try:
            # Global, as HIXL's libraries look for it among what is loaded.
            self._library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError as why:
            raise CommandError(f"{path} cannot be opened: {why}") from why
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        for name, arguments in (
            ("aclrtSetDevice", [ctypes.c_int32]),
            ("aclrtMalloc", [ctypes.POINTER(pointer), size, ctypes.c_int]),
            ("aclrtMallocHost", [ctypes.POINTER(pointer), size]),
            ("aclrtMemcpy", [pointer, size, pointer, size, ctypes.c_int]),
        ):
            function = getattr(self._library, name, None)
            if function is None:
                raise CommandError(f"{path} has no {name}")
            function.restype, function.argtypes = ctypes.c_int, arguments
        self.call("aclrtSetDevice", device)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function. Raises CommandError where it fails."""
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise CommandError(f"{name} failed with ACL status {status}")


class NpuMemory:
    """Takes, writes and reads memory of one NPU, in the thread that made it. It stays until the end of the process.

    Parameters
    ----------
    library : str or None
        `Config.hixl_library`.
    device : int
        The NPU.

    Raises
    ------
    CommandError
        ACL is not there, or refuses: what it answered.
    """

    placement = Placement.DEVICE

    def __init__(self, library: str | None, device: int) -> None:
        self._acl = _Acl(library, device)

    def take(self, nbytes: int) -> int:
        """Return the address of new memory, in huge pages where there are any."""
        address = ctypes.c_void_p()
        self._acl.call("aclrtMalloc", ctypes.byref(address), nbytes, _HUGE_FIRST)
        assert address.value is not None
        return address.value

    def write(self, address: int, content: bytes) -> None:
        """Copy bytes there."""
        self._acl.call("aclrtMemcpy", address, len(content), content, len(content), _TO_DEVICE)

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy bytes from there."""
        content = ctypes.create_string_buffer(nbytes)
        self._acl.call("aclrtMemcpy", content, nbytes, address, nbytes, _TO_HOST)
        return content.raw


class PinnedMemory:
    """As `NpuMemory`, but host memory of aclrtMallocHost, which HIXL reaches over RoCE as well."""

    placement = Placement.HOST

    def __init__(self, library: str | None, device: int) -> None:
        self._acl = _Acl(library, device)

    def take(self, nbytes: int) -> int:
        """Return the address of new memory."""
        address = ctypes.c_void_p()
        self._acl.call("aclrtMallocHost", ctypes.byref(address), nbytes)
        assert address.value is not None
        return address.value

    def write(self, address: int, content: bytes) -> None:
        """Copy bytes there."""
        ctypes.memmove(address, content, len(content))

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy bytes from there."""
        return ctypes.string_at(address, nbytes)
