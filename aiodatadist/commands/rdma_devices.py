"""The RDMA devices of a machine, as sysfs and libibverbs show them.

Nothing here raises for what cannot be read: that is part of what is found. None stands for what is not known.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["LIBRARY", "Accelerator", "Device", "Gid", "Library", "Netdev", "Place", "Port", "accelerators", "devices"]

LIBRARY: Final = "libibverbs.so.1"

# Modules say where they look, so that tests can put something else there.
SYS: Final = Path("/sys")
DEV: Final = Path("/dev")


def _text(path: Path) -> str | None:
    """Return what a file says. Many of sysfs refuse to be read where they have nothing to say."""
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None


def _number(path: Path, base: int = 10) -> int | None:
    try:
        return int(_text(path) or "", base)
    except ValueError:
        return None


def _names(folder: Path) -> list[str]:
    """Return what a folder holds, numbers in their order."""
    try:
        found = os.listdir(folder)
    except OSError:
        return []
    return sorted(found, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def _target(link: Path) -> Path | None:
    """Return where a symbolic link leads; None where there is none."""
    return link.resolve() if link.is_symlink() else None


# Places. ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where a PCI function sits.

    Attributes
    ----------
    address : str
        Such as ``"0000:3b:00.0"``.
    bridge : str
        The host bridge, such as ``"pci0000:3a"``.
    root_port : str or None
        The first bridge on the way: what is behind it shares its lanes to the processor. None: the function sits right
        at the host bridge, as in many virtual machines.
    numa_node : int or None
    """

    address: str
    bridge: str
    root_port: str | None
    numa_node: int | None


