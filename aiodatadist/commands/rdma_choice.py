"""Which RDMA devices serve a processor or an accelerator best, and why the others do not.

An accelerator wants a NIC behind its own PCI root port: bytes then go from one to the other without crossing the
processor's fabric. The processors want those that no accelerator wants, and bonds, which carry the machine's own
traffic. Where there is no such NIC the next best is chosen, and the reason says how near it is. Names of interfaces do
not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .rdma_devices import Accelerator, Device, Library, Netdev, Place, Port

__all__ = ["TIMEOUTS", "Choice", "Opinion", "choose", "recommended_timeout", "retransmission_seconds", "unusable"]


@dataclass(frozen=True, slots=True)
class Opinion:
    """What was decided on one device.

    Attributes
    ----------
    device : str
    picked : bool
    reason : str
    """

    device: str
    picked: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The devices for one processor or for the accelerators behind one root port.

    Attributes
    ----------
    whom : str
        ``"the processors"``, or the accelerators.
    accelerators : list of str
        PCI addresses; empty: the processors.
    opinions : list of Opinion
        On every device of the machine.
    """

    whom: str
    accelerators: list[str]
    opinions: list[Opinion]

    @property
    def picked(self) -> list[str]:
        """The devices to use, best first."""
        return [opinion.device for opinion in self.opinions if opinion.picked]


# Usable or not. ---------------------------------------------------------------------------------------------


def _port_trouble(device: Device, port: Port) -> str | None:
    """Say why a port carries nothing, and what to do; None: it does."""
    if port.state != "ACTIVE":
        said = f"port {port.number} is {port.state} ({port.physical})"
        if port.state == "INIT":
            return f"{said}: no subnet manager has set it up: start one (opensm), on a switch or on a host"
        if port.roce:
            down = [netdev.name for netdev in device.netdevs if netdev.state not in ("up", "unknown")]
            names = " ".join(down) or " ".join(netdev.name for netdev in device.netdevs) or "its interface"
            return f"{said}: bring its interface up (ip link set {names} up), and look at the cable and the switch"
        return f"{said}: look at the cable and the switch, and whether a subnet manager runs"
    if port.roce and not port.gids:
        return f"port {port.number} has no GID: give its interface an IP address"
    return None


def unusable(device: Device, library: Library) -> str | None:
    """Say why a device cannot be used by this process, and what to do; None: it can."""
    if device.kind != "CA":
        return f"it is a {device.kind}, and only InfiniBand and RoCE are supported"
    if device.node is None:
        return "it has no file for processes: load the kernel module ib_uverbs"
    if device.refused is not None:
        fix = "pass /dev/infiniband into the container, or let this user open it"
        return f"{device.node} cannot be opened ({device.refused}): {fix}"
    if library.error is None and device.name not in library.devices:
        fix = "install the providers (Debian: ibverbs-providers)"
        return f"libibverbs has no user space driver for it ({device.driver or 'its own'}): {fix}"
    troubles = [_port_trouble(device, port) for port in device.ports]
    if not troubles:
        return "it has no port"
    if None not in troubles:
        return "; ".join(trouble for trouble in troubles if trouble is not None)
    return None


# Near or far. -----------------------------------------------------------------------------------------------

_NEAREST: Final = 3


def _distance(one: Place, other: Place) -> int:
    """Return 3 for the same root port, 2 for the same host bridge, 1 for the same NUMA node, else 0."""
    if one.root_port is not None and (one.bridge, one.root_port) == (other.bridge, other.root_port):
        return _NEAREST
    if one.bridge == other.bridge:
        return 2
    if one.numa_node is not None and one.numa_node == other.numa_node:
        return 1
    return 0


_NEAR: Final = {
    3: "behind the same PCI root port {port}",
    2: "at the same host bridge {bridge}",
    1: "on the same NUMA node {node}",
    0: "elsewhere in the machine",
}


def _near(distance: int, place: Place) -> str:
    return _NEAR[distance].format(port=place.root_port, bridge=place.bridge, node=place.numa_node)


