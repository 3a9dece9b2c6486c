"""What scripts use of ``torch_npu`` and ``torchair``, as host memory, so that they run where there is no NPU.

`install` makes ``import torch_npu`` and ``import torchair`` succeed, and gives torch its ``torch.npu`` and
``Tensor.npu()`` as soon as something imports torch. Without torch it does nothing until then.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

__all__ = ["Event", "create_npu_tensors", "current_device", "install", "installed", "set_device", "synchronize"]

_NAMES: Final = ("Event", "current_device", "set_device", "synchronize")

_ORIGIN: Final = "aiodatadist --cpu"

_device = 0


def set_device(device: Any) -> None:
    """Remember a device: a number, ``"npu:1"``, or what has an ``index``. All are the same memory here."""
    global _device
    _device = _index_of(device)


def current_device() -> int:
    """Return the device that was set last, 0 at first."""
    return _device


def synchronize(device: Any = None) -> None:
    """Return at once: what was computed on host memory is done."""
    if device is not None:
        _index_of(device)


class Event:
    """As ``torch.npu.Event``. What precedes it on host memory is done when it is recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timing = enable_timing
        self._recorded: int | None = None

    def record(self, stream: Any = None) -> None:
        """Mark this moment."""
        self._recorded = time.monotonic_ns()

    def query(self) -> bool:
        """Return True, as for a device's event that was not recorded or is complete."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to another; both were recorded, and made with ``enable_timing``."""
        if not (self._timing and end._timing):
            raise RuntimeError("both events must be made with enable_timing=True")
        if self._recorded is None or end._recorded is None:
            raise RuntimeError("both events must be recorded")
        return (end._recorded - self._recorded) / 1e6


def create_npu_tensors(shape: Sequence[int], dtype: Any, addresses: Sequence[int]) -> list[Any]:
    """Return a torch tensor for each address, of the memory there, which must outlive it.

    Parameters
    ----------
    shape : sequence of int
        Of each tensor.
    dtype : torch.dtype
        Of each tensor.
    addresses : sequence of int
        Such as ``cache.tensor_addrs``.
    """
    import torch

    count = 1
    for dim in shape:
        count *= dim
    tensors = []
    for address in addresses:
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        tensors.append(_on_npu(torch.frombuffer(memory, dtype=dtype).reshape(tuple(shape))))
    return tensors


def install() -> None:
    """Put the modules in place, and hold on to torch's import; again is no error.

    Raises
    ------
    RuntimeError
        The real ``torch_npu`` is imported already.
    """
    present = [module for name in ("torch_npu", "torchair") if (module := sys.modules.get(name)) is not None]
    if present:
        if all(getattr(module.__spec__, "origin", None) == _ORIGIN for module in present):
            return
        raise RuntimeError("torch_npu or torchair is imported already; nothing can take its place")
    # An installed torch_npu would load with torch.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    npu = _module("torch.npu", {name: globals()[name] for name in _NAMES})
    _module("torch_npu", {"npu": npu})
    datadist = _module("torchair.llm_datadist", {"create_npu_tensors": create_npu_tensors})
    _module("torchair", {"llm_datadist": datadist, "__path__": []})
    if (torch := sys.modules.get("torch")) is not None:
        _attach(torch)
    else:
        sys.meta_path.insert(0, _Torch())


def installed() -> bool:
    """Return whether `install` has put host memory in the place of an NPU."""
    return getattr(getattr(sys.modules.get("torch_npu"), "__spec__", None), "origin", None) == _ORIGIN


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, "Host memory in the place of an NPU, by aiodatadist.")
    module.__spec__ = ModuleSpec(name, None, origin=_ORIGIN, is_package="__path__" in contents)
    module.__dict__.update(contents)

    def missing(attribute: str) -> Any:
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}: --cpu has only what llm_datadist needs")

    module.__dict__["__getattr__"] = missing
    sys.modules[name] = module
    return module


class _Torch(importlib.abc.MetaPathFinder):
    """Finds torch where it is, for an import as for a mere look, and stays until it has been completed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _TorchLoader(self, spec.loader)
                return spec
        return None


class _TorchLoader(importlib.abc.Loader):
    """Completes torch once it has run."""

    def __init__(self, finder: _Torch, loader: Any) -> None:
        self._finder = finder
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self._finder)
        _attach(module)


def _attach(torch: Any) -> None:
    if hasattr(torch, "npu"):
        raise RuntimeError("torch has an npu already; run without --cpu")
    torch.npu = sys.modules["torch.npu"]
    torch.Tensor.npu = _to_npu


def _to_npu(tensor: Any, device: Any = None, non_blocking: bool = False, **options: Any) -> Any:
    """``Tensor.npu()``: a copy, as from a host to a device; the tensor itself if it is one."""
    if device is not None:
        _index_of(device)
    return tensor if hasattr(tensor.untyped_storage(), _MARK) else _on_npu(tensor.detach().clone())


_MARK: Final = "_aiodatadist_npu"


def _on_npu(tensor: Any) -> Any:
    setattr(tensor.untyped_storage(), _MARK, True)
    return tensor


def _index_of(device: Any) -> int:
    if isinstance(device, str):
        kind, _, number = device.partition(":")
        if kind != "npu" or not (number or "0").isdecimal():
            raise ValueError(f"{device!r} is no NPU; write 'npu:0' or 0")
        return int(number or 0)
    return int(getattr(device, "index", device) or 0) if not isinstance(device, int) else device