_FUNCTION: Final = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def _place(folder: Path | None) -> Place | None:
    """Read the place out of the path of a device: sysfs nests folders as buses do."""
    if folder is None:
        return None
    parts = folder.parts
    bridges = [number for number, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", part)]
    if not bridges:
        return None
    way: list[str] = []
    for part in parts[bridges[0] + 1 :]:
        if not _FUNCTION.fullmatch(part):
            break
        way.append(part)
    if not way:
        return None
    function = Path(*parts[: bridges[0] + 1 + len(way)])
    node = _number(function / "numa_node")
    # The kernel says -1 where the firmware said nothing.
    return Place(
        way[-1], parts[bridges[0]], way[0] if len(way) > 1 else None, node if node is not None and node >= 0 else None
    )


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device that computes.

    Attributes
    ----------
    vendor : str
        A name, or the number of the vendor.
    place : Place
    """

    vendor: str
    place: Place


_VENDORS: Final = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x19E5: "Huawei", 0x1D22: "Kunlunxin", 0x8086: "Intel"}
# Makers whose display controllers compute; those of others draw the console of a server.
_MAKERS: Final = (0x10DE, 0x1002)


def accelerators() -> list[Accelerator]:
    """Find the accelerators among the PCI functions, by their class."""
    found = []
    for name in _names(SYS / "bus/pci/devices"):
        link = SYS / "bus/pci/devices" / name
        kind, vendor = _number(link / "class", 16), _number(link / "vendor", 16)
        if kind is None:
            continue
        # 12: processing accelerator; 0302: 3D controller; 03: any display controller.
        computes = kind >> 16 == 0x12 or kind >> 8 == 0x0302 or (kind >> 16 == 0x03 and vendor in _MAKERS)
        if computes and (place := _place(_target(link))) is not None:
            said = "unknown vendor" if vendor is None else _VENDORS.get(vendor, f"vendor {vendor:#06x}")
            found.append(Accelerator(said, place))
    return found


# Devices. ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Netdev:
    """A network interface.

    Attributes
    ----------
    name : str
    state : str or None
        Such as ``"up"``, ``"down"``, ``"unknown"`` (drivers that do not say).
    mtu : int or None
        Bytes.
    bond : str or None
        The bond that it belongs to.
    members : list of str
        Not empty: this is a bond of these.
    """

    name: str
    state: str | None
    mtu: int | None
    bond: str | None = None
    members: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Gid:
    """An address of a port.

    Attributes
    ----------
    index : int
    address : str
        IPv4 where it is one, else IPv6.
    kind : str or None
        ``"RoCE v2"``, ``"IB/RoCE v1"``.
    netdev : str or None
    """

    index: int
    address: str
    kind: str | None
    netdev: str | None


@dataclass(frozen=True, slots=True)
class Port:
    """A port.

    Attributes
    ----------
    number : int
    state : str
        ``"ACTIVE"``, ``"DOWN"``, ``"INIT"``, ``"ARMED"``; ``"unknown"`` where it is not told.
    physical : str
        Such as ``"LinkUp"``, ``"Disabled"``, ``"Polling"``.
    link_layer : str
        ``"Ethernet"`` (RoCE) or ``"InfiniBand"``.
    rate : str or None
    lid, subnet_manager : int or None
        Addresses within an InfiniBand subnet.
    gids : list of Gid
        Those that are set.
    """

    number: int
    state: str
    physical: str
    link_layer: str
    rate: str | None
    lid: int | None
    subnet_manager: int | None
    gids: list[Gid]

    @property
    def roce(self) -> bool:
        """Whether the port speaks RDMA over Ethernet."""
        return self.link_layer == "Ethernet"


@dataclass(frozen=True, slots=True)
class Device:
    """An RDMA device.

    Attributes
    ----------
    name : str
    kind : str
        ``"CA"`` (InfiniBand and RoCE), ``"RNIC"`` (iWARP) and others.
    driver : str or None
    firmware : str or None
    software_on : str or None
        The interface that a device in software was made on.
    place : Place or None
        None: no PCI function.
    node : str or None
        The file by which processes reach it.
    refused : str or None
        Why this process may not open that file.
    netdevs : list of Netdev
    ports : list of Port
    """

    name: str
    kind: str
    driver: str | None
    firmware: str | None
    software_on: str | None
    place: Place | None
    node: str | None
    refused: str | None
    netdevs: list[Netdev]
    ports: list[Port]


def _netdev(name: str) -> Netdev:
    folder = SYS / "class/net" / name
    members = (_text(folder / "bonding/slaves") or "").split()
    master = _target(folder / "master")
    bond = master.name if master is not None and (master / "bonding").is_dir() else None
    return Netdev(name, _text(folder / "operstate"), _number(folder / "mtu"), bond, members)


def _gids(port: Path) -> Iterator[Gid]:
    for index in _names(port / "gids"):
        try:
            address = ipaddress.IPv6Address(_text(port / "gids" / index) or "")
        except ValueError:
            continue
        if int(address) == 0:
            continue
        kind, netdev = (_text(port / "gid_attrs" / what / index) for what in ("types", "ndevs"))
        yield Gid(int(index), str(address.ipv4_mapped or address), kind, netdev)


def _state(path: Path) -> str:
    """Return the word of a line such as ``4: ACTIVE``."""
    return (_text(path) or "unknown").partition(": ")[2] or "unknown"


def _port(folder: Path) -> Port:
    return Port(
        number=int(folder.name),
        state=_state(folder / "state"),
        physical=_state(folder / "phys_state"),
        link_layer=_text(folder / "link_layer") or "unknown",
        rate=_text(folder / "rate"),
        lid=_number(folder / "lid", 16),
        subnet_manager=_number(folder / "sm_lid", 16),
        gids=list(_gids(folder)),
    )


def _node(device: str) -> tuple[str | None, str | None]:
    """Find the file of a device; say why it cannot be opened."""
    for name in _names(SYS / "class/infiniband_verbs"):
        if _text(SYS / "class/infiniband_verbs" / name / "ibdev") == device:
            path = DEV / "infiniband" / name
            try:
                os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            except OSError as why:
                return str(path), why.strerror or str(why)
            return str(path), None
    return None, None


def devices() -> list[Device]:
    """Find the RDMA devices in sysfs."""
    found = []
    for name in _names(SYS / "class/infiniband"):
        folder = SYS / "class/infiniband" / name
        ports = [_port(folder / "ports" / number) for number in _names(folder / "ports") if number.isdigit()]
        hardware = _target(folder / "device")
        driver = None if hardware is None else _target(hardware / "driver")
        interfaces = dict.fromkeys(gid.netdev for port in ports for gid in port.gids if gid.netdev)
        if hardware is not None:
            interfaces.update(dict.fromkeys(_names(hardware / "net")))
        software_on = _text(folder / "parent")
        if software_on is not None:
            interfaces[software_on] = None
        node, refused = _node(name)
        found.append(
            Device(
                name=name,
                kind=_state(folder / "node_type"),
                driver=None if driver is None else driver.name,
                firmware=_text(folder / "fw_ver"),
                software_on=software_on,
                place=_place(hardware),
                node=node,
                refused=refused,
                netdevs=[_netdev(interface) for interface in interfaces],
                ports=ports,
            )
        )
    return found


# The library. -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Library:
    """What libibverbs says, asked through ctypes: independent of how aiodatadist was built.

    Attributes
    ----------
    there : bool
        It can be opened.
    error : str or None
        Why not, or why it lists no devices.
    devices : list of str
        Those that it offers: it needs a file and a driver of its own for each.
    """

    there: bool
    error: str | None
    devices: list[str]

    @classmethod
    def ask(cls) -> Library:
        """Open it and list its devices."""
        try:
            library = ctypes.CDLL(LIBRARY, use_errno=True)
            list_devices, free, name_of = (
                library.ibv_get_device_list,
                library.ibv_free_device_list,
                library.ibv_get_device_name,
            )
        except (OSError, AttributeError) as why:
            return cls(False, str(why), [])
        list_devices.restype = ctypes.POINTER(ctypes.c_void_p)
        list_devices.argtypes = [ctypes.POINTER(ctypes.c_int)]
        free.restype = None
        free.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
        name_of.restype = ctypes.c_char_p
        name_of.argtypes = [ctypes.c_void_p]
        count = ctypes.c_int(0)
        listed = list_devices(ctypes.byref(count))
        if not listed:
            code = ctypes.get_errno()
            hint = ": the kernel module ib_uverbs is not loaded" if code == errno.ENOSYS else ""
            return cls(True, f"ibv_get_device_list: {os.strerror(code)}{hint}", [])
        try:
            return cls(True, None, [(name_of(listed[number]) or b"?").decode() for number in range(count.value)])
        finally:
            free(listed)
