"""pyzmq: variants ``tcp`` and ``ipc``. It has messages only, so both processes take part in every transfer.

Blocks travel in messages of about 1 MiB: smaller ones are put together by numpy, larger ones are sent from where they
lie.
"""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
import zmq
from worker import OrdinaryMemory, main

_MESSAGE: Final = 1 << 20
_QUEUED: Final = 8
"""Messages that wait at each end at most."""


class Pyzmq(OrdinaryMemory):
    def version(self) -> str:
        return f"{zmq.__version__} (libzmq {zmq.zmq_version()})"

    def open(self) -> Any:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set_hwm(_QUEUED)
        if not self.active:
            self.socket.bind("tcp://127.0.0.1:*" if self.variant == "tcp" else "ipc://*")
        return None if self.active else self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def meet(self, other: Any) -> None:
        if self.active:
            self.socket.connect(other)

    def _send(self, index: Any) -> None:
        step = max(1, _MESSAGE // self.block)
        for at in range(0, len(index), step):
            part = index[at : at + step]
            # Fancy indexing copies; a single block is sent from its place.
            message = self.pool[part] if len(part) > 1 else self.pool[part[0]]
            self.socket.send(message, copy=False)

    def _receive(self, index: Any) -> None:
        step = max(1, _MESSAGE // self.block)
        for at in range(0, len(index), step):
            part = index[at : at + step]
            message = self.socket.recv(copy=False)
            self.pool[part] = np.frombuffer(message.buffer, np.uint8).reshape(-1, self.block)

    def _run(self, write: bool, here: Any, there: Any) -> None:
        self.socket.send_multipart([b"w" if write else b"r", there])
        if write:
            self._send(here)
            self.socket.recv()
        else:
            self._receive(here)

    def move(self, write: bool) -> float:
        began = time.perf_counter()
        self._run(write, self.here, self.there)
        return time.perf_counter() - began

    def each(self, write: bool, count: int) -> list[float]:
        took = []
        for i in range(count):
            here, there = self.here[i : i + 1], self.there[i : i + 1]
            began = time.perf_counter_ns()
            self._run(write, here, there)
            took.append((time.perf_counter_ns() - began) * 1e-9)
        return took

    def serve(self, line: int) -> None:
        poller = zmq.Poller()
        poller.register(line, zmq.POLLIN)
        poller.register(self.socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self.socket in ready:
                way, index = self.socket.recv_multipart()
                blocks = np.frombuffer(index, np.int64)
                if way == b"w":
                    self._receive(blocks)
                    self.socket.send(b"")
                else:
                    self._send(blocks)
            if line in ready:
                return


if __name__ == "__main__":
    main(Pyzmq)
