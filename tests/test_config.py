"""Config: defaults, limits, and the reading of the environment."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import pickle
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiodatadist.config
from aiodatadist.config import KNOWN_TRANSPORTS, Config
from aiodatadist.errors import ConfigError

FIELDS = [field.name for field in dataclasses.fields(Config)]


def test_defaults() -> None:
    config = Config()
    assert config.transports == ("shm", "tcp")
    assert config.cluster_key is None
    assert (config.transfer_timeout, config.link_timeout, config.drain_timeout) == (30.0, 10.0, 1.0)
    assert config.heartbeat_limit == 10.0
    assert (config.copy_threads, config.io_threads, config.tcp_connections) == (2, 2, 2)
    assert (config.inline_bytes, config.inline_budget) == (128 * 1024, 200e-6)
    assert config.populate_limit == 4 * 1024**3
    assert (config.notify_credits, config.notify_max_bytes) == (256, 64 * 1024)
    assert config.allow_any_ptracer is False


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(TypeError):
        Config(("tcp",))  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().copy_threads = 3  # type: ignore[misc]
    four: Any = np.int8(4)
    config = Config(copy_threads=four, link_timeout=None)
    assert type(config.copy_threads) is int
    for twin in (pickle.loads(pickle.dumps(config)), copy.copy(config), dataclasses.replace(config)):
        assert twin == config
        assert hash(twin) == hash(config)


BAD: list[tuple[str, Any]] = [
    ("transports", ()),
    ("transports", "tcp"),
    ("transports", None),
    ("transports", ("tcp", "tcp")),
    ("transports", ("TCP",)),
    ("transports", ("carrier pigeon",)),
    ("transports", ([],)),
    ("cluster_key", "a string of some length"),
    ("cluster_key", b"short"),
    ("cluster_key", bytes(1025)),
    ("transfer_timeout", 0),
    ("transfer_timeout", -1.0),
    ("transfer_timeout", float("nan")),
    ("transfer_timeout", float("inf")),
    ("transfer_timeout", 10**400),
    ("transfer_timeout", "30"),
    ("transfer_timeout", True),
    ("link_timeout", 0.0),
    ("handshake_timeout", None),
    ("drain_timeout", None),
    ("drain_timeout", -0.1),
    ("heartbeat_limit", 0.01),
    ("inline_budget", 1.0),
    ("copy_threads", 0),
    ("copy_threads", 257),
    ("copy_threads", 2.0),
    ("copy_threads", True),
    ("io_threads", -1),
    ("tcp_connections", 65),
    ("inline_bytes", -1),
    ("populate_limit", 2**63),
    ("notify_credits", 0),
    ("notify_max_bytes", 0),
    ("control_max_bytes", 1024),
    ("rdma_devices", "mlx5_0"),
    ("rdma_devices", ("mlx5 0",)),
    ("rdma_devices", ("mlx5_0:0",)),
    ("rdma_devices", (1,)),
    ("rdma_devices", ("mlx5_0",) * 33),
    ("rdma_gid_index", -1),
    ("rdma_gid_index", 256),
    ("rdma_traffic_class", 256),
    ("rdma_traffic_class", 130),
    ("rdma_service_level", 8),
    ("rdma_timeout", 4),
    ("rdma_timeout", 21),
    ("rdma_retry_count", 0),
    ("rdma_retry_count", 8),
    ("device_id", -1),
    ("device_id", "0"),
    ("hixl_library", ""),
    ("hixl_library", 3),
    ("hixl_library", "a\0b"),
    ("hixl_options", "RdmaServiceLevel=4"),
    ("hixl_options", {"RdmaServiceLevels": "4"}),
    ("hixl_options", {"RdmaServiceLevel": 4}),
    ("hixl_options", {"RdmaServiceLevel": "8"}),
    ("hixl_options", {"RdmaTrafficClass": "130"}),
    ("hixl_options", {"RdmaTrafficClass": ""}),
    ("hixl_options", {"AutoConnect": "yes"}),
    ("hixl_options", {"BufferPool": "4"}),
    ("hixl_options", {"BufferPool": "4:8", "EnableUseFabricMem": "1"}),
    ("hixl_options", {"LocalCommRes": "1.3"}),
    ("hixl_options", {"LocalCommRes": '{"version": "2"}'}),
    ("hixl_options", {"GlobalResourceConfig": "[]"}),
    ("hixl_options", {"GlobalResourceConfig": '{"channel_pool.max_channel": 513}'}),
    ("hixl_options", {"GlobalResourceConfig": '{"channel_pool": {"max_channels": 5}}'}),
    ("hixl_options", {"GlobalResourceConfig": '{"channel_pool.low_waterline": 0.5}'}),
    ("hixl_options", {"GlobalResourceConfig": '{"comm_resource_config.protocol_desc": ["tcp:host"]}'}),
    ("hixl_options", {"GlobalResourceConfig": '{"fabric_memory.enable_aicpu_unfold": 2}'}),
    ("hixl_options", {"GlobalResourceConfig": '{"local_comm_res_path": 5}'}),
    ("allow_any_ptracer", 1),
    ("allow_any_ptracer", None),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_values_name_field_and_fix(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        Config(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert caught.value.hint


def test_options_of_hixl_are_passed_as_they_are() -> None:
    options = {
        "RdmaTrafficClass": "132",
        "BufferPool": "0:0",
        "EnableUseFabricMem": "0",
        "LocalCommRes": '{"version": "1.3"}',
        "GlobalResourceConfig": '{"channel_pool": {"low_waterline": 0.2, "high_waterline": 0.5}, '
        '"connect_pool.thread_num": "4", "comm_resource_config.protocol_desc": "roce:device"}',
    }
    config = Config(hixl_options=options)
    assert config.hixl_options == options
    options.clear()
    assert config.hixl_options["RdmaTrafficClass"] == "132"
    read = Config.from_env({"AIODATADIST_HIXL_OPTIONS": '{"RdmaServiceLevel": "4"}', "AIODATADIST_DEVICE_ID": "3"})
    assert read.hixl_options == {"RdmaServiceLevel": "4"}
    assert read.device_id == 3
    assert Config.from_env({"AIODATADIST_HIXL_LIBRARY": "/opt/hixl"}).hixl_library == "/opt/hixl"


def test_every_field_is_checked() -> None:
    assert {name for name, _ in BAD} == set(FIELDS)


def test_unknown_fields_are_no_fields() -> None:
    with pytest.raises(TypeError):
        Config(copy_thread=3)  # type: ignore[call-arg]


def test_payloads_fit_into_messages() -> None:
    with pytest.raises(ConfigError, match="control_max_bytes"):
        Config(notify_max_bytes=8 * 1024**2)
    assert Config(notify_max_bytes=8 * 1024**2, control_max_bytes=9 * 1024**2).notify_max_bytes == 8 * 1024**2


def test_the_key_is_never_shown() -> None:
    secret = b"hunter2 hunter2 hunter2"
    assert "hunter2" not in repr(Config(cluster_key=secret))
    assert "hunter2" not in str(Config(cluster_key=secret))
    for bad in (b"hunter2", secret.decode()):
        with pytest.raises(ConfigError) as caught:
            Config(cluster_key=bad)  # type: ignore[arg-type]
        assert "hunter2" not in str(caught.value)


# --- the environment ------------------------------------------------------------------------------


def test_names_of_others_for_rdma() -> None:
    theirs = {
        "KVCACHE_RDMA_NICS": "mlx5_0,mlx5_1:2",
        "HCCL_RDMA_TC": "132",
        "HCCL_RDMA_SL": "4",
        "HCCL_RDMA_TIMEOUT": "20",
        "HCCL_RDMA_RETRY_CNT": "3",
    }
    config = Config.from_env(theirs, transports=("verbs", "tcp"))
    assert config.rdma_devices == ("mlx5_0", "mlx5_1:2")
    assert (config.rdma_traffic_class, config.rdma_service_level) == (132, 4)
    assert (config.rdma_timeout, config.rdma_retry_count) == (20, 3)
    ours = {"AIODATADIST_RDMA_DEVICES": "rxe0", "AIODATADIST_RDMA_TIMEOUT": "14", "AIODATADIST_RDMA_GID_INDEX": "3"}
    verbs = {"AIODATADIST_TRANSPORTS": "shm,verbs,tcp"}
    config = Config.from_env(theirs | ours | verbs, rdma_retry_count=7)
    assert (config.rdma_devices, config.rdma_gid_index) == (("rxe0",), 3)
    assert (config.rdma_timeout, config.rdma_retry_count, config.rdma_traffic_class) == (14, 7, 132)
    for variable, text in (("HCCL_RDMA_TC", "133"), ("HCCL_RDMA_TIMEOUT", "4"), ("HCCL_RDMA_SL", "high")):
        with pytest.raises(ConfigError) as caught:
            Config.from_env({variable: text} | verbs)
        assert variable in str(caught.value) + "".join(caught.value.__notes__ if text != "high" else ())


def test_names_of_others_for_rdma_mean_nothing_without_verbs() -> None:
    theirs = {"KVCACHE_RDMA_NICS": "a b", "HCCL_RDMA_TC": "131", "HCCL_RDMA_TIMEOUT": "24", "HCCL_RDMA_SL": "high"}
    assert Config.from_env(theirs) == Config()
    assert Config.from_env(theirs | {"AIODATADIST_TRANSPORTS": "tcp"}) == Config(transports=("tcp",))
    assert Config.from_env(theirs | {"AIODATADIST_TRANSPORTS": "verbs"}, transports=("shm",)).transports == ("shm",)
    with pytest.raises(ConfigError):  # not the other error, of a string that holds the name
        Config.from_env({}, transports="verbs")


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODATADIST_COPY_THREADS", "7")
    assert Config().copy_threads == 2
    assert Config.from_env().copy_threads == 7
    assert Config.from_env(copy_threads=3).copy_threads == 3
    assert Config.from_env({}).copy_threads == 2


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("transports", "tcp", ("tcp",)),
        ("transports", " tcp , shm ", ("tcp", "shm")),
        ("copy_threads", " 4 ", 4),
        ("transfer_timeout", "2.5", 2.5),
        ("transfer_timeout", "None", None),
        ("link_timeout", "1e2", 100.0),
        ("populate_limit", "0", 0),
        ("populate_limit", "2GiB", 2 * 1024**3),
        ("inline_bytes", "64k", 64 * 1024),
        ("inline_bytes", "64 KiB", 64 * 1024),
        ("inline_bytes", "100B", 100),
        ("allow_any_ptracer", "1", True),
        ("allow_any_ptracer", "FALSE", False),
        ("drain_timeout", "", 1.0),
    ],
)
def test_values_from_text(name: str, text: str, value: object) -> None:
    assert getattr(Config.from_env({f"AIODATADIST_{name.upper()}": text}), name) == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("AIODATADIST_TRANSPORTS", "tcp,"),
        ("AIODATADIST_TRANSPORTS", "tcp;shm"),
        ("AIODATADIST_COPY_THREADS", "two"),
        ("AIODATADIST_COPY_THREADS", "1_0"),
        ("AIODATADIST_COPY_THREADS", "0"),
        ("AIODATADIST_COPY_THREADS", "9" * 5000),
        ("AIODATADIST_LINK_TIMEOUT", "soon"),
        ("AIODATADIST_LINK_TIMEOUT", "nan"),
        ("AIODATADIST_DRAIN_TIMEOUT", "none"),
        ("AIODATADIST_POPULATE_LIMIT", "4 GB/s"),
        ("AIODATADIST_POPULATE_LIMIT", "-1"),
        ("AIODATADIST_ALLOW_ANY_PTRACER", "maybe"),
    ],
)
def test_bad_text_names_the_variable(variable: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_env({variable: text})
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert variable in str(caught.value) + notes
    assert caught.value.hint


@given(st.sampled_from([name for name in FIELDS if name != "cluster_key"]), st.text(max_size=20))
def test_any_text_is_a_config_or_a_config_error(name: str, text: str) -> None:
    try:
        Config.from_env({f"AIODATADIST_{name.upper()}": text})
    except ConfigError as why:
        assert why.hint  # noqa: PT017 - most texts raise, some do not


def test_unknown_variables_warn() -> None:
    with pytest.warns(UserWarning, match="AIODATADIST_COPY_THREAD is unknown"):
        config = Config.from_env({"AIODATADIST_COPY_THREAD": "9"})
    assert config == Config()


def test_the_key_does_not_come_from_the_environment() -> None:
    with pytest.warns(UserWarning, match="AIODATADIST_CLUSTER_KEY"):
        config = Config.from_env({"AIODATADIST_CLUSTER_KEY": "x" * 32})
    assert config.cluster_key is None


def test_build_variables_and_others_are_silent() -> None:
    build = {"AIODATADIST_DEBUG": "1", "AIODATADIST_SANITIZE": "thread", "AIODATADIST_WERROR": "1"}
    assert Config.from_env({**build, "PATH": "/bin", "aiodatadist_x": "1"}) == Config()


def test_nothing_else_reads_the_environment() -> None:
    package = pathlib.Path(aiodatadist.config.__file__).parent
    reads = re.compile(r"(environ|getenv)[^\n]*AIODATADIST_|AIODATADIST_[^\n]*(environ|getenv)")
    modules = [path for path in package.rglob("*.py") if path.name != "config.py"]
    assert modules
    assert [path for path in modules if reads.search(path.read_text())] == []
    assert "os.environ" in pathlib.Path(aiodatadist.config.__file__).read_text()


def test_known_transports() -> None:
    assert Config(transports=KNOWN_TRANSPORTS).transports == KNOWN_TRANSPORTS
    assert Config(transports=["tcp"]).transports == ("tcp",)  # type: ignore[arg-type]
