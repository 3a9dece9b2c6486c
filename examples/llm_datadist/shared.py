"""What the scripts of this folder share: their command line, memory for caches, and how processes wait for each other.

The scripts use `llm_datadist` as code for Ascend does. Run them in two terminals, here without an NPU:

    python -m aiodatadist.llm_datadist --cpu examples/llm_datadist/pull_blocks.py --role p
    python -m aiodatadist.llm_datadist --cpu examples/llm_datadist/pull_blocks.py --role d

`--prompt IP:PORT` says where the prompt node listens, on both sides; the port after it is for `Partner`. Caches are
torch tensors on the NPU, or numpy arrays where there is no torch_npu.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from llm_datadist import LayerSynchronizer, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode

PATIENCE = 60.0  # seconds that a script waits for the other one


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--role", choices=("p", "d"), required=True, help="prompt or decoder")
    made.add_argument("--prompt", metavar="IP:PORT", default="127.0.0.1:26000", help="where the prompt node listens")
    made.add_argument("--decoder", metavar="IP:PORT", default="127.0.0.1:26010", help="where the decoder, if it does")
    made.add_argument("--device_id", type=int, default=0)
    has_torch = all(importlib.util.find_spec(name) for name in ("torch", "torch_npu"))
    made.add_argument("--memory", choices=("torch", "numpy"), default="torch" if has_torch else "numpy")
    return made


def split(address: str) -> tuple[str, int]:
    ip, port = address.split(":")
    return ip, int(port)


# Memory. ------------------------------------------------------------------------------------------------------


def make_tensors(options: argparse.Namespace, count: int, shape: Sequence[int]) -> list[Any]:
    """Return float16 tensors of zeros, on the NPU or as numpy arrays."""
    if options.memory == "numpy":
        return [np.zeros(shape, np.float16) for _ in range(count)]
    import torch
    import torch_npu  # noqa: F401  # it gives torch its npu

    torch.npu.set_device(options.device_id)
    return [torch.zeros(*shape, dtype=torch.float16).npu() for _ in range(count)]


def tensors_at(options: argparse.Namespace, addresses: Sequence[int], shape: Sequence[int]) -> list[Any]:
    """Return float16 tensors of memory that llm_datadist has allocated."""
    if options.memory == "torch":
        import torch
        import torchair

        made: list[Any] = torchair.llm_datadist.create_npu_tensors(list(shape), torch.float16, list(addresses))
        return made
    kind = ctypes.c_uint16 * math.prod(shape)
    bits = [np.ctypeslib.as_array(kind.from_address(address)) for address in addresses]
    return [array.view(np.float16).reshape(shape) for array in bits]


def addresses_of(tensors: Sequence[Any]) -> list[int]:
    return [tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr() for tensor in tensors]


def value(tensor: int, index: int) -> float:
    """Return what the prompt node writes to an entry of dimension 0 of one tensor: another value for each."""
    return float(64 * tensor + index + 1)


def fill(tensors: Sequence[Any], entries: Sequence[int], offset: int = 0) -> None:
    """Do the model's work."""
    for number, tensor in enumerate(tensors):
        for index in entries:
            tensor[index] = value(number, index) + offset


def check(tensors: Sequence[Any], entries: Sequence[int], sources: Sequence[int], offset: int = 0) -> None:
    """Exit with an error if an entry does not hold what `fill` has written to its source."""
    for number, tensor in enumerate(tensors):
        for index, source in zip(entries, sources, strict=True):
            check_entry(tensor[index], value(number, source) + offset)


def check_entry(entry: Any, expected: float) -> None:
    if not bool((entry == expected).all()):
        sys.exit(f"expected {expected} everywhere, got {entry}")


class Layers(LayerSynchronizer):  # type: ignore[misc]  # to mypy llm_datadist is a package that is not here
    """Says when the model has computed a layer: the host knows that by a flag, and a device by its event."""

    def __init__(self, options: argparse.Namespace, number: int) -> None:
        self.launched = [threading.Event() for _ in range(number)]
        self.computed: list[Any] = []
        if options.memory == "torch":
            import torch

            self.computed = [torch.npu.Event() for _ in range(number)]

    def record(self, layer: int) -> None:
        if self.computed:
            self.computed[layer].record()
        self.launched[layer].set()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        if not self.launched[layer_index].wait(PATIENCE):
            return False
        if self.computed:
            self.computed[layer_index].synchronize()
        return True


# Nodes and links. ---------------------------------------------------------------------------------------------


def start(
    options: argparse.Namespace, role: LLMRole, cluster_id: int, listen: str = "", remote_accessible: bool = True
) -> LLMDataDist:
    """Make and initialize a node; the more special options stand in the scripts themselves."""
    config = LLMConfig()
    config.device_id = options.device_id
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = remote_accessible
    config.listen_ip_info = listen
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options())
    return datadist


def cluster_at(cluster_id: int, address: str) -> LLMClusterInfo:
    """Describe a node that listens at an address."""
    ip, port = split(address)
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = cluster_id
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info(ip, port)
    return cluster


def link(datadist: LLMDataDist, *clusters: LLMClusterInfo) -> None:
    status, each = datadist.link_clusters(list(clusters), 5000)
    if status != LLMStatusCode.LLM_SUCCESS:
        sys.exit(f"linking failed: {each}")


def unlink(datadist: LLMDataDist, *clusters: LLMClusterInfo) -> None:
    status, each = datadist.unlink_clusters(list(clusters), 5000)
    if status != LLMStatusCode.LLM_SUCCESS:
        sys.exit(f"unlinking failed: {each}")


# The other process. -------------------------------------------------------------------------------------------


class Partner:
    """The other process, to agree with: a TCP connection beside those of llm_datadist.

    The prompt node waits for the decoder at the port after its own, and the decoder goes there.
    """

    def __init__(self, options: argparse.Namespace, prompt: str | None = None) -> None:
        ip, port = split(prompt or options.prompt)
        if options.role == "p":
            with socket.create_server((ip, port + 1)) as server:
                server.settimeout(PATIENCE)
                self.socket, _ = server.accept()
        else:
            self.socket = _connect((ip, port + 1))
        self.socket.settimeout(PATIENCE)
        self.lines = self.socket.makefile()

    def exchange(self, mine: Any) -> Any:
        """Give the partner a value, and return the one that it gives at this point."""
        self.socket.sendall(json.dumps(mine).encode() + b"\n")
        line = self.lines.readline()
        if not line:
            sys.exit("the other process is gone")
        return json.loads(line)

    def meet(self, where: str) -> None:
        """Wait until the partner is there, too."""
        theirs = self.exchange(where)
        if theirs != where:
            sys.exit(f"this process is at {where!r}, the other one at {theirs!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lines.close()
        self.socket.close()


def _connect(address: tuple[str, int]) -> socket.socket:
    limit = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection(address, timeout=PATIENCE)
        except OSError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.05)
