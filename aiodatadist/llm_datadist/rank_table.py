"""Rank tables and ``local_comm_res``: HCCL's JSON about servers and devices, read and checked.

What matters here is which server a rank is on, and where that server can be reached. The addresses of devices are
checked and otherwise unused, since there is no device.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec

from .status import LLMException, LLMStatusCode, raise_if_false
from .utils.utils import check_dict, check_isinstance, check_uint32, check_uint64

__all__ = ["Member", "check_link_arguments", "check_local_comm_res", "members_of"]

_BASE_PORT: Final = "HCCL_IF_BASE_PORT"
_DEFAULT_BASE_PORT: Final = 60000
_MOST_MEMBERS: Final = 4
_NAME_LIMIT: Final = 128
_VERSIONS: Final = ("1.0", "1.2")
_PROTOCOLS: Final = ("roce", "ub_ctp", "uboe", "ub_rtp")

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Identity = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]

_T = TypeVar("_T")


class _Device(msgspec.Struct, frozen=True):
    device_id: _Number
    device_ip: str = ""
    rank_id: _Number | None = None
    super_device_id: _Number | None = None


class _Server(msgspec.Struct, frozen=True):
    server_id: _Identity
    device: Annotated[list[_Device], msgspec.Meta(min_length=1)]
    host_ip: str = ""


class _ServerOfPod(msgspec.Struct, frozen=True):
    server_id: _Identity


class _SuperPod(msgspec.Struct, frozen=True):
    super_pod_id: _Identity
    server_list: Annotated[list[_ServerOfPod], msgspec.Meta(min_length=1)]


class _Table(msgspec.Struct, frozen=True):
    server_list: Annotated[list[_Server], msgspec.Meta(min_length=1)]
    status: str = "completed"
    server_count: _Number | None = None
    super_pod_list: list[_SuperPod] | None = None


class _Versioned(msgspec.Struct, frozen=True):
    version: str


class _Endpoint(msgspec.Struct, frozen=True):
    protocol: str
    comm_id: _Identity
    placement: str


class _Endpoints(msgspec.Struct, frozen=True):
    net_instance_id: str | None = None
    endpoint_list: list[_Endpoint] = []


@dataclass(frozen=True)
class Member:
    """A member of a communicator, as the rank table places it.

    `host` is the address of its server, or empty where the table has none.
    """

    cluster_id: int
    rank: int
    server_id: str
    host: str
    device_id: int

    @property
    def port(self) -> int:
        """Where it lets the others come if it has the lowest rank: ``HCCL_IF_BASE_PORT`` plus its device id.

        Raises
        ------
        LLMException
            LLM_PARAM_INVALID: that is no port.
        """
        text = os.environ.get(_BASE_PORT, "").strip() or str(_DEFAULT_BASE_PORT)
        if not re.fullmatch(r"[0-9]{1,5}", text, re.ASCII) or not 1024 <= int(text) + self.device_id <= 65535:
            raise LLMException(
                f"{_BASE_PORT}={text:.80} plus device_id {self.device_id} is no port from 1024 to 65535",
                status_code=LLMStatusCode.LLM_PARAM_INVALID,
            )
        return int(text) + self.device_id


def check_link_arguments(comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> list[Member]:
    """Check the arguments of ``LLMDataDist.link``, in the order of the original.

    Returns
    -------
    list of Member
        By ascending rank.

    Raises
    ------
    TypeError, ValueError, LLMException
        An argument has a wrong type, a number does not fit, or a value cannot be used.
    """
    check_isinstance("comm_name", comm_name, str, allow_none=False)
    raise_if_false(comm_name, "comm_name is empty")
    raise_if_false(
        len(comm_name) < _NAME_LIMIT,
        "comm_name has {} characters, and may have fewer than {}",
        len(comm_name),
        _NAME_LIMIT,
    )
    check_dict("cluster_rank_info", cluster_rank_info, int, int)
    raise_if_false(
        len(cluster_rank_info) <= _MOST_MEMBERS,
        "cluster_rank_info has {} members, more than {}", len(cluster_rank_info), _MOST_MEMBERS,
    )  # fmt: skip
    for cluster_id, rank in cluster_rank_info.items():
        check_uint64("cluster id in cluster_rank_info", cluster_id)
        check_uint32("rank in cluster_rank_info", rank)
    check_isinstance("rank_table", rank_table, str, allow_none=False)
    raise_if_false(len(cluster_rank_info) >= 2, "cluster_rank_info has {} members, 2 at least", len(cluster_rank_info))
    ranks = list(cluster_rank_info.values())
    raise_if_false(
        all(low < high for low, high in itertools.pairwise(ranks)),
        "cluster_rank_info={} does not name its members by ascending rank", cluster_rank_info,
    )  # fmt: skip
    return members_of(rank_table, cluster_rank_info)


def members_of(rank_table: str, ranks: Mapping[int, int]) -> list[Member]:
    """Read a rank table for the members of a communicator.

    Parameters
    ----------
    rank_table : str
        JSON of version 1.0 or 1.2. Numbers may be written as strings, as HCCL does.
    ranks : mapping of int to int
        Cluster id to rank. The table must have these ranks and no others.

    Returns
    -------
    list of Member
        By ascending rank.

    Raises
    ------
    LLMException
        LLM_PARAM_INVALID: the table cannot be read or used. The text names the field.
    """
    table = _read_table("rank_table", rank_table)
    places: dict[int, tuple[_Server, _Device]] = {}
    for server in table.server_list:
        for device in server.device:
            if device.rank_id is None:
                raise _wrong("rank_table", f"device {device.device_id} of server {server.server_id!r} has no rank_id")
            if device.rank_id in places:
                raise _wrong("rank_table", f"rank_id {device.rank_id} stands there twice")
            places[device.rank_id] = server, device
    clusters = {int(rank): int(cluster_id) for cluster_id, rank in ranks.items()}
    if clusters.keys() != places.keys():
        raise _wrong(
            "rank_table",
            f"its ranks are {_listed(places)}, those of cluster_rank_info are {_listed(clusters)}; give each member's",
        )
    return [
        Member(clusters[rank], rank, server.server_id, _host_of(server), device.device_id)
        for rank, (server, device) in sorted(places.items())
    ]


def check_local_comm_res(text: str, *, hixl: bool = False) -> None:
    """Check ``local_comm_res``: a fragment of a rank table that describes this node. An empty one is fine.

    Parameters
    ----------
    text : str
        JSON of version 1.0 or 1.2, or with the hixl backend also 1.3.
    hixl : bool
        Whether ``transfer_backend`` is ``"hixl"``.

    Raises
    ------
    LLMException
        LLM_PARAM_INVALID: it cannot be read or used. The text names the field.
    """
    if not text:
        return
    if hixl and _decoded("local_comm_res", text, _Versioned).version == "1.3":
        for endpoint in _decoded("local_comm_res", text, _Endpoints).endpoint_list:
            if endpoint.protocol not in _PROTOCOLS:
                raise _wrong("local_comm_res", f"protocol is {endpoint.protocol!r}, none of {', '.join(_PROTOCOLS)}")
            if endpoint.placement not in ("host", "device"):
                raise _wrong("local_comm_res", f"placement is {endpoint.placement!r}, neither 'host' nor 'device'")
        return
    _read_table("local_comm_res", text)


def _read_table(name: str, text: str) -> _Table:
    """Read and check what rank tables and fragments of them have in common."""
    version = _decoded(name, text, _Versioned).version
    if version not in _VERSIONS:
        hint = "; version '1.3' is for local_comm_res with transfer_backend='hixl'" if version == "1.3" else ""
        raise _wrong(name, f"version is {version!r}, neither '1.0' nor '1.2'{hint}")
    table = _decoded(name, text, _Table)
    if table.status != "completed":
        raise _wrong(name, f"status is {table.status!r}, not 'completed'")
    servers = [server.server_id for server in table.server_list]
    if table.server_count is not None and table.server_count != len(servers):
        raise _wrong(name, f"server_count is {table.server_count}, and server_list has {len(servers)}")
    if twice := _repeated(servers):
        raise _wrong(name, f"server_id {twice!r} stands there twice")
    for server in table.server_list:
        where = f"server {server.server_id!r}"
        _check_ip(name, f"host_ip of {where}", server.host_ip)
        if (device_id := _repeated([device.device_id for device in server.device])) is not None:
            raise _wrong(name, f"device_id {device_id} of {where} stands there twice")
        for device in server.device:
            _check_ip(name, f"device_ip of device {device.device_id} of {where}", device.device_ip)
            if version == "1.2" and device.super_device_id is None:
                raise _wrong(
                    name, f"device {device.device_id} of {where} has no super_device_id, which version 1.2 needs"
                )
    if version == "1.2":
        _check_pods(name, servers, table.super_pod_list)
    return table


def _check_pods(name: str, servers: Sequence[str], pods: Sequence[_SuperPod] | None) -> None:
    if not pods:
        raise _wrong(name, "it has no super_pod_list, which version 1.2 needs")
    if twice := _repeated([pod.super_pod_id for pod in pods]):
        raise _wrong(name, f"super_pod_id {twice!r} stands there twice")
    held = [server.server_id for pod in pods for server in pod.server_list]
    if twice := _repeated(held):
        raise _wrong(name, f"super_pod_list has server_id {twice!r} twice")
    if set(held) != set(servers):
        raise _wrong(name, f"super_pod_list has the servers {_listed(held)}, server_list has {_listed(servers)}")


def _decoded(name: str, text: str, kind: type[_T]) -> _T:
    try:
        # HCCL writes numbers as strings, and some write them as numbers.
        return msgspec.json.decode(text, type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as why:
        raise _wrong(name, str(why)) from None


def _wrong(name: str, what: str) -> LLMException:
    return LLMException(f"{name} cannot be used: {what}", status_code=LLMStatusCode.LLM_PARAM_INVALID)


def _listed(values: Mapping[int, object] | Sequence[str]) -> str:
    return ", ".join(map(str, sorted(values)))


def _repeated(values: Sequence[_T]) -> _T | None:
    seen: set[_T] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _check_ip(name: str, field: str, text: str) -> None:
    if text and not _is_ip(text):
        raise _wrong(name, f"{field} is {text!r:.80}, no IP address")


def _host_of(server: _Server) -> str:
    return server.host_ip or (server.server_id if _is_ip(server.server_id) else "")
