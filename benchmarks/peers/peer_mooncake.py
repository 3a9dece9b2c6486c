"""Mooncake's transfer engine by its Python interface, over tcp: what it offers to a host without an RDMA device."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any, Final

from worker import OrdinaryMemory, main

_BATCH: Final = 1024
"""Blocks of a call at most: as it is delivered, it refuses 65,536, and 4,096 too on a slow machine."""


class Mooncake(OrdinaryMemory):
    def version(self) -> str:
        return version("mooncake-transfer-engine-non-cuda")

    def open(self) -> Any:
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        self._check(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "initialize")
        self._check(self.engine.register_memory(self.address, self.nbytes), "register_memory")
        return {"name": f"127.0.0.1:{self.engine.get_rpc_port()}", "address": self.address}

    @staticmethod
    def _check(status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"{what} returned {status}")

    def meet(self, other: Any) -> None:
        self.remote = other["name"]
        self.remote_address = other["address"]

    def prepare(self) -> None:
        if self.active:
            here = (self.here * self.block + self.address).tolist()
            there = (self.there * self.block + self.remote_address).tolist()
            self.lists = here, there
            self.batches = [
                (here[at : at + _BATCH], there[at : at + _BATCH], [self.block] * len(here[at : at + _BATCH]))
                for at in range(0, len(here), _BATCH)
            ]

    def move(self, write: bool) -> float:
        call = self.engine.batch_transfer_sync_write if write else self.engine.batch_transfer_sync_read
        began = time.perf_counter()
        for here, there, lengths in self.batches:
            self._check(call(self.remote, here, there, lengths), call.__name__)
        return time.perf_counter() - began

    def each(self, write: bool, count: int) -> list[float]:
        call = self.engine.transfer_sync_write if write else self.engine.transfer_sync_read
        here, there = self.lists
        took = []
        for ours, theirs in zip(here[:count], there[:count], strict=True):
            began = time.perf_counter_ns()
            self._check(call(self.remote, ours, theirs, self.block), call.__name__)
            took.append((time.perf_counter_ns() - began) * 1e-9)
        return took


if __name__ == "__main__":
    main(Mooncake)
