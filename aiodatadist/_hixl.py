"""The HIXL engine of a DataDist: where its libraries are, and how it is opened."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
from collections.abc import Mapping
from typing import Final

from . import _cann, _core
from .config import Config
from .errors import TransportUnavailable

__all__ = ["open_engine"]

_HUGE_PAGE: Final = 2 * 1024**2
# Least and most seconds to connect: HIXL's documents advise 0.2 at least, and a link that waits for ever is no use.
_CONNECT_SECONDS: Final = (0.2, 30.0)


def open_engine(config: Config, listen: str | None) -> tuple[_core.HixlEngine | None, str]:
    """Open an engine; blocks, perhaps for seconds.

    Parameters
    ----------
    config : Config
    listen : str or None
        IP address or name at which the DataDist listens, if it does.

    Returns
    -------
    tuple
        The engine and what it is in words; or None, and why it cannot be opened.
    """
    libraries = _cann.find_libraries(config.hixl_library)
    # A link has time to go on with another transport where HIXL does not connect.
    limit = _CONNECT_SECONDS[1] if config.link_timeout is None else config.link_timeout / 2
    try:
        engine = _core.HixlEngine(
            (libraries.metadef, libraries.hixl, libraries.acl, _cann.shim_path()),
            config.device_id or 0,
            _own_address(listen),
            _with_defaults(config.hixl_options),
            alignment=_alignment(config.hixl_options),
            drain_timeout=config.drain_timeout,
            connect_timeout=min(max(limit, _CONNECT_SECONDS[0]), _CONNECT_SECONDS[1]),
            others=config.transports != ("hixl",),
        )
    except TransportUnavailable as why:
        looked = "" if libraries.found else f" (looked in {', '.join(libraries.searched) or 'no folder of CANN'})"
        return None, why.reason + looked
    except OSError as why:
        return None, str(why)
    return engine, engine.words


def _with_defaults(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options for HIXL: no relay buffers, because all memory of a transfer is registered."""
    if options.get("EnableUseFabricMem") == "1":
        return dict(options)
    return {"BufferPool": "0:0", **options}


def _alignment(options: Mapping[str, str]) -> int:
    """Return at which multiples memory must begin; known only where HCCS is the one protocol that is allowed."""
    resources = json.loads(options.get("GlobalResourceConfig", "{}"))
    group = resources.get("comm_resource_config")
    nested = group.get("protocol_desc") if isinstance(group, dict) else None
    protocols = resources.get("comm_resource_config.protocol_desc", nested)
    return _HUGE_PAGE if protocols in ("hccs:device", ["hccs:device"]) else 0


def _own_address(listen: str | None) -> str:
    """Return an IP address of this machine at which peers reach it: where it listens, or else that of the way out."""
    if listen is not None:
        with contextlib.suppress(OSError):
            address = str(socket.getaddrinfo(listen, None, type=socket.SOCK_STREAM)[0][4][0])
            if not ipaddress.ip_address(address).is_unspecified:
                return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way, contextlib.suppress(OSError):
        way.connect(("192.0.2.1", 9))  # sends nothing: the kernel chooses the address it would send from
        return str(way.getsockname()[0])
    return "127.0.0.1"
