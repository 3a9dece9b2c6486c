"""``import llm_datadist`` and all its submodules, served by this package. `install` is what turns it on."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from ..errors import UsageError

__all__ = ["install"]

_OURS: Final = __package__
_ALIAS: Final = "llm_datadist"


class _Finder(importlib.abc.MetaPathFinder):
    """Gives modules of this package under the name of the original: the same objects, not copies."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _ALIAS and not name.startswith(_ALIAS + "."):
            return None
        ours = _OURS + name.removeprefix(_ALIAS)
        try:
            spec = importlib.util.find_spec(ours)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            return None
        return ModuleSpec(name, _Loader(ours), is_package=spec.submodule_search_locations is not None)


class _Loader(importlib.abc.Loader):
    def __init__(self, ours: str) -> None:
        self._ours = ours
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It ran under its own name; the import that made the alias has put its own spec there.
        module.__spec__ = self._spec


def install() -> None:
    """See `aiodatadist.install_as_llm_datadist`."""
    present = sys.modules.get(_ALIAS)
    if present is not None:
        if present is sys.modules[_OURS]:
            return
        raise UsageError(
            f"llm_datadist is imported already, from {getattr(present, '__file__', None)}",
            hint="call install_as_llm_datadist() before anything imports it",
        )
    sys.meta_path.insert(0, _Finder())
    importlib.import_module(_ALIAS)
