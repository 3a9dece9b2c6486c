"""The drop-in's names, values and options: what a script may expect without a node."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiodatadist import Status as NativeStatus
from aiodatadist import llm_datadist
from aiodatadist.llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMClusterInfo,
    LLMConfig,
    LlmConfig,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
    Status,
    TransferConfig,
    TransferWithCacheKeyConfig,
    data_type,
    llm_datadist_wrapper,
    status,
)
from aiodatadist.llm_datadist.configs import ip_text, trans_str_ip
from aiodatadist.llm_datadist.utils import log, utils
from aiodatadist.llm_datadist.v2.config import EngineConfig
from aiodatadist.llm_datadist.v2.llm_types import PushType

from .llm_nodes import INVALID, status_of

NONE = 2**64 - 1
BAD: Any = None  # passes mypy where a script gives what it should not

# Names. -----------------------------------------------------------------------------------------------------

MODULES = {
    "llm_datadist": [
        "LLMDataDist", "LLMConfig", "LlmConfig", "LLMClusterInfo", "LLMRole", "LLMStatusCode", "LLMException", "Status",
        "DataType", "Placement", "Memtype", "MemInfo", "RegisterMemStatus", "CacheDesc", "Cache", "CacheKey",
        "CacheKeyByIdAndIndex", "BlocksCacheKey", "KvCache", "LayerSynchronizer", "TransferConfig",
        "TransferWithCacheKeyConfig", "CacheTask", "v2_list",
    ],
    "llm_datadist.v2.llm_types": [
        "BlocksCacheKey", "Cache", "CacheDesc", "CacheKey", "CacheKeyByIdAndIndex", "CacheTask", "KvCache",
        "LayerSynchronizer", "MemInfo", "Memtype", "Placement", "PushType", "RegisterMemStatus", "TransferConfig",
        "TransferWithCacheKeyConfig",
    ],
    "llm_datadist.v2.llm_datadist": ["LLMDataDist", "_shutdown_handler", "EngineConfig"],
    "llm_datadist.v2.cache_manager": ["CacheManager"],
    "llm_datadist.v2.llm_utils": ["CacheTask"],
    "llm_datadist.v2.config": ["EngineConfig", "ClusterConfig"],
    "llm_datadist.configs": ["LLMRole", "LLMClusterInfo", "LlmConfig", "trans_str_ip"],
    "llm_datadist.status": [
        "LLMStatusCode", "LLMException", "Status", "code_2_status", "handle_llm_status", "raise_if_false",
        "raise_if_true",
    ],
    "llm_datadist.data_type": ["DataType", "dtype_to_np_dtype", "valid_np_dtypes", "np_dtype_to_dtype"],
    "llm_datadist.utils.utils": [
        "check_isinstance", "check_dict", "check_inner", "check_uint64", "check_int64", "check_uint32", "check_int32",
        "check_uint16", "check_uint8", "check_list_int32", "check_list_int64", "check_list_uint64",
        "check_positive_or_set_default",
    ],
    "llm_datadist.utils.log": ["get_logger", "info", "warn", "error", "_find_caller"],
    "llm_datadist.llm_datadist_wrapper": [
        "kSuccess", "kFailed", "kParamInvalid", "calc_tensor_size", "dict_to_vector", "initialize_v2", "finalize_v2",
        "link", "unlink", "query_register_mem_status", "register_cache", "unregister_cache", "allocate_cache_v2",
        "deallocate_cache_v2", "remove_cache_key_v2", "remap_registered_memory", "pull_cache_v2", "copy_cache_v2",
        "swap_blocks_v2", "check_capacity_v2", "transfer_cache_v2", "link_clusters_v2", "unlink_clusters_v2",
        "switch_role_v2",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules_have_their_names(name: str) -> None:
    module = importlib.import_module(f"aiodatadist.{name}")
    assert [one for one in MODULES[name] if not hasattr(module, one)] == []


def test_a_script_finds_them_under_the_original_name() -> None:
    script = (
        "import os, importlib, aiodatadist; assert 'AUTO_USE_UC_MEMORY' not in os.environ\n"
        "aiodatadist.install_as_llm_datadist()\n"
        f"for name, wanted in {MODULES!r}.items():\n"
        "    module = importlib.import_module(name)\n"
        "    assert all(hasattr(module, one) for one in wanted), name\n"
        "from llm_datadist import LLMDataDist, LLMRole\n"
        "from llm_datadist.v2.llm_types import BlocksCacheKey\n"
        "import logging\n"
        "assert os.environ['AUTO_USE_UC_MEMORY'] == '0'\n"
        "assert 'LLM_DATADIST' not in logging.Logger.manager.loggerDict  # made at its first use\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "AUTO_USE_UC_MEMORY"}
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, env=environment, timeout=100)


def test_all_is_the_26_names() -> None:
    assert len(llm_datadist.__all__) == 26
    assert len(llm_datadist.v2_list) == 23
    assert LlmConfig is LLMConfig
    for name in ("Tensor", "TensorDesc", "KvCacheManager"):
        assert name in llm_datadist.__all__
        with pytest.raises(ImportError, match="llm_datadist_v1"):
            getattr(llm_datadist, name)
    with pytest.raises(AttributeError, match="has no attribute"):
        _ = llm_datadist.CacheManager
    with pytest.raises(AttributeError, match="has no attribute"):
        _ = data_type.nothing


# Numbers. ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (LLMRole, {"PROMPT": 1, "DECODER": 2, "MIX": 3, "Prompt": 1, "Decoder": 2, "Mix": 3}),
        (Placement, {"HOST": 0, "DEVICE": 1}),
        (Memtype, {"MEM_TYPE_DEVICE": 0, "MEM_TYPE_HOST": 1}),
        (RegisterMemStatus, {"OK": 0, "PREPARING": 1, "FAILED": 2}),
        (PushType, {"NO_CACHE_KEY": 0, "BLOCKS_CACHE_KEY": 1, "CACHE_KEY_BY_ID": 2}),
        (
            DataType,
            {
                "DT_FLOAT": 0, "DT_FLOAT16": 1, "DT_INT8": 2, "DT_INT32": 3, "DT_UINT8": 4, "DT_INT16": 6,
                "DT_UINT16": 7, "DT_UINT32": 8, "DT_INT64": 9, "DT_UINT64": 10, "DT_DOUBLE": 11, "DT_BOOL": 12,
                "DT_STRING": 13, "DT_BF16": 27,
            },
        ),
    ],
)  # fmt: skip
def test_enums(kind: Any, members: dict[str, int]) -> None:
    assert {name: member.value for name, member in kind.__members__.items()} == members


def test_how_enums_show() -> None:
    shown = (LLMRole.Prompt, Placement.HOST, LLMStatusCode.LLM_TIMEOUT)
    assert [str(one) for one in shown] == ["LLMRole.PROMPT", "Placement.HOST", "LLMStatusCode.LLM_TIMEOUT"]


def test_statuses_are_those_of_aiodatadist() -> None:
    theirs = {f"LLM_{one.name}": one.value for one in NativeStatus}
    theirs["LLM_SEQ_LENOVERLIMIT"] = theirs.pop("LLM_SEQ_LEN_OVER_LIMIT")
    assert {one.name: one.value for one in LLMStatusCode} == theirs
    assert (LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_FAILED) == (1343270917, 4294967295)


def test_the_wrapper_has_a_number_for_each_status() -> None:
    constants = {name: value for name, value in vars(llm_datadist_wrapper).items() if name.startswith("k")}
    assert len(constants) == 28
    assert set(constants.values()) == {int(one) for one in LLMStatusCode} - {LLMStatusCode.LLM_UNKNOWN_ERROR}
    assert constants["kLinKFailed"] == LLMStatusCode.LLM_LINK_FAILED
    assert all(type(value) is int for value in constants.values())


def test_exceptions_and_statuses() -> None:
    plain = LLMException("a", 1)
    assert (plain.args, plain.status_code) == (("a", 1), LLMStatusCode.LLM_SUCCESS)
    assert isinstance(plain, RuntimeError)
    with pytest.raises(AttributeError):
        plain.status_code = INVALID
    assert Status(LLMStatusCode.LLM_SUCCESS).is_ok()
    assert not Status(INVALID).is_ok()
    assert Status(INVALID).status_code is INVALID
    assert status.code_2_status(1343270917) is INVALID
    for unknown in (1343270932, 7, -1):
        assert status.code_2_status(unknown) is LLMStatusCode.LLM_FAILED
    status.handle_llm_status(0, "[x]", "")
    with pytest.raises(LLMException, match=r"\[pull\].*LLM_TIMEOUT.*cache 3") as why:
        status.handle_llm_status(1343270938, "pull", "cache 3")
    assert why.value.status_code is LLMStatusCode.LLM_TIMEOUT
    status.raise_if_false(True, "")
    status.raise_if_true(False, "")
    with pytest.raises(LLMException, match=r"\{not\} a template") as why:
        status.raise_if_true(True, "{not} a template")  # the original fails to format this
    assert why.value.status_code is INVALID
    with pytest.raises(LLMException, match="7 of 8") as why:
        status.raise_if_false(0, "{} of {n}", 7, n=8, status_code=LLMStatusCode.LLM_TIMEOUT)
    assert why.value.status_code is LLMStatusCode.LLM_TIMEOUT


def test_data_types() -> None:
    sizes = [4, 2, 1, 4, 1, 2, 2, 4, 8, 8, 8, 1, 16, 2]
    assert [data_type.ITEM_BYTES[one] for one in DataType] == sizes
    assert data_type.dtype_to_np_dtype[DataType.DT_BF16] is np.float16
    assert data_type.np_dtype_to_dtype[np.float16] is DataType.DT_FLOAT16
    assert np.float32 in data_type.valid_np_dtypes
    assert llm_datadist_wrapper.calc_tensor_size([2, 3], 13) == 96
    assert llm_datadist_wrapper.calc_tensor_size([2, -3], 0) < 0
    assert llm_datadist_wrapper.calc_tensor_size([2**62], 0) < 0
    assert llm_datadist_wrapper.dict_to_vector({1: 2}) == [(1, 2)]


# Checks. ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "low", "high"),
    [
        (utils.check_uint8, 0, 2**8 - 1),
        (utils.check_uint16, 0, 2**16 - 1),
        (utils.check_uint32, 0, 2**32 - 1),
        (utils.check_uint64, 0, 2**64 - 1),
        (utils.check_int32, -(2**31), 2**31 - 1),
        (utils.check_int64, -(2**63), 2**63 - 1),
    ],
)
def test_numbers(check: Callable[[str, object], None], low: int, high: int) -> None:
    for fine in (low, high, True, np.int8(1)):
        check("x", fine)
    for wrong in (low - 1, high + 1):
        with pytest.raises(ValueError, match="x="):
            check("x", wrong)
    for other in (None, 1.0, "1", [1]):
        with pytest.raises(TypeError, match="x only support"):
            check("x", other)


def test_checks() -> None:
    utils.check_isinstance("x", None, int)
    utils.check_isinstance("x", {1: "a"}, dict, int)
    utils.check_isinstance("x", (1, np.int64(2), True), [list, tuple], int)
    utils.check_list_int32("x", [-1, 2**31 - 1])
    utils.check_list_int64("x", (-(2**63),))
    utils.check_list_uint64("x", [])
    utils.check_dict("x", {1: "a"}, int, str)
    assert (utils.check_positive_or_set_default("x", None, 5), utils.check_positive_or_set_default("x", 3, 5)) == (5, 3)
    wrong: list[tuple[type[Exception], Callable[[], object]]] = [
        (TypeError, lambda: utils.check_isinstance("x", None, int, allow_none=False)),
        (TypeError, lambda: utils.check_isinstance("x", "a", int)),
        (TypeError, lambda: utils.check_isinstance("x", ["a"], list, int)),
        (TypeError, lambda: utils.check_isinstance("x", {"a": 1}, dict, int)),
        (TypeError, lambda: utils.check_inner("x", [None], int)),
        (TypeError, lambda: utils.check_dict("x", {1: 1}, int, str)),
        (TypeError, lambda: utils.check_dict("x", [], int, str)),
        (TypeError, lambda: utils.check_list_int32("x", [1.0])),
        (ValueError, lambda: utils.check_list_int32("x", [2**31])),
        (ValueError, lambda: utils.check_list_uint64("x", [-1])),
        (ValueError, lambda: utils.check_positive_or_set_default("x", 0, 5)),
        (TypeError, lambda: utils.check_positive_or_set_default("x", "1", 5)),
    ]
    for kind, call in wrong:
        with pytest.raises(kind):
            call()


@pytest.mark.parametrize(("given", "level"), [("0", 10), ("1", 20), ("2", 30), ("3", 40), (None, 40), ("x", 40)])
def test_the_logger(
    given: str | None, level: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log.get_logger.cache_clear()
    logging.getLogger("LLM_DATADIST").handlers.clear()
    if given is None:
        monkeypatch.delenv("ASCEND_GLOBAL_LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("ASCEND_GLOBAL_LOG_LEVEL", given)
    assert log.get_logger() is logging.getLogger("LLM_DATADIST")
    log.info("an info of %d", 7)
    log.warn("a warning")
    log.error("an error")
    captured = capsys.readouterr()
    assert captured.err == ""
    assert [name in captured.out for name in ("an info of 7", "a warning", "an error")] == [
        level <= one for one in (20, 30, 40)
    ]
    assert "test_llm_types.py" in captured.out  # the caller's line
    assert log._find_caller()[0] == __file__


# Options. ---------------------------------------------------------------------------------------------------

OPTIONS: list[tuple[str, Any, dict[str, str]]] = [
    ("device_id", 3, {"ge.exec.deviceId": "3", "ge.session_device_id": "3"}),
    ("device_id", [1, 2], {"ge.exec.deviceId": "1;2", "ge.session_device_id": "1"}),
    ("device_id", (4,), {"ge.exec.deviceId": "4", "ge.session_device_id": "4"}),
    ("sync_kv_timeout", 500, {"llm.SyncKvCacheWaitTime": "500"}),
    ("sync_kv_timeout", "500", {"llm.SyncKvCacheWaitTime": "500"}),
    ("listen_ip_info", "10.0.0.1:26000", {"llm.listenIpInfo": "10.0.0.1:26000"}),
    ("listen_ip_info", "", {}),
    ("enable_cache_manager", True, {"llm.EnableCacheManager": "1"}),
    ("enable_cache_manager", False, {"llm.EnableCacheManager": "0"}),
    ("enable_remote_cache_accessible", True, {"llm.EnableRemoteCacheAccessible": "1"}),
    ("mem_pool_cfg", "{}", {"llm.MemPoolConfig": "{}"}),
    ("host_mem_pool_cfg", "{}", {"llm.HostMemPoolConfig": "{}"}),
    ("local_comm_res", "", {"llm.LocalCommRes": ""}),
    ("transfer_backend", "", {"llm.TransferBackend": ""}),
    ("transfer_backend", "hixl", {"llm.TransferBackend": "hixl"}),
    ("global_resource_config", "", {"llm.GlobalResourceConfig": ""}),
    ("link_total_time", 2**32 - 1, {"llm.LinkTotalTime": "4294967295"}),
    ("link_retry_count", 100, {"llm.LinkRetryCount": "100"}),
    ("rdma_traffic_class", 100, {"llm.RdmaTrafficClass": "100"}),
    ("rdma_service_level", 100, {"llm.RdmaServiceLevel": "100"}),
    ("ge_options", {"a": "b"}, {"a": "b"}),
    ("deploy_res_path", "/x", {"llm.deployResPath": "/x"}),
    ("buf_pool_cfg", "{}", {"llm.BufPoolCfg": "{}"}),
    (
        "cluster_info",
        '{"listen_ip_info": [{"ip": "1.2.3.4", "port": 1}, {"ip": 7}]}',
        {"llm.ClusterInfo": '{"listen_ip_info": [{"ip": 67305985, "port": 1}, {"ip": 7}]}'},
    ),
    ("output_max_size", 5, {"llm.OutputMaxSize": "5"}),
    ("enable_switch_role", True, {"llm.EnableSwitchRole": "1"}),
    ("enable_switch_role", False, {}),
    ("mem_utilization", 0.5, {"llm.MemoryUtilization": "0.5"}),
]


@pytest.mark.parametrize(("name", "value", "emitted"), OPTIONS)
def test_options(name: str, value: Any, emitted: dict[str, str]) -> None:
    config = LLMConfig()
    setattr(config, name, value)
    kept = getattr(config, name)
    assert kept == (int(value) if name == "sync_kv_timeout" else value)
    assert type(kept) is (int if name == "sync_kv_timeout" else type(value))
    assert config.generate_options() == {"llm.MemoryUtilization": "0.95", **emitted}
    assert config.options is config.gen_options() is config.generate_options()


UNSET = {
    "device_id": None, "sync_kv_timeout": None, "listen_ip_info": "", "enable_cache_manager": False,
    "enable_remote_cache_accessible": False, "mem_pool_cfg": "", "host_mem_pool_cfg": "", "local_comm_res": "",
    "transfer_backend": "", "global_resource_config": "", "link_total_time": 0, "link_retry_count": 1,
    "rdma_traffic_class": None, "rdma_service_level": None, "ge_options": {}, "deploy_res_path": "", "buf_pool_cfg": "",
    "cluster_info": "", "output_max_size": None, "enable_switch_role": False, "mem_utilization": 0.95,
}  # fmt: skip


def test_unset_options() -> None:
    config = LLMConfig()
    assert {name: getattr(config, name) for name in UNSET} == UNSET
    assert config.options == {"llm.MemoryUtilization": "0.95"}


def test_options_accumulate() -> None:
    config = LLMConfig()
    config.listen_ip_info = "1.2.3.4:5"
    config.generate_options()["mine"] = "kept"
    config.listen_ip_info = ""
    assert config.options == {"llm.listenIpInfo": "1.2.3.4:5", "mine": "kept", "llm.MemoryUtilization": "0.95"}
    config.device_id = []
    with pytest.raises(IndexError):
        config.generate_options()


@pytest.mark.parametrize(
    "name",
    [
        "listen_ip_info", "local_comm_res", "transfer_backend", "global_resource_config", "mem_pool_cfg",
        "host_mem_pool_cfg", "buf_pool_cfg", "deploy_res_path", "output_max_size", "enable_cache_manager",
        "enable_remote_cache_accessible", "enable_switch_role",
    ],
)  # fmt: skip
def test_none_unsets(name: str) -> None:
    config = LLMConfig()
    setattr(config, name, None)
    assert getattr(config, name) == UNSET[name]
    assert config.options == {"llm.MemoryUtilization": "0.95"}


BAD_OPTIONS: list[tuple[str, Any, type[Exception]]] = [
    *[("device_id", value, TypeError) for value in ("0", None, 1.0, [None], ["0"], {0: 1})],
    *[("device_id", value, LLMException) for value in (-1, [0, -1])],
    *[("device_id", value, ValueError) for value in (2**31, [2**31])],
    *[("sync_kv_timeout", value, TypeError) for value in (1.0, None, [1])],
    *[("sync_kv_timeout", value, LLMException) for value in (0, -1, "x", "", "-1", "1.5", "0")],
    ("sync_kv_timeout", 2**31, ValueError),
    *[(name, 1, TypeError) for name in (
        "listen_ip_info", "enable_cache_manager", "enable_remote_cache_accessible", "mem_pool_cfg", "host_mem_pool_cfg",
        "local_comm_res", "transfer_backend", "global_resource_config", "ge_options", "deploy_res_path", "buf_pool_cfg",
        "cluster_info", "enable_switch_role", "mem_utilization",
    )],
    *[("global_resource_config", value, TypeError) for value in ({}, [])],
    *[("link_total_time", value, TypeError) for value in ("1", None, 1.0)],
    *[("link_total_time", value, LLMException) for value in (-1, 2**32)],
    *[("link_retry_count", value, TypeError) for value in ("1", None)],
    *[("link_retry_count", value, LLMException) for value in (0, 101)],
    *[(f"rdma_{name}", value, TypeError) for name in ("traffic_class", "service_level") for value in (None, "1")],
    *[(f"rdma_{name}", value, ValueError) for name in ("traffic_class", "service_level") for value in (-1, 2**32)],
    *[("ge_options", value, TypeError) for value in ({1: "a"}, {"a": 1}, [])],
    ("ge_options", None, AttributeError),
    *[("cluster_info", value, TypeError) for value in (None, {})],
    ("cluster_info", "{", ValueError),
    *[("output_max_size", value, TypeError) for value in ("1", 1.0)],
    *[("mem_utilization", value, TypeError) for value in (None, 1, "0.5")],
    *[("mem_utilization", value, LLMException) for value in (-0.1, 1.1)],
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "kind"), BAD_OPTIONS)
def test_bad_options(name: str, value: Any, kind: type[Exception]) -> None:
    config = LLMConfig()
    with pytest.raises(kind) as why:
        setattr(config, name, value)
    assert status_of(why.value) == (INVALID if kind is LLMException else None)
    assert getattr(config, name) == UNSET[name]


# Cluster information. ---------------------------------------------------------------------------------------


def test_cluster_info() -> None:
    info = LLMClusterInfo()
    assert (info.remote_cluster_id, info.local_ip_info_list, info.remote_ip_info_list) == (None, [], [])
    info.remote_cluster_id = 2**64 - 1
    info.remote_role_type = LLMRole.PROMPT
    info.remote_role_type = 0
    info.append_local_ip_info("1.2.3.4", 0)
    info.append_local_ip_info("127.1", 65535)
    info.append_remote_ip_info(2**40, 5)
    assert info.remote_cluster_id == 2**64 - 1
    assert info.local_ip_info_list == [(0x04030201, 0), (0x0100007F, 65535)]
    assert info.remote_ip_info_list == [(2**40, 5)]
    assert ip_text(trans_str_ip("10.1.2.3")) == "10.1.2.3"
    with pytest.raises(TypeError):
        ip_text(2**32)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda info: setattr(info, "remote_cluster_id", None), TypeError),
        (lambda info: setattr(info, "remote_cluster_id", "1"), TypeError),
        (lambda info: setattr(info, "remote_cluster_id", -1), ValueError),
        (lambda info: setattr(info, "remote_cluster_id", 2**64), ValueError),
        (lambda info: setattr(info, "remote_role_type", "PROMPT"), TypeError),
        (lambda info: info.append_local_ip_info(None, 1), TypeError),
        (lambda info: info.append_remote_ip_info(1.5, 1), TypeError),
        (lambda info: info.append_remote_ip_info("::1", 1), RuntimeError),
        (lambda info: info.append_remote_ip_info("somewhere", 1), RuntimeError),
        (lambda info: info.append_remote_ip_info("1.2.3.4", "1"), TypeError),
        (lambda info: info.append_remote_ip_info("1.2.3.4", 65536), ValueError),
        (lambda info: info.append_local_ip_info("1.2.3.4", -1), ValueError),
    ],
)
def test_bad_cluster_info(change: Callable[[LLMClusterInfo], None], kind: type[Exception]) -> None:
    info = LLMClusterInfo()
    with pytest.raises(kind) as why:
        change(info)
    assert status_of(why.value) is None
    assert (info.remote_cluster_id, info.local_ip_info_list, info.remote_ip_info_list) == (None, [], [])


# Values. ----------------------------------------------------------------------------------------------------


def test_cache_desc() -> None:
    shape = [4, 8]
    desc = CacheDesc(2, shape, DataType.DT_FLOAT16, Placement.HOST, 1, 0, "ND")
    assert (desc.num_tensors, desc.data_type, desc.placement) == (2, DataType.DT_FLOAT16, Placement.HOST)
    assert (desc.batch_dim, desc.batch_size, desc.seq_len_dim_index, desc.kv_tensor_format) == (1, 8, 0, "ND")
    assert desc.shape is shape
    assert desc.size == 64
    desc.update_dim(1, 16)
    assert (shape, desc.size, desc.batch_size) == ([4, 16], 128, 8)
    assert "num_tensors=2" in repr(desc)
    usual = CacheDesc(np.uint8(1), (1,), DataType.DT_INT8)
    assert (usual.placement, usual.batch_dim, usual.seq_len_dim_index, usual.kv_tensor_format) == (
        Placement.DEVICE, 0, -1, None,
    )  # fmt: skip
    with pytest.raises(TypeError):
        usual.update_dim(0, 2)  # of a tuple
    for sizeless in (CacheDesc(1, [2, -1], DataType.DT_INT8), CacheDesc(1, [2**62, 4], DataType.DT_INT8)):
        with pytest.raises(LLMException) as why:
            _ = sizeless.size
        assert why.value.status_code is LLMStatusCode.LLM_SUCCESS
    nothing = CacheDesc(1, [2], BAD, BAD)
    with pytest.raises((AttributeError, KeyError)):
        _ = nothing.size


D = DataType.DT_INT8
BAD_VALUES: list[tuple[str, Callable[[], object], type[Exception]]] = [
    # CacheDesc
    ("no number", lambda: CacheDesc(BAD, [1], D), TypeError),
    ("a text", lambda: CacheDesc("1", [1], D), TypeError),
    ("negative", lambda: CacheDesc(-1, [1], D), ValueError),
    ("beyond uint32", lambda: CacheDesc(2**32, [1], D), ValueError),
    ("no shape", lambda: CacheDesc(1, BAD, D), TypeError),
    ("shape of text", lambda: CacheDesc(1, "12", D), TypeError),
    ("element of text", lambda: CacheDesc(1, ["1"], D), TypeError),
    ("dim beyond int64", lambda: CacheDesc(1, [2**63], D), ValueError),
    ("data type of int", lambda: CacheDesc(1, [1], 2), TypeError),
    ("placement of int", lambda: CacheDesc(1, [1], D, 1), TypeError),
    ("batch dim of text", lambda: CacheDesc(1, [1], D, batch_dim_index="0"), TypeError),
    ("batch dim of None", lambda: CacheDesc(1, [1], D, batch_dim_index=BAD), TypeError),
    ("batch dim beyond", lambda: CacheDesc(1, [1], D, batch_dim_index=1), LLMException),
    ("batch dim negative", lambda: CacheDesc(1, [1], D, batch_dim_index=-1), LLMException),
    ("seq dim of None", lambda: CacheDesc(1, [1], D, seq_len_dim_index=BAD), TypeError),
    ("seq dim beyond int32", lambda: CacheDesc(1, [1], D, seq_len_dim_index=2**31), ValueError),
    ("seq dim beyond", lambda: CacheDesc(1, [1], D, seq_len_dim_index=1), LLMException),
    ("seq dim -2", lambda: CacheDesc(1, [1], D, seq_len_dim_index=-2), LLMException),
    ("format of int", lambda: CacheDesc(1, [1], D, kv_tensor_format=1), TypeError),
    # Keys
    ("no cluster", lambda: CacheKey(req_id=1), LLMException),
    ("no request", lambda: CacheKey(1), LLMException),
    ("five values", lambda: CacheKey(1, 2, 3, 4, 5), LLMException),
    ("unknown name", lambda: CacheKey(1, 2, batch=1), LLMException),
    ("cluster of text", lambda: CacheKey("1", 2), TypeError),
    ("request of None", lambda: CacheKey(1, None), TypeError),
    ("request negative", lambda: CacheKey(1, -1), ValueError),
    ("prefix beyond uint64", lambda: CacheKey(1, 2, prefix_id=2**64), ValueError),
    ("model negative", lambda: CacheKey(1, 2, -1), ValueError),
    ("blocks: no cluster", lambda: BlocksCacheKey(model_id=1), LLMException),
    ("blocks: three values", lambda: BlocksCacheKey(1, 2, 3), LLMException),
    ("blocks: unknown name", lambda: BlocksCacheKey(1, req_id=1), LLMException),
    ("blocks: text", lambda: BlocksCacheKey("1"), TypeError),
    ("by id: None", lambda: CacheKeyByIdAndIndex(1, BAD), TypeError),
    ("by id: cluster negative", lambda: CacheKeyByIdAndIndex(-1, 1), ValueError),
    ("by id: id beyond int64", lambda: CacheKeyByIdAndIndex(1, 2**63), ValueError),
    ("by id: batch negative", lambda: CacheKeyByIdAndIndex(1, 1, -1), ValueError),
    ("by id: batch beyond uint32", lambda: CacheKeyByIdAndIndex(1, 1, 2**32), ValueError),
    # Memory
    ("cpu cache of device", lambda: Cache.create_cpu_cache(CacheDesc(1, [1], D), [1]), LLMException),
    ("cpu cache: count", lambda: Cache.create_cpu_cache(CacheDesc(1, [1], D, Placement.HOST), [1, 2]), LLMException),
    ("cpu cache: tuple", lambda: Cache.create_cpu_cache(CacheDesc(1, [1], D, Placement.HOST), (1,)), TypeError),
    ("cpu cache: text", lambda: Cache.create_cpu_cache(CacheDesc(1, [1], D, Placement.HOST), ["1"]), TypeError),
    ("cpu cache: no desc", lambda: Cache.create_cpu_cache(1, [1]), TypeError),
    ("cpu cache: None", lambda: Cache.create_cpu_cache(BAD, [1]), AttributeError),
    ("kv cache: mixed", lambda: KvCache.create_cpu_cache(CacheDesc(1, [1], D, Placement.HOST), [1, [1]]), LLMException),
    ("kv cache: empty", lambda: KvCache.create_cpu_cache(CacheDesc(1, [1], D, Placement.HOST), []), LLMException),
    ("kv cache: count", lambda: KvCache.create_cpu_cache(CacheDesc(1, [1], D, Placement.HOST), [[1, 2]]), LLMException),
    ("mem info: type", lambda: MemInfo(0, 1, 1), TypeError),
    ("mem info: address", lambda: MemInfo(Memtype.MEM_TYPE_HOST, "1", 1), TypeError),
    ("mem info: size", lambda: MemInfo(Memtype.MEM_TYPE_HOST, 1, 1.0), TypeError),
    # Layer-wise configs
    ("cluster of None", lambda: TransferConfig(BAD, [1]), TypeError),
    ("cluster negative", lambda: TransferConfig(-1, [1]), ValueError),
    ("addresses of None", lambda: TransferConfig(1, BAD), TypeError),
    ("address of text", lambda: TransferConfig(1, ["1"]), TypeError),
    ("address negative", lambda: TransferConfig(1, [-1]), ValueError),
    ("layers of list", lambda: TransferConfig(1, [1], [0]), TypeError),
    ("layers with step", lambda: TransferConfig(1, [1], range(0, 4, 2)), LLMException),
    ("layers negative", lambda: TransferConfig(1, [1], range(-1, 1)), LLMException),
    ("layers empty", lambda: TransferConfig(1, [1], range(1, 1)), LLMException),
    ("batch negative", lambda: TransferConfig(1, [1], None, -1), ValueError),
    ("batch of None", lambda: TransferConfig(1, [1], None, BAD), TypeError),
    ("key of None", lambda: TransferWithCacheKeyConfig(BAD, range(1), range(1)), TypeError),
    ("key by request", lambda: TransferWithCacheKeyConfig(CacheKey(1, 2), range(1), range(1)), TypeError),
    ("no source layers", lambda: TransferWithCacheKeyConfig(BlocksCacheKey(1), None, range(1)), TypeError),
    ("no target layers", lambda: TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), None), TypeError),
    ("other length", lambda: TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), range(2)), LLMException),
    ("key: step", lambda: TransferWithCacheKeyConfig(BlocksCacheKey(1), range(0, 2, 2), range(1)), LLMException),
    ("key: batch", lambda: TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), range(1), 1), LLMException),
    ("key: batch beyond", lambda: TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), range(1), 2**32), ValueError),
]


@pytest.mark.parametrize(("call", "kind"), [pytest.param(*row[1:], id=row[0]) for row in BAD_VALUES])
def test_bad_values(call: Callable[[], object], kind: type[Exception]) -> None:
    with pytest.raises(kind) as why:
        call()
    assert status_of(why.value) == (INVALID if kind is LLMException else None)


def test_keys() -> None:
    key = CacheKey(1, 2)
    assert (key.cluster_id, key.prompt_cluster_id, key.req_id, key.model_id, key.prefix_id) == (1, 1, 2, 0, NONE)
    key = CacheKey(5, prompt_cluster_id=1, req_id=2, model_id=3, prefix_id=4)
    assert (key.cluster_id, key.req_id, key.model_id, key.prefix_id) == (5, 2, 3, 4)
    assert CacheKey(1, 2, req_id=9).req_id == 2
    assert CacheKey(prompt_cluster_id=3, cluster_id=4, req_id=1).cluster_id == 4
    assert CacheKey(1, 2) != CacheKey(1, 2)  # compared by identity, as in the original
    blocks = BlocksCacheKey(prompt_cluster_id=7)
    assert (blocks.cluster_id, blocks.prompt_cluster_id, blocks.model_id) == (7, 7, 0)
    assert (BlocksCacheKey(-1).cluster_id, BlocksCacheKey(None).cluster_id) == (-1, None)
    by_id = CacheKeyByIdAndIndex(1, -5)
    assert (by_id.cluster_id, by_id.cache_id, by_id.batch_index) == (1, -5, 0)
    for call, text in (
        (lambda: CacheKey(req_id=1), "cluster_id is required"),
        (lambda: CacheKey(1), "req_id is required"),
        (lambda: CacheKey(1, 2, batch=1), "Unsupported"),
        (lambda: BlocksCacheKey(), "cluster_id is required"),
    ):
        with pytest.raises(LLMException, match=text):
            call()


def test_caches_of_the_cpu() -> None:
    desc = CacheDesc(2, [1], D, Placement.HOST)
    cache = Cache.create_cpu_cache(desc, [1, 2])
    assert (cache.cache_id, cache.cache_desc, cache.tensor_addrs, cache.is_blocks_cache) == (-1, desc, [1, 2], True)
    assert cache.per_device_tensor_addrs == [[1, 2]]
    for given in ([1, 2], [[1, 2]]):
        kv = KvCache.create_cpu_cache(desc, given)
        assert (kv.cache_id, kv.cache_desc, kv.per_device_tensor_addrs) == (-1, desc, [[1, 2]])
    gone: list[Any] = []

    class Manager:
        def deallocate_cache(self, cache: KvCache) -> None:
            gone.append(cache.cache_id)

    kv = KvCache(5, desc, [[1]], Manager())
    del kv
    assert gone == [5]
    info = MemInfo(Memtype.MEM_TYPE_DEVICE, 1, -1)
    assert (info.mem_type, info.addr, info.size) == (Memtype.MEM_TYPE_DEVICE, 1, -1)


def test_layerwise_configs() -> None:
    config = TransferConfig(1, [2, 3])
    assert (config.dst_cluster_id, config.dst_addrs, config.src_layer_range, config.src_batch_index) == (
        1, [2, 3], None, 0,
    )  # fmt: skip
    assert config.dst_layer_range is None
    config.dst_cluster_id, config.dst_addrs, config.src_layer_range, config.src_batch_index = 4, (5,), range(1), 6
    assert (config.dst_cluster_id, config.dst_addrs, config.src_layer_range, config.src_batch_index) == (
        4, (5,), range(1), 6,
    )  # fmt: skip
    with pytest.raises(LLMException):
        config.src_layer_range = range(0)
    keyed = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, 2, 3), range(1, 3), range(2), 4)
    assert (keyed.dst_cluster_id, keyed.src_layer_range, keyed.dst_layer_range, keyed.src_batch_index) == (
        1, range(1, 3), range(2), 4,
    )  # fmt: skip
    keyed.cache_key = BlocksCacheKey(7)
    assert keyed.dst_cluster_id == 7  # the original goes on with the old one
    keyed.src_layer_range = keyed.dst_layer_range = None
    keyed.src_batch_index = 0
    for name, wrong in (("cache_key", 1), ("src_layer_range", [1]), ("dst_layer_range", 1), ("src_batch_index", "1")):
        with pytest.raises(TypeError):
            setattr(keyed, name, wrong)


def test_options_for_rdma_reach_the_transport() -> None:
    def rdma(**options: str) -> tuple[tuple[str, int], ...]:
        named = {f"llm.{name}": value for name, value in options.items()}
        return EngineConfig.from_options(1, LLMRole.PROMPT, named).rdma

    assert rdma() == ()
    assert rdma(RdmaTrafficClass="96", RdmaServiceLevel="3") == (
        ("rdma_traffic_class", 96),
        ("rdma_service_level", 3),
    )
    assert rdma(RdmaTrafficClass="300", RdmaServiceLevel="8") == ()  # taken, and no device has that
    with pytest.raises(LLMException):
        rdma(TransferBackend="hixl", RdmaTrafficClass="130")
