"""The options that HIXL takes: `Config.hixl_options`, checked before HIXL sees them.

HIXL gets them as strings, and some of its own checks come late or only as a number. What is known of them is checked
here by name, range and form, so that a mistake is an error which names the option and its limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from .errors import ConfigError

__all__ = ["check_hixl_options"]

_DECIMAL: Final = re.compile(r"[0-9]{1,9}\Z", re.ASCII)
_POOL: Final = re.compile(r"([0-9]{1,9}):([0-9]{1,9})\Z", re.ASCII)
_TEXT_MOST: Final = 1024 * 1024
_PROTOCOLS: Final = (
    "roce:device",
    "hccs:device",
    "ub_ctp:device",
    "uboe:device",
    "ub_rtp:device",
    "roce:host",
    "ub_ctp:host",
)
_COMM_RES_VERSIONS: Final = ("1.0", "1.2", "1.3")


def check_hixl_options(value: object) -> dict[str, str]:
    """Check the options for HIXL and return them as a dict of their own.

    Parameters
    ----------
    value : object
        What the user gave as `Config.hixl_options`.

    Returns
    -------
    dict of str to str
        As they were given.

    Raises
    ------
    ConfigError
        It is no mapping of strings, an option is unknown, or a value is outside its limits. Names the option.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"hixl_options={value!r:.80} is no mapping", hint='give a dict such as {"RdmaServiceLevel": "4"}'
        )
    checked: dict[str, str] = {}
    for name, text in value.items():
        check = _OPTIONS.get(name) if isinstance(name, str) else None
        if check is None:
            raise ConfigError(
                f"hixl_options holds {name!r:.80}, which is no option of HIXL",
                hint=f"known are {', '.join(_OPTIONS)}",
            )
        if not isinstance(text, str) or not 0 < len(text) <= _TEXT_MOST or "\0" in text:
            raise ConfigError(
                f"hixl_options[{name!r}]={text!r:.80} is no text of 1 to {_TEXT_MOST} characters",
                hint="HIXL takes every option as a str, numbers too",
            )
        check(name, text)
        checked[name] = text
    if checked.get("EnableUseFabricMem") == "1" and checked.get("BufferPool", "0:0") != "0:0":
        raise ConfigError(
            f"hixl_options names BufferPool={checked['BufferPool']} beside EnableUseFabricMem=1, which excludes it",
            hint="leave one of them out",
        )
    return checked


def _refuse(name: str, text: str, why: str, hint: str) -> ConfigError:
    return ConfigError(f"hixl_options[{name!r}]={text!r:.80} {why}", hint=hint)


def _check_switch(name: str, text: str) -> None:
    if text not in ("0", "1"):
        raise _refuse(name, text, "is neither '0' nor '1'", "give '1' for on or '0' for off")


def _number(low: int, high: int, step: int = 1) -> Callable[[str, str], None]:
    def check(name: str, text: str) -> None:
        if not _DECIMAL.match(text) or not low <= int(text) <= high:
            raise _refuse(name, text, f"is no number from {low} to {high}", f"give {low} to {high} in decimals")
        if int(text) % step:
            raise _refuse(name, text, f"is no multiple of {step}", f"give a multiple of {step}, such as 132")

    return check


def _check_pool(name: str, text: str) -> None:
    if not _POOL.match(text):
        raise _refuse(name, text, "is not of the form count:megabytes", "give '4:8', or '0:0' for none")


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except ValueError as why:
        raise _refuse(name, text, f"is no JSON ({why})", "give a JSON object") from None
    if not isinstance(read, dict):
        raise _refuse(name, text, "is no JSON object", "give an object, {...}")
    return read


def _is_integer(value: object, low: int, high: int) -> bool:
    if isinstance(value, str):
        return bool(_DECIMAL.match(value)) and low <= int(value) <= high
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_share(value: object) -> bool:
    try:
        return not isinstance(value, bool) and 0 <= float(value) <= 1  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


# Key of GlobalResourceConfig -> least and most.
_RESOURCES: Final[Mapping[str, tuple[int, int]]] = {
    "fabric_memory.max_capacity": (1, 1024),
    "fabric_memory.start_address": (0, 1024),
    "fabric_memory.task_stream_num": (1, 8),
    "connect_pool.thread_num": (1, 64),
    "connect_pool.task_queue_capacity": (1, 65535),
    "comm_resource_config.listen_port": (1, 65535),
    "comm_resource_config.qos": (0, 7),
    "comm_resource_config.max_active_channels": (1, 2**31 - 1),
    "channel_pool.max_channel": (1, 512),
}
_SHARES: Final = ("channel_pool.low_waterline", "channel_pool.high_waterline")
_OTHERS: Final = ("fabric_memory.enable_aicpu_unfold", "comm_resource_config.protocol_desc", "local_comm_res_path")


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with dots, however they are nested."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update({f"{key}.{inner}": deep for inner, deep in value.items()})
        else:
            flat[key] = value
    return flat


def _check_resources(name: str, text: str) -> None:
    values = _flat(_object(name, text))
    for key, value in values.items():
        if key in _RESOURCES:
            low, high = _RESOURCES[key]
            if not _is_integer(value, low, high):
                raise _refuse(name, text, f"has {key}={value!r:.40}", f"give {low} to {high}")
        elif key in _SHARES:
            if not _is_share(value):
                raise _refuse(name, text, f"has {key}={value!r:.40}", "give 0 to 1")
        elif key == "fabric_memory.enable_aicpu_unfold":
            if not isinstance(value, bool) and value not in ("true", "false"):
                raise _refuse(name, text, f"has {key}={value!r:.40}", "give true or false")
        elif key == "comm_resource_config.protocol_desc":
            named = value if isinstance(value, list) else [value]
            if not named or any(protocol not in _PROTOCOLS for protocol in named):
                raise _refuse(name, text, f"has {key}={value!r:.80}", f"give some of {', '.join(_PROTOCOLS)}")
        elif key == "local_comm_res_path":
            if not isinstance(value, str) or not value:
                raise _refuse(name, text, f"has {key}={value!r:.80}", "give the path of a file of at most 1 MiB")
        else:
            known = ", ".join((*_RESOURCES, *_SHARES, *_OTHERS))
            raise _refuse(name, text, f"has the unknown key {key!r:.80}", f"known are {known}")
    shares = [values[key] for key in _SHARES if key in values]
    if shares and (len(shares) == 1 or float(shares[0]) >= float(shares[1])):
        raise _refuse(name, text, f"has {' and '.join(_SHARES)} of {shares}", "give both, the low one below the high")


def _check_comm_res(name: str, text: str) -> None:
    values = _object(name, text)
    if values.get("version") not in _COMM_RES_VERSIONS:
        raise _refuse(
            name, text, f"has version={values.get('version')!r:.40}", f"give one of {', '.join(_COMM_RES_VERSIONS)}"
        )


_OPTIONS: Final[Mapping[str, Callable[[str, str], None]]] = {
    "EnableUseFabricMem": _check_switch,
    "RdmaTrafficClass": _number(0, 255, 4),
    "RdmaServiceLevel": _number(0, 7),
    "BufferPool": _check_pool,
    "GlobalResourceConfig": _check_resources,
    "AutoConnect": _check_switch,
    "LocalCommRes": _check_comm_res,
}
