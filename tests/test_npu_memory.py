"""Memory of an NPU: what refuses it where HIXL does not reach it. Nothing here has an NPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist import llm_datadist as llm
from aiodatadist.llm_datadist import _engine

from .pairs import OWNER
from .test_buffers import ON_NPU, Npu


@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",), ("hixl", "tcp")])
async def test_without_hixl_it_is_refused_at_the_call(transports: tuple[str, ...]) -> None:
    config = adt.Config(transports=transports, hixl_library="/nowhere/libcann_hixl.so")
    async with adt.DataDist(OWNER, config=config) as dd:
        for x, desc in (([Npu()], None), ([1 << 50], ON_NPU)):
            with pytest.raises(adt.TransportUnavailable, match="memory of an NPU") as caught:
                dd.cache_manager.register_blocks_cache(x, desc=desc)
            assert caught.value.transport == "hixl"
            assert caught.value.reason == dd.transports.get("hixl", "Config.transports does not have it")
            assert "doctor ascend" in str(caught.value)
        assert dd.cache_manager.caches == {}


async def test_library_memory_is_the_hosts() -> None:
    async with adt.DataDist(OWNER) as dd:
        for allocate in (dd.cache_manager.allocate_blocks_cache, dd.cache_manager.allocate_cache):
            with pytest.raises(adt.ArgumentError, match="library memory is the host's"):
                allocate(ON_NPU)


async def test_a_cache_says_where_it_is() -> None:
    async with adt.DataDist(OWNER) as dd:
        cache = dd.cache_manager.register_blocks_cache([np.zeros((4, 3), np.float16)])
        assert cache.placement is adt.Placement.HOST
        assert "NPU" not in repr(cache)


async def test_transports_say_what_works() -> None:
    async with adt.DataDist(OWNER, config=adt.Config(transports=("sim", "tcp"))) as dd:
        assert list(dd.transports) == ["sim", "tcp"]
        assert dd.transports["tcp"] == ""
        assert "SimCluster" in dd.transports["sim"]
    with pytest.raises(adt.ClosedError):
        _ = dd.transports


def test_where_there_are_npus_the_drop_in_takes_none_of_it_for_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver shows an NPU, and there is no CANN: addresses of an NPU are refused, whatever they are here."""
    (tmp_path / "davinci0").touch()
    monkeypatch.setattr(_engine, "_DEV", tmp_path)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    config = llm.LLMConfig()
    config.enable_cache_manager = True
    node = llm.LLMDataDist(llm.LLMRole.DECODER, OWNER)
    node.init(config.generate_options())
    try:
        memory = np.zeros((4, 3), np.float16)
        for placement, status in (
            (llm.Placement.HOST, None),
            (llm.Placement.DEVICE, llm.LLMStatusCode.LLM_FEATURE_NOT_ENABLED),
        ):
            desc = llm.CacheDesc(1, (4, 3), llm.DataType.DT_FLOAT16, placement)
            if status is None:
                node.cache_manager.register_blocks_cache(desc, [memory.ctypes.data])
                continue
            with pytest.raises(llm.LLMException, match="memory of an NPU") as caught:
                node.cache_manager.register_blocks_cache(desc, [memory.ctypes.data])
            assert caught.value.status_code == status
    finally:
        node.finalize()
