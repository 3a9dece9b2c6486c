"""What `aiodatadist bench` holds the library against; see _limits.pyx."""

from typing import Literal

def build_fault() -> str: ...
def copy(
    to: int,
    to_blocks: int,
    source: int,
    source_blocks: int,
    count: int,
    size: int,
    *,
    threads: int,
    loop: Literal["memcpy", "stream", "stream-prefetch"],
) -> int: ...
def process_vm(
    local: int,
    local_blocks: int,
    pid: int,
    remote: int,
    remote_blocks: int,
    count: int,
    size: int,
    *,
    threads: int,
    iovecs: int,
    write: bool,
) -> int: ...
def sockets(
    descriptors: list[int],
    local: int,
    local_blocks: int,
    count: int,
    size: int,
    *,
    sends: bool,
    asks: bool,
) -> int: ...
def copy_each(to: int, to_blocks: int, source: int, source_blocks: int, count: int, size: int, took: int) -> None: ...
def process_vm_each(
    local: int,
    local_blocks: int,
    pid: int,
    remote: int,
    remote_blocks: int,
    count: int,
    size: int,
    took: int,
    *,
    write: bool,
) -> None: ...
def socket_each(
    descriptor: int,
    local: int,
    local_blocks: int,
    count: int,
    size: int,
    took: int,
    *,
    sends: bool,
    asks: bool,
) -> None: ...