def _for_accelerators(group: Sequence[Accelerator], usable: Sequence[Device], bad: dict[str, str]) -> Choice:
    place = group[0].place
    distances = {device.name: -1 if device.place is None else _distance(device.place, place) for device in usable}
    best = max(distances.values(), default=-1)
    opinions = []
    for device in usable:
        distance = distances[device.name]
        if distance < 0:
            opinions.append(Opinion(device.name, False, "it has no place on the PCI bus to compare"))
        elif distance < best:
            opinions.append(Opinion(device.name, False, f"{_near(distance, place)}, and another is nearer"))
        else:
            reason = _near(distance, place)
            if distance < _NEAREST:
                reason += "; none that can be used shares its root port"
            opinions.append(Opinion(device.name, True, reason))
    addresses = [one.place.address for one in group]
    vendors = ", ".join(dict.fromkeys(one.vendor for one in group))
    return _choice(f"{vendors} {', '.join(addresses)}", addresses, opinions, bad)


def _bond_of(device: Device) -> Netdev | None:
    return next((netdev for netdev in device.netdevs if netdev.members or netdev.bond), None)


def _for_processors(
    accelerators: Sequence[Accelerator], usable: Sequence[Device], bad: dict[str, str], nodes: Sequence[int]
) -> Choice:
    free, taken = [], []
    for device in usable:
        place = device.place
        shared = [
            one.place.address for one in accelerators if place is not None and _distance(one.place, place) == _NEAREST
        ]
        bond = _bond_of(device)
        where = "" if place is None or place.numa_node is None else f", on NUMA node {place.numa_node}"
        if bond is not None:
            name = bond.name if bond.members else bond.bond
            free.append(Opinion(device.name, True, f"it is part of the bond {name}{where}"))
        elif shared:
            taken.append(Opinion(device.name, False, f"it shares its root port with {', '.join(shared)}: kept for it"))
        elif accelerators:
            free.append(Opinion(device.name, True, f"no accelerator shares its root port{where}"))
        else:
            free.append(Opinion(device.name, True, f"usable, and there is no accelerator to keep it for{where}"))
    if not free:
        taken = [Opinion(one.device, True, one.reason.replace("kept for it", "but there is no other")) for one in taken]
    near = {device.name: device.place is not None and device.place.numa_node in nodes for device in usable}
    # Those beside the processors that this process may run on come first.
    free.sort(key=lambda opinion: not near[opinion.device])
    return _choice("the processors", [], [*free, *taken], bad)


def _choice(whom: str, addresses: list[str], opinions: list[Opinion], bad: dict[str, str]) -> Choice:
    return Choice(whom, addresses, [*opinions, *(Opinion(name, False, reason) for name, reason in bad.items())])


def choose(
    devices: Sequence[Device], accelerators: Sequence[Accelerator], library: Library, nodes: Sequence[int]
) -> list[Choice]:
    """Choose for the processors, and for the accelerators of each root port.

    Parameters
    ----------
    devices : sequence of Device
    accelerators : sequence of Accelerator
    library : Library
    nodes : sequence of int
        NUMA nodes whose processors this process may run on.

    Returns
    -------
    list of Choice
        The first is that for the processors. Each has an opinion on every device.
    """
    bad = {device.name: why for device in devices if (why := unusable(device, library)) is not None}
    usable = [device for device in devices if device.name not in bad]
    groups: dict[str, list[Accelerator]] = {}
    for one in accelerators:
        # Without a root port each is alone.
        key = one.place.address if one.place.root_port is None else f"{one.place.bridge}/{one.place.root_port}"
        groups.setdefault(key, []).append(one)
    found = [_for_processors(accelerators, usable, bad, nodes)]
    found += [_for_accelerators(group, usable, bad) for group in groups.values()]
    return found


# Timeouts. --------------------------------------------------------------------------------------------------

# The exponents that HCCL_RDMA_TIMEOUT may have; NICs take 0 to 31.
TIMEOUTS: Final = (5, 20)
_UNIT: Final = 4.096e-6  # seconds


def retransmission_seconds(exponent: int, retries: int) -> float:
    """Return after how many seconds a NIC gives up: each try takes 4.096 us times 2 to `exponent`."""
    return _UNIT * 2.0**exponent * (retries + 1)


def recommended_timeout(seconds: float, retries: int) -> int:
    """Return the HCCL_RDMA_TIMEOUT for transfers that may take so long.

    Parameters
    ----------
    seconds : float
        The timeout of a transfer, above 0.
    retries : int
        HCCL_RDMA_RETRY_CNT.

    Returns
    -------
    int
        The least exponent with which all tries together take at least `seconds`, within `TIMEOUTS`.
    """
    exponent = math.ceil(math.log2(seconds / (retries + 1) / _UNIT))
    return min(max(exponent, TIMEOUTS[0]), TIMEOUTS[1])
