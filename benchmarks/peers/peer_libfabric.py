"""libfabric by a small C library (libfabric.c): variants ``shm`` and ``tcp``.

Blocks are read and written by remote memory access, as many an operation as the provider takes and many operations at a
time. The passive process lets the provider work all the time, as it is meant to be used.
"""

from __future__ import annotations

import base64
import ctypes
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
from worker import OrdinaryMemory, main

LIBRARY: Final = Path(sys.prefix) / "lib" / "libpeer_libfabric.so"
"""Where environments.py builds it."""

_NAME_BYTES: Final = 256


def _library() -> Any:
    library = ctypes.CDLL(str(LIBRARY))
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
    library.node_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, pointer, size, pointer]
    library.node_open.restype = pointer
    library.node_name.argtypes = [pointer] * 5
    library.node_meet.argtypes = [pointer, ctypes.c_char_p, number, number]
    library.node_move.argtypes = [pointer, pointer, pointer, size, size, ctypes.c_int]
    library.node_move.restype = ctypes.c_int64
    library.node_each.argtypes = [pointer, pointer, pointer, size, size, ctypes.c_int, pointer]
    library.node_serve.argtypes = [pointer, ctypes.c_int]
    library.node_provider.argtypes = [pointer]
    library.node_provider.restype = library.error_text.restype = ctypes.c_char_p
    library.library_version.restype = ctypes.c_uint32
    return library


class Libfabric(OrdinaryMemory):
    def version(self) -> str:
        number = self.library.library_version()
        return f"{number >> 16}.{number & 0xFFFF} ({self.library.node_provider(self.node).decode()})"

    def _check(self, result: int) -> int:
        if result < 0:
            raise RuntimeError(self.library.error_text(int(result)).decode())
        return result

    def open(self) -> Any:
        self.library = _library()
        failed = ctypes.c_int(0)
        host = b"127.0.0.1" if self.variant == "tcp" else None
        self.node = self.library.node_open(
            self.variant.encode(), host, self.address, self.nbytes, ctypes.addressof(failed)
        )
        self._check(failed.value)
        name, length = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t(_NAME_BYTES)
        key, base = ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._check(
            self.library.node_name(
                self.node, name, ctypes.addressof(length), ctypes.addressof(key), ctypes.addressof(base)
            )
        )
        return {"name": base64.b64encode(name.raw[: length.value]).decode(), "key": key.value, "base": base.value}

    def meet(self, other: Any) -> None:
        self._check(self.library.node_meet(self.node, base64.b64decode(other["name"]), other["key"], other["base"]))

    def _lists(self) -> tuple[int, int]:
        return int(self.here.ctypes.data), int(self.there.ctypes.data)

    def move(self, write: bool) -> float:
        took = self.library.node_move(self.node, *self._lists(), len(self.here), self.block, write)
        return self._check(took) * 1e-9

    def each(self, write: bool, count: int) -> list[float]:
        took = np.zeros(count, np.int64)
        self._check(self.library.node_each(self.node, *self._lists(), count, self.block, write, int(took.ctypes.data)))
        seconds: list[float] = (took * 1e-9).tolist()
        return seconds

    def serve(self, line: int) -> None:
        self._check(self.library.node_serve(self.node, line))


if __name__ == "__main__":
    main(Libfabric)
