"""What a script configures: `LLMRole`, `LLMClusterInfo` and `LLMConfig`."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

from .status import raise_if_false
from .utils.utils import check_dict, check_int32, check_isinstance, check_uint16, check_uint32, check_uint64

__all__ = ["LLMClusterInfo", "LLMConfig", "LLMRole", "LlmConfig", "trans_str_ip"]


class LLMRole(IntEnum):
    """What a node is for. It restricts nothing."""

    PROMPT = 1
    DECODER = 2
    MIX = 3
    # As the published guide spells them.
    Prompt = 1
    Decoder = 2
    Mix = 3

    def __str__(self) -> str:
        return f"LLMRole.{self.name}"


def trans_str_ip(ip: str | int) -> int:
    """Return an IPv4 address as the number that link information holds: its first octet is the lowest byte.

    Parameters
    ----------
    ip : str or int
        Text that `inet_aton` reads (so ``"127.1"`` is an address), or that number itself, which is not checked.

    Raises
    ------
    TypeError
        Neither text nor a number.
    RuntimeError
        The text is no IPv4 address.
    """
    check_isinstance("ip", ip, (str, int), allow_none=False)
    if not isinstance(ip, str):
        return int(ip)
    try:
        return int.from_bytes(socket.inet_aton(ip), "little")
    except OSError:
        raise RuntimeError(f"{ip!r:.80} is not an IPv4 address") from None


def ip_text(ip: int) -> str:
    """Return the text of an address that `trans_str_ip` has made.

    Raises
    ------
    TypeError
        The number is none of 32 bits.
    """
    if not 0 <= ip < 2**32:
        raise TypeError(f"ip {ip} does not fit into 32 bits")
    return socket.inet_ntoa(ip.to_bytes(4, "little"))


class LLMClusterInfo:
    """A peer to link: its cluster id, its address, and the address of this node."""

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | int = 0
        self._local: list[tuple[int, int]] = []
        self._remote: list[tuple[int, int]] = []

    @property
    def remote_cluster_id(self) -> int | None:
        """Cluster id of the peer, 0 to 2**64 - 1; None until it is set."""
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, remote_cluster_id: int) -> None:
        check_uint64("remote_cluster_id", remote_cluster_id)
        self._remote_cluster_id = int(remote_cluster_id)

    @property
    def remote_role_type(self) -> LLMRole | int:
        """Role of the peer. Nothing depends on it."""
        return self._remote_role_type

    @remote_role_type.setter
    def remote_role_type(self, remote_role_type: LLMRole | int) -> None:
        check_isinstance("remote_role_type", remote_role_type, (LLMRole, int))
        self._remote_role_type = remote_role_type

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Name an address of this node. `ip` is IPv4, `port` 0 to 65535."""
        self._local.append(self._pair(ip, port))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Name where the peer listens. `ip` is IPv4, `port` 0 to 65535."""
        self._remote.append(self._pair(ip, port))

    @staticmethod
    def _pair(ip: str | int, port: int) -> tuple[int, int]:
        number = trans_str_ip(ip)
        check_uint16("port", port)
        return number, int(port)

    @property
    def local_ip_info_list(self) -> list[tuple[int, int]]:
        """Addresses of this node, as pairs of a number and a port."""
        return self._local

    @property
    def remote_ip_info_list(self) -> list[tuple[int, int]]:
        """Addresses of the peer, as pairs of a number and a port."""
        return self._remote


# Options. ---------------------------------------------------------------------------------------------------


def _text(value: object) -> str:
    return str(value)


def _flag(value: object) -> str:
    return "1" if value else "0"


class _Option:
    """A property of `LlmConfig`: how a value is checked, and what its unset value is."""

    def __init__(
        self, key: str, check: Callable[[str, Any], Any], doc: str, *, unset: Any = None, write: Any = _text
    ) -> None:
        self.key = key
        self._check = check
        self._unset = unset
        self.write = write
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, config: Any, owner: type | None = None) -> Any:
        if config is None:
            return self
        return config._values.get(self._name, self._unset)

    def __set__(self, config: Any, value: Any) -> None:
        value = self._check(self._name, value)
        if value is None:
            config._values.pop(self._name, None)
        else:
            config._values[self._name] = value

    def emitted(self, config: Any) -> Any:
        """Return the value to write; None for none."""
        return config._values.get(self._name)


class _NonEmpty(_Option):
    """One that is not written where it is the empty text."""

    def emitted(self, config: Any) -> Any:
        return super().emitted(config) or None


def _check_str(name: str, value: Any) -> Any:
    check_isinstance(name, value, str)
    return value


def _check_bool(name: str, value: Any) -> Any:
    check_isinstance(name, value, bool)
    return value


def _check_uint32_option(name: str, value: Any) -> int:
    check_uint32(name, value)
    return int(value)


def _check_optional_int(name: str, value: Any) -> Any:
    check_isinstance(name, value, int)
    return value


def _check_device_id(name: str, value: Any) -> Any:
    check_isinstance(name, value, (int, list, tuple), allow_none=False)
    many = isinstance(value, (list, tuple))
    check_isinstance(name, value if many else [value], (list, tuple), int)
    for device in value if many else [value]:
        raise_if_false(device >= 0, "{} must be 0 or above, got {}", name, device)
        check_int32(name, device)
    return value


def _check_sync_kv_timeout(name: str, value: Any) -> int:
    check_isinstance(name, value, (int, str))
    if isinstance(value, str):
        raise_if_false(value.isascii() and value.isdecimal(), "{} must be a decimal number, got {!r:.80}", name, value)
    milliseconds = int(value)
    raise_if_false(milliseconds > 0, "{} must be above 0, got {}", name, milliseconds)
    check_int32(name, milliseconds)
    return milliseconds


def _check_within(low: int, high: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        check_isinstance(name, value, int, allow_none=False)
        raise_if_false(low <= value <= high, "{}={} is outside {}..{}", name, value, low, high)
        return int(value)

    return check


def _check_mem_utilization(name: str, value: Any) -> Any:
    check_isinstance(name, value, float, allow_none=False)
    raise_if_false(0.0 <= value <= 1.0, "{}={} is outside 0.0..1.0", name, value)
    return value


def _check_cluster_info(name: str, value: Any) -> Any:
    check_isinstance(name, value, str, allow_none=False)
    json.loads(value)
    return value


def _write_cluster_info(value: str) -> str:
    info = json.loads(value)
    for entry in info.get("listen_ip_info", []) if isinstance(info, dict) else []:
        if isinstance(entry.get("ip"), str):
            entry["ip"] = trans_str_ip(entry["ip"])
    return json.dumps(info)


class LlmConfig:
    """The options of `LLMDataDist.init`: set properties, then give it `generate_options`.

    Each property checks what it is given: a wrong type raises `TypeError`, a value that cannot be used `LLMException`
    with ``LLM_PARAM_INVALID``, a number that does not fit `ValueError`.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._options: dict[str, str] = {}

    device_id = _Option("ge.exec.deviceId", _check_device_id, "Number of the device; None until it is set.")
    sync_kv_timeout = _Option(
        "llm.SyncKvCacheWaitTime", _check_sync_kv_timeout, "Deadline of a transfer in milliseconds; 1000 if not set."
    )
    listen_ip_info = _NonEmpty("llm.listenIpInfo", _check_str, 'Where to listen: ``"ip:port"``.', unset="")
    enable_cache_manager = _Option(
        "llm.EnableCacheManager", _check_bool, "Whether there is a `CacheManager`.", unset=False, write=_flag
    )
    enable_remote_cache_accessible = _Option(
        "llm.EnableRemoteCacheAccessible", _check_bool, "Whether peers name caches by id.", unset=False, write=_flag
    )
    mem_pool_cfg = _NonEmpty("llm.MemPoolConfig", _check_str, "Pool of device memory, as JSON.", unset="")
    host_mem_pool_cfg = _NonEmpty("llm.HostMemPoolConfig", _check_str, "Pool of host memory, as JSON.", unset="")
    local_comm_res = _Option("llm.LocalCommRes", _check_str, "Part of a rank table, as JSON; may be empty.", unset="")
    transfer_backend = _Option("llm.TransferBackend", _check_str, '``"hixl"``, or not set.', unset="")
    global_resource_config = _Option("llm.GlobalResourceConfig", _check_str, "For HIXL, as JSON.", unset="")
    link_total_time = _Option(
        "llm.LinkTotalTime", _check_within(0, 2**32 - 1), "Seconds that `LLMDataDist.link` may take.", unset=0
    )
    link_retry_count = _Option("llm.LinkRetryCount", _check_within(1, 100), "Attempts of `LLMDataDist.link`.", unset=1)
    rdma_traffic_class = _Option("llm.RdmaTrafficClass", _check_uint32_option, "For RDMA: 0 to 255.")
    rdma_service_level = _Option("llm.RdmaServiceLevel", _check_uint32_option, "For RDMA: 0 to 7.")
    deploy_res_path = _NonEmpty("llm.deployResPath", _check_str, "Of the first version.", unset="")
    buf_pool_cfg = _NonEmpty("llm.BufPoolCfg", _check_str, "Of the first version.", unset="")
    cluster_info = _NonEmpty(
        "llm.ClusterInfo", _check_cluster_info, "Of the first version, as JSON.", unset="", write=_write_cluster_info
    )
    output_max_size = _Option("llm.OutputMaxSize", _check_optional_int, "Of the first version.")
    enable_switch_role = _Option("llm.EnableSwitchRole", _check_bool, "Of the first version.", unset=False, write=_flag)
    mem_utilization = _Option(
        "llm.MemoryUtilization", _check_mem_utilization, "Of the first version: 0.0 to 1.0.", unset=0.95
    )

    @property
    def ge_options(self) -> dict[str, str]:
        """Further options under their own keys."""
        given: dict[str, str] = self._values.get("ge_options", {})
        return given

    @ge_options.setter
    def ge_options(self, ge_options: dict[str, str]) -> None:
        if ge_options is None:
            raise AttributeError("ge_options is None, which has no items")
        check_dict("ge_options", ge_options, str, str)
        self._values["ge_options"] = ge_options

    def generate_options(self) -> dict[str, str]:
        """Return the options as `LLMDataDist.init` takes them.

        Returns
        -------
        dict of str to str
            Always the same object, brought up to date: what was once in it is not removed.
        """
        self._options.update(self.ge_options)
        for option in _OPTIONS:
            value = option.emitted(self)
            if value is None or (option is LlmConfig.enable_switch_role and not value):
                continue
            if option is LlmConfig.device_id:
                many = list(value) if isinstance(value, (list, tuple)) else [value]
                self._options["ge.exec.deviceId"] = ";".join(map(str, many))
                self._options["ge.session_device_id"] = str(many[0])
            else:
                self._options[option.key] = option.write(value)
        self._options[LlmConfig.mem_utilization.key] = str(self.mem_utilization)
        return self._options

    gen_options = generate_options

    @property
    def options(self) -> dict[str, str]:
        """The same as `generate_options`."""
        return self.generate_options()


_OPTIONS: Final = tuple(option for option in vars(LlmConfig).values() if isinstance(option, _Option))

LLMConfig = LlmConfig
