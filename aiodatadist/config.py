"""`Config`: what a DataDist may be told, and the only reader of ``AIODATADIST_*`` environment variables."""

from __future__ import annotations

import json
import math
import operator
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, SupportsFloat

from ._hixl_options import check_hixl_options
from .errors import ConfigError

__all__ = ["KNOWN_TRANSPORTS", "Config"]

KNOWN_TRANSPORTS: Final = ("shm", "tcp", "verbs", "hixl", "sim")
"""Names that `Config.transports` may hold."""

_PREFIX: Final = "AIODATADIST_"
# Read by setup.py and the native build, not here.
_BUILD_VARIABLES: Final = frozenset(
    {"AIODATADIST_DEBUG", "AIODATADIST_SANITIZE", "AIODATADIST_WERROR", "AIODATADIST_VERBS"}
)
# Secrets stay out of the environment, which child processes inherit and crash reports show.
_NOT_FROM_ENVIRONMENT: Final = frozenset({"cluster_key"})

_KIB: Final = 1024
_MIB: Final = 1024**2
_GIB: Final = 1024**3
_YEAR: Final = 365 * 86400.0

# field -> (low, high). Deadlines become int64 nanoseconds in the engine; a year is far from exceeding them.
_SECONDS: Final[Mapping[str, tuple[float, float]]] = {
    "transfer_timeout": (1e-6, _YEAR),
    "link_timeout": (1e-3, _YEAR),
    "handshake_timeout": (1e-3, 3600.0),
    "drain_timeout": (0.0, 600.0),
    "heartbeat_limit": (0.1, 3600.0),
    "inline_budget": (0.0, 0.1),
}
_OPTIONAL_SECONDS: Final = frozenset({"transfer_timeout", "link_timeout"})
_COUNTS: Final[Mapping[str, tuple[int, int]]] = {
    "copy_threads": (1, 256),
    "io_threads": (1, 256),
    "tcp_connections": (1, 64),
    "notify_credits": (1, 65536),
    "rdma_gid_index": (0, 255),
    "rdma_traffic_class": (0, 255),
    "rdma_service_level": (0, 7),
    "rdma_timeout": (5, 20),
    "rdma_retry_count": (1, 7),
    "device_id": (0, 2**31 - 1),
}
_OPTIONAL_COUNTS: Final = frozenset({"rdma_gid_index", "device_id"})
_NAMES: Final = frozenset({"transports", "rdma_devices"})
# What other programs' users have set already. It counts where the variable of our own is not set, and only with verbs:
# who does not use it must not meet what others have got wrong.
_ALIASES: Final[Mapping[str, str]] = {
    "KVCACHE_RDMA_NICS": "rdma_devices",
    "HCCL_RDMA_TC": "rdma_traffic_class",
    "HCCL_RDMA_SL": "rdma_service_level",
    "HCCL_RDMA_TIMEOUT": "rdma_timeout",
    "HCCL_RDMA_RETRY_CNT": "rdma_retry_count",
}
_DEVICES_MOST: Final = 32
_PATH_MOST: Final = 4096
_DEVICE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,63}(:[1-9][0-9]{0,2})?\Z", re.ASCII)
_BYTES: Final[Mapping[str, tuple[int, int]]] = {
    "inline_bytes": (0, 16 * _MIB),
    "populate_limit": (0, 2**63 - 1),
    "notify_max_bytes": (1, 16 * _MIB),
    "control_max_bytes": (64 * _KIB, 256 * _MIB),
}
_BOOLS: Final = frozenset({"allow_any_ptracer"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Settings of one DataDist. Times are float seconds, sizes are bytes.

    Parameters
    ----------
    transports : tuple of str
        Transports that links may use, best first. A link takes the first that works with its peer;
        ``link.path`` says which, and why not the others. This version has ``"shm"``, ``"tcp"`` and, on machines
        with RDMA, ``"verbs"``, or with Ascend NPUs, ``"hixl"``. These two pin the memory of registered caches. The
        other known names count as not usable.
    cluster_key : bytes, optional
        A secret of 16 to 1024 bytes that both ends of every link have to prove; it never travels. Never shown by
        ``repr()``, and not read from the environment.
    transfer_timeout : float or None
        Deadline of a transfer that names none. None waits for ever.
    link_timeout : float or None
        Deadline of `link` and `unlink` calls that name none. None waits for ever.
    handshake_timeout : float
        How long an incoming connection may take to say who it is.
    drain_timeout : float
        How long a cancelled or late transfer may drain before force ends it. 0: force at once.
    heartbeat_limit : float
        Silence after which a peer counts as lost.
    copy_threads : int
        Threads of the process that copy memory for shm.
    io_threads : int
        Threads of the process that move bytes of tcp connections.
    tcp_connections : int
        Data connections of a tcp link for large transfers.
    inline_bytes : int
        Largest transfer that may finish inside the call that starts it. 0: none.
    inline_budget : float
        Estimated inline work in one turn of the event loop after which futures finish in the next turn.
    populate_limit : int
        Most bytes of library memory to populate in the background, per cache: at once where it is allocated, and
        where it is a peer's that this process maps. 0: none, memory is taken as it is touched.
    notify_credits : int
        Notifications that a peer may have sent and nobody has read yet.
    notify_max_bytes : int
        Largest payload of ``notify=``.
    control_max_bytes : int
        Largest message of the control stream, sent or received. At least `notify_max_bytes` plus 1 KiB.
    rdma_devices : tuple of str
        RDMA devices for verbs in order of preference, as ``"mlx5_0"`` or, with a port, ``"mlx5_0:1"``; the first that
        is usable is taken. Empty: any. Read from ``AIODATADIST_RDMA_DEVICES``, or else ``KVCACHE_RDMA_NICS``.
    rdma_gid_index : int or None
        Which address of the device's port to use. None: RoCE v2 over IPv4 if there is one, or else the best there is.
    rdma_traffic_class : int
        Of RoCE packets, 0 to 255 in steps of 4: the DSCP times 4, by which switches find the lossless queue. Also
        ``HCCL_RDMA_TC``.
    rdma_service_level : int
        0 to 7. Also ``HCCL_RDMA_SL``.
    rdma_timeout : int
        5 to 20: the device waits 4.096 us times 2 to this for an acknowledgement. Also ``HCCL_RDMA_TIMEOUT``.
    rdma_retry_count : int
        1 to 7: how often it tries again then. Also ``HCCL_RDMA_RETRY_CNT``.
    device_id : int or None
        The NPU that hixl uses, as ACL counts the devices that this process sees. None: 0.
    hixl_library : str or None
        Path of CANN's ``libcann_hixl.so``, or of the folder that holds it. None: it is found through
        ``ASCEND_HOME_PATH``, the usual folders of CANN, or the dynamic loader.
    hixl_options : mapping of str to str
        Options for HIXL by the names that it gives them, such as ``{"RdmaTrafficClass": "132"}``. Read from
        ``AIODATADIST_HIXL_OPTIONS`` as a JSON object. A copy is kept.
    allow_any_ptracer : bool
        Let any process of this user read and write this process's memory where Yama restricts ptrace and
        there is more than one peer. Without it ordinary memory then travels over tcp.

    Raises
    ------
    ConfigError
        A value cannot be used. The message names field, value and limit.

    Notes
    -----
    ``Config(...)`` reads no environment; `from_env` does, and a DataDist that is given no Config uses it.
    Threads are one set per process: the first DataDist to open decides their number.
    """

    transports: tuple[str, ...] = ("shm", "tcp")
    cluster_key: bytes | None = field(default=None, repr=False)
    transfer_timeout: float | None = 30.0
    link_timeout: float | None = 10.0
    handshake_timeout: float = 5.0
    drain_timeout: float = 1.0
    heartbeat_limit: float = 10.0
    copy_threads: int = 2
    io_threads: int = 2
    tcp_connections: int = 2
    inline_bytes: int = 128 * _KIB
    inline_budget: float = 200e-6
    populate_limit: int = 4 * _GIB
    notify_credits: int = 256
    notify_max_bytes: int = 64 * _KIB
    control_max_bytes: int = 4 * _MIB
    rdma_devices: tuple[str, ...] = ()
    rdma_gid_index: int | None = None
    rdma_traffic_class: int = 0
    rdma_service_level: int = 0
    rdma_timeout: int = 14
    rdma_retry_count: int = 7
    device_id: int | None = None
    hixl_library: str | None = None
    hixl_options: Mapping[str, str] = field(default_factory=dict, hash=False)
    allow_any_ptracer: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "transports", _checked_transports(self.transports))
        _check_cluster_key(self.cluster_key)
        for name, (least, most) in _SECONDS.items():
            object.__setattr__(self, name, _checked_seconds(name, getattr(self, name), least, most))
        object.__setattr__(self, "rdma_devices", _checked_devices(self.rdma_devices))
        for name, (low, high) in _COUNTS.items():
            if name in _OPTIONAL_COUNTS and getattr(self, name) is None:
                continue
            object.__setattr__(self, name, _checked_integer(name, getattr(self, name), low, high, ""))
        for name, (low, high) in _BYTES.items():
            object.__setattr__(self, name, _checked_integer(name, getattr(self, name), low, high, " bytes"))
        if self.rdma_traffic_class % 4:
            raise ConfigError(
                f"rdma_traffic_class={self.rdma_traffic_class} is no multiple of 4",
                hint="give the DSCP times 4, such as 132 for DSCP 33",
            )
        object.__setattr__(self, "hixl_library", _checked_path("hixl_library", self.hixl_library))
        object.__setattr__(self, "hixl_options", check_hixl_options(self.hixl_options))
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r:.80} is no bool", hint="give True or False")
        if self.notify_max_bytes + _KIB > self.control_max_bytes:
            raise ConfigError(
                f"notify_max_bytes={self.notify_max_bytes} does not fit into "
                f"control_max_bytes={self.control_max_bytes}",
                hint=f"raise control_max_bytes to {self.notify_max_bytes + _KIB} or more",
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """Make a Config from ``AIODATADIST_*`` variables; what is not set there keeps its default.

        Each field but `cluster_key` has a variable, such as ``AIODATADIST_TRANSPORTS=tcp`` or
        ``AIODATADIST_COPY_THREADS=4``. Sizes take a suffix (``256KiB``, ``4GiB``), optional times ``none``,
        and bools ``1``, ``0``, ``true`` or ``false``. A variable that is set but empty counts as not set. Where those
        for RDMA are not set and `transports` holds verbs, ``KVCACHE_RDMA_NICS`` and ``HCCL_RDMA_TC``, ``_SL``,
        ``_TIMEOUT`` and ``_RETRY_CNT`` are read in their place.

        Parameters
        ----------
        environ : mapping of str to str, optional
            Read instead of ``os.environ``.
        **overrides
            Fields that win over the environment.

        Returns
        -------
        Config

        Raises
        ------
        ConfigError
            A variable or an override has a value that cannot be used. Names the variable.

        Warns
        -----
        UserWarning
            There is an unknown ``AIODATADIST_*`` variable: a misspelling would else go unnoticed.
        """
        environ = os.environ if environ is None else environ
        names = {_PREFIX + f.name.upper(): f.name for f in fields(cls) if f.name not in _NOT_FROM_ENVIRONMENT}
        values: dict[str, Any] = {}
        read: list[str] = []
        for variable in sorted(environ):
            if not variable.startswith(_PREFIX) or variable in _BUILD_VARIABLES:
                continue
            name = names.get(variable)
            if name is None:
                warnings.warn(
                    f"environment variable {variable} is unknown and ignored; known are {', '.join(names)}",
                    UserWarning,
                    stacklevel=2,
                )
            elif name not in overrides and environ[variable].strip():
                values[name] = _from_text(variable, name, environ[variable].strip())
                read.append(variable)
        transports = overrides.get("transports", values.get("transports", ()))
        aliases = _ALIASES if isinstance(transports, (tuple, list)) and "verbs" in transports else {}
        for variable, name in aliases.items():
            if name not in values and name not in overrides and environ.get(variable, "").strip():
                values[name] = _from_text(variable, name, environ[variable].strip())
                read.append(variable)
        try:
            return cls(**values, **overrides)
        except ConfigError as why:
            from_variables = ", ".join(read)
            if from_variables:
                why.add_note(f"taken from the environment: {from_variables}")
            raise


def _checked_transports(value: object) -> tuple[str, ...]:
    hint = f"give some of {', '.join(KNOWN_TRANSPORTS)}, best first"
    if isinstance(value, str) or not isinstance(value, (tuple, list)):
        raise ConfigError(f"transports={value!r:.80} is no tuple of names", hint=hint)
    if not value:
        raise ConfigError("transports is empty, and a link needs at least one", hint=hint)
    for name in value:
        if name not in KNOWN_TRANSPORTS:
            raise ConfigError(f"transports holds {name!r:.80}, which is no transport", hint=hint)
    if len(set(value)) != len(value):
        raise ConfigError(f"transports={value!r} names a transport twice", hint=hint)
    return tuple(value)


def _checked_devices(value: object) -> tuple[str, ...]:
    hint = 'give names as `ibv_devices` lists them, such as ("mlx5_0",) or ("mlx5_0:1",)'
    if isinstance(value, str) or not isinstance(value, (tuple, list)):
        raise ConfigError(f"rdma_devices={value!r:.80} is no tuple of names", hint=hint)
    if len(value) > _DEVICES_MOST:
        raise ConfigError(f"rdma_devices holds {len(value)} names, above {_DEVICES_MOST}", hint="give fewer")
    for name in value:
        if not isinstance(name, str) or not _DEVICE_NAME.match(name):
            raise ConfigError(f"rdma_devices holds {name!r:.80}, which is no name of a device", hint=hint)
    return tuple(value)


def _checked_path(name: str, value: object) -> str | None:
    if value is None:
        return None
    hint = "give the path of a file or a folder, or None to have it found"
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name}={value!r:.80} is no path", hint=hint)
    path = os.fspath(value)
    if not isinstance(path, str) or not path or "\0" in path or len(path) > _PATH_MOST:
        raise ConfigError(f"{name}={path!r:.80} is no path", hint=hint)
    return path


def _check_cluster_key(value: object) -> None:
    """Check the key without ever putting it into a message."""
    if value is None:
        return
    if not isinstance(value, bytes):
        raise ConfigError(f"cluster_key is of type {type(value).__name__}", hint="give bytes or None")
    if not 16 <= len(value) <= 1024:
        raise ConfigError(
            f"cluster_key has {len(value)} bytes, outside 16..1024",
            hint="make one with secrets.token_bytes(32)",
        )


def _checked_seconds(name: str, value: object, low: float, high: float) -> float | None:
    optional = name in _OPTIONAL_SECONDS
    if value is None and optional:
        return None
    hint = "give seconds as a float" + (", or None to wait for ever" if optional else "")
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise ConfigError(f"{name}={value!r:.80} is no number of seconds", hint=hint)
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if math.isnan(seconds) or not low <= seconds <= high:
        raise ConfigError(f"{name}={seconds} is outside {low:g}..{high:g} seconds", hint=hint)
    return seconds


def _checked_integer(name: str, value: object, low: int, high: int, unit: str) -> int:
    hint = f"give an int from {low} to {high}"
    if isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is a bool", hint=hint)
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # TypeError is what it is asked for
    except TypeError:
        raise ConfigError(f"{name}={value!r:.80} is no integer", hint=hint) from None
    if not low <= number <= high:
        raise ConfigError(f"{name}={number} is outside {low}..{high}{unit}", hint=hint)
    return number


# Reading text. ----------------------------------------------------------------------------------------------

_SIZE: Final = re.compile(r"([0-9]{1,20})\s*(|k|m|g|t|kib|mib|gib|tib|b)\Z", re.ASCII | re.IGNORECASE)
_SCALE: Final = {"": 1, "b": 1, "k": _KIB, "m": _MIB, "g": _GIB, "t": 1024 * _GIB}


def _read_size(text: str) -> int:
    match = _SIZE.match(text)
    if match is None:
        raise ValueError("write a number of bytes such as 65536, 64KiB, 16MiB or 4GiB")
    return int(match[1]) * _SCALE[match[2].lower().removesuffix("ib")]


def _read_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        raise ValueError("write a decimal number")
    return int(text)


def _read_seconds(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError("write seconds such as 2.5, or none where a field allows it") from None


def _read_bool(text: str) -> bool:
    match text.lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off":
            return False
    raise ValueError("write 1 or 0")


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _read_path(text: str) -> str:
    return text


def _read_options(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError('write a JSON object such as {"RdmaServiceLevel": "4"}') from None


_OTHER_READERS: Final[Mapping[str, Callable[[str], object]]] = {
    "hixl_library": _read_path,
    "hixl_options": _read_options,
}


def _reader(name: str) -> Callable[[str], object]:
    if name in _OTHER_READERS:
        return _OTHER_READERS[name]
    if name in _SECONDS:
        return _read_seconds
    if name in _COUNTS:
        return _read_count
    if name in _BYTES:
        return _read_size
    return _read_names if name in _NAMES else _read_bool


def _from_text(variable: str, name: str, text: str) -> object:
    try:
        return _reader(name)(text)
    except ValueError as why:
        raise ConfigError(f"environment variable {variable}={text!r:.80} cannot be read", hint=str(why)) from None
