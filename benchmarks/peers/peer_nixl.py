"""NIXL by its Python interface over UCX: ``auto``, ``auto-request``, ``auto-progress``, ``tcp``, ``tcp-progress``.

Descriptor lists and requests are made beforehand; what counts is from the post to the first look that finds it done.
With ``auto-request`` it counts, too, that the request is made of the numbers of the blocks, and released.
Without progress threads the passive process must look after NIXL itself: all the time where UCX moves data by messages
(tcp), now and then where the active process copies by itself (auto: process_vm).
"""

from __future__ import annotations

import base64
import os
import select
import time
from importlib.metadata import version
from typing import Any, Final

import numpy as np
from worker import OrdinaryMemory, main, readable

_LOOK_SECONDS: Final = 0.001
_OPERATION: Final = {False: "READ", True: "WRITE"}


class Nixl(OrdinaryMemory):
    def version(self) -> str:
        return version("nixl_cu12")

    def open(self) -> Any:
        if self.variant.startswith("tcp"):
            os.environ["UCX_TLS"] = "tcp"  # read when the backend is made
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        from nixl_cu12 import nixl_agent, nixl_agent_config

        self.name = "active" if self.active else "passive"
        settings = nixl_agent_config(enable_prog_thread=self.variant.endswith("progress"), backends=["UCX"])
        self.agent = nixl_agent(self.name, settings)
        self.registered = self.agent.register_memory([(self.address, self.nbytes, 0, "")], "DRAM")
        return {"metadata": base64.b64encode(self.agent.get_agent_metadata()).decode(), "address": self.address}

    def meet(self, other: Any) -> None:
        self.remote = self.agent.add_remote_agent(base64.b64decode(other["metadata"]))
        if isinstance(self.remote, bytes):
            self.remote = self.remote.decode()
        self.remote_address = other["address"]

    def prepare(self) -> None:
        if self.active:
            self.lists = (
                self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._blocks(self.address), "DRAM"),
                self.agent.prep_xfer_dlist(self.remote, self._blocks(self.remote_address), "DRAM"),
            )
            self.requests = {
                write: self._request(write, self.here.astype(np.int32), self.there.astype(np.int32))
                for write in (False, True)
            }

    def _blocks(self, address: int) -> Any:
        table = np.zeros((self.nbytes // self.block, 3), np.uint64)
        table[:, 0] = address + np.arange(len(table), dtype=np.uint64) * np.uint64(self.block)
        table[:, 1] = self.block
        return table

    def _request(self, write: bool, here: Any, there: Any) -> Any:
        ours, theirs = self.lists
        return self.agent.make_prepped_xfer(_OPERATION[write], ours, here, theirs, there)

    def _run(self, request: Any) -> None:
        state = self.agent.transfer(request)
        while state == "PROC":
            state = self.agent.check_xfer_state(request)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")

    def move(self, write: bool) -> float:
        here, there = self.here.astype(np.int32), self.there.astype(np.int32)
        began = time.perf_counter()
        if self.variant == "auto-request":
            self._fresh(write, here, there)
        else:
            self._run(self.requests[write])
        return time.perf_counter() - began

    def _fresh(self, write: bool, here: Any, there: Any) -> None:
        request = self._request(write, here, there)
        self._run(request)
        self.agent.release_xfer_handle(request)

    def each(self, write: bool, count: int) -> list[float]:
        here, there = self.here[:count].astype(np.int32), self.there[:count].astype(np.int32)
        took = []
        if self.variant == "auto-request":
            for i in range(count):
                began = time.perf_counter_ns()
                self._fresh(write, here[i : i + 1], there[i : i + 1])
                took.append((time.perf_counter_ns() - began) * 1e-9)
            return took
        requests = [self._request(write, here[i : i + 1], there[i : i + 1]) for i in range(count)]
        for request in requests:
            began = time.perf_counter_ns()
            self._run(request)
            took.append((time.perf_counter_ns() - began) * 1e-9)
        for request in requests:
            self.agent.release_xfer_handle(request)
        return took

    def serve(self, line: int) -> None:
        if self.variant == "tcp":
            while not readable(line):
                for _ in range(64):
                    self.agent.get_new_notifs()
        elif not self.variant.endswith("progress"):
            while not select.select([line], [], [], _LOOK_SECONDS)[0]:
                self.agent.get_new_notifs()


if __name__ == "__main__":
    main(Nixl)
