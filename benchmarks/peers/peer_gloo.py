"""torch.distributed with gloo. It has messages only, so both processes take part in every transfer.

Blocks travel in messages of about 1 MiB, a few at a time: smaller ones are put together by torch, larger ones are sent
from where they lie and received where they belong.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from importlib.metadata import version
from typing import Any, Final

import torch
import torch.distributed as dist
from worker import OrdinaryMemory, main

_MESSAGE: Final = 1 << 20
_WINDOW: Final = 4
"""Messages under way at a time."""


class Gloo(OrdinaryMemory):
    def version(self) -> str:
        return f"torch {version('torch')}"

    def open(self) -> Any:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self.active:
            return None
        self.store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        return self.store.port

    def meet(self, other: Any) -> None:
        if self.active:
            self.store = dist.TCPStore("127.0.0.1", other, 2, is_master=False)
        dist.init_process_group("gloo", store=self.store, rank=0 if self.active else 1, world_size=2)
        self.other = 1 if self.active else 0
        if not self.active:
            threading.Thread(target=self._answer, daemon=True).start()

    def prepare(self) -> None:
        self.tensor = torch.from_numpy(self.pool)
        self.blocks_here, self.blocks_there = torch.from_numpy(self.here), torch.from_numpy(self.there)

    # Messages of several blocks. -----------------------------------------------------------------------------

    def _send(self, index: torch.Tensor) -> None:
        step = max(1, _MESSAGE // self.block)
        under_way: deque[tuple[Any, torch.Tensor]] = deque()
        for number, part in enumerate(index.split(step)):
            message = self.tensor.index_select(0, part) if len(part) > 1 else self.tensor[int(part[0])]
            # The memory must live until it is sent.
            under_way.append((dist.isend(message, self.other, tag=1 + number), message))
            if len(under_way) == _WINDOW:
                under_way.popleft()[0].wait()
        while under_way:
            under_way.popleft()[0].wait()

    def _receive(self, index: torch.Tensor) -> None:
        step = max(1, _MESSAGE // self.block)
        under_way: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()

        def finish() -> None:
            work, message, part = under_way.popleft()
            work.wait()
            if len(part) > 1:
                self.tensor.index_copy_(0, part, message)

        for number, part in enumerate(index.split(step)):
            one = len(part) == 1
            message = self.tensor[int(part[0])] if one else torch.empty((len(part), self.block), dtype=torch.uint8)
            under_way.append((dist.irecv(message, self.other, tag=1 + number), message, part))
            if len(under_way) == _WINDOW:
                finish()
        while under_way:
            finish()

    # Both processes. -----------------------------------------------------------------------------------------

    def _answer(self) -> None:
        """Serve for ever."""
        request = torch.zeros(3, dtype=torch.int64)
        done = torch.zeros(1, dtype=torch.uint8)
        while True:
            dist.recv(request, self.other)
            write, count, first = request.tolist()
            index = torch.tensor([first])
            if count > 1:
                index = torch.empty(count, dtype=torch.int64)
                dist.recv(index, self.other)
            if write:
                self._receive(index)
                dist.send(done, self.other)
            else:
                self._send(index)

    def _run(self, write: bool, here: torch.Tensor, there: torch.Tensor, first: int, done: torch.Tensor) -> None:
        dist.send(torch.tensor([write, len(there), first]), self.other)
        if len(there) > 1:
            dist.send(there, self.other)
        if write:
            self._send(here)
            dist.recv(done, self.other)
        else:
            self._receive(here)

    def move(self, write: bool) -> float:
        done = torch.zeros(1, dtype=torch.uint8)
        began = time.perf_counter()
        self._run(write, self.blocks_here, self.blocks_there, 0, done)
        return time.perf_counter() - began

    def each(self, write: bool, count: int) -> list[float]:
        done = torch.zeros(1, dtype=torch.uint8)
        firsts = self.there[:count].tolist()
        took = []
        for i in range(count):
            here, there = self.blocks_here[i : i + 1], self.blocks_there[i : i + 1]
            began = time.perf_counter_ns()
            self._run(write, here, there, firsts[i], done)
            took.append((time.perf_counter_ns() - began) * 1e-9)
        return took


if __name__ == "__main__":
    main(Gloo)
