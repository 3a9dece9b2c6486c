"""Builds what the kernel shows of RDMA devices in /sys and /dev, in a folder: files, and the links between them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


class Sysfs:
    """A tree under construction; `sys` and `dev` are its roots."""

    def __init__(self, folder: Path) -> None:
        self.sys = folder / "sys"
        self.dev = folder / "dev"
        self._functions: dict[str, Path] = {}
        (self.sys / "class").mkdir(parents=True)
        self.dev.mkdir()

    def _write(self, folder: Path, **files: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(f"{content}\n")

    def _link(self, link: Path, target: Path) -> None:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))

    def pci(self, *way: str, kind: str = "0x020000", vendor: str = "0x15b3", node: int = -1, driver: str = "") -> str:
        """Put a function at the end of a way, such as ``pci0000:3a 0000:3a:00.0 0000:3b:00.0``; return its address."""
        folder = self.sys / "devices"
        for part in way:
            folder /= part
            if part in way[1:] and part not in self._functions:
                bridge = part != way[-1]
                self._write(folder, **{"class": "0x060400" if bridge else kind}, vendor=vendor, numa_node=node)
                self._functions[part] = folder
                self._link(self.sys / "bus/pci/devices" / part, folder)
        if driver:
            self._write(self.sys / "bus/pci/drivers" / driver)
            self._link(folder / "driver", self.sys / "bus/pci/drivers" / driver)
        return way[-1]

    def netdev(self, name: str, state: str = "up", pci: str = "", members: Sequence[str] = (), bond: str = "") -> str:
        """Add an interface; a bond has members, and they name it."""
        base = self._functions[pci] / "net" if pci else self.sys / "devices/virtual/net"
        self._write(base / name, operstate=state, mtu=1500)
        self._link(self.sys / "class/net" / name, base / name)
        if members:
            self._write(base / name / "bonding", slaves=" ".join(members))
        if bond:
            self._link(base / name / "master", self.sys / "devices/virtual/net" / bond)
        return name

    def device(
        self,
        name: str,
        pci: str = "",
        *,
        state: str = "4: ACTIVE",
        physical: str = "5: LinkUp",
        layer: str = "Ethernet",
        gids: Sequence[tuple[str, str, str]] = (),
        kind: str = "1: CA",
        parent: str = "",
        node: bool = True,
        ports: int = 1,
    ) -> str:
        """Add an RDMA device; `gids` are address, type and interface."""
        folder = (self._functions[pci] if pci else self.sys / "devices/virtual") / "infiniband" / name
        self._write(folder, node_type=kind, fw_ver="28.41.1000" if pci else "")
        if parent:
            self._write(folder, parent=parent)
        for number in range(1, ports + 1):
            port = folder / "ports" / str(number)
            # As mlx5 says it; the second port of a device may be unlike the first.
            here = state.split("|")[min(number, len(state.split("|"))) - 1]
            self._write(port, state=here, phys_state=physical, link_layer=layer, rate="100 Gb/sec (4X EDR)")
            self._write(port, lid="0x3" if layer == "InfiniBand" else "0x0", sm_lid="0x1")
            for index in range(8):
                address, what, interface = gids[index] if index < len(gids) else ("::", "", "")
                self._write(port / "gids", **{str(index): expanded(address)})
                for attribute, value in (("types", what), ("ndevs", interface)):
                    place = port / "gid_attrs" / attribute
                    if value:
                        self._write(place, **{str(index): value})
                    else:
                        # The kernel refuses to have these read: so does a folder, also to root.
                        (place / str(index)).mkdir(parents=True)
        self._link(self.sys / "class/infiniband" / name, folder)
        if pci:
            self._link(folder / "device", self._functions[pci])
        if node:
            number = len(list((self.dev / "infiniband").glob("uverbs*"))) if (self.dev / "infiniband").exists() else 0
            self._write(self.sys / "class/infiniband_verbs" / f"uverbs{number}", ibdev=name)
            self._write(self.dev / "infiniband", **{f"uverbs{number}": ""})
        return name


def expanded(address: str) -> str:
    """Write an address as sysfs does: eight groups of four digits."""
    if "." in address:
        parts = [int(part) for part in address.split(".")]
        return f"0000:0000:0000:0000:0000:ffff:{parts[0]:02x}{parts[1]:02x}:{parts[2]:02x}{parts[3]:02x}"
    head, _, tail = address.partition("::")
    left, right = ([group for group in half.split(":") if group] for half in (head, tail))
    groups = [*left, *["0"] * (8 - len(left) - len(right)), *right]
    return ":".join(f"{int(group, 16):04x}" for group in groups)


def server(folder: Path) -> Sysfs:
    """Two sockets with two accelerators and a NIC behind a switch each, and NICs of the machine itself, one down."""
    tree = Sysfs(folder)
    for bus, node, number in (("3a", 0, 0), ("b9", 1, 1)):
        way = (f"pci0000:{bus}", f"0000:{bus}:00.0", f"0000:{int(bus, 16) + 1:02x}:00.0")
        for slot in (1, 2):
            address = f"0000:{int(bus, 16) + 2:02x}:0{slot}.0"
            tree.pci(*way, address, kind="0x120000", vendor="0x19e5", node=node)
        nic = tree.pci(*way, f"0000:{int(bus, 16) + 3:02x}:00.0", node=node, driver="mlx5_core")
        tree.netdev(f"eth{number}", pci=nic)
        tree.device(
            f"mlx5_{number}",
            nic,
            gids=[
                ("fe80::1", "IB/RoCE v1", f"eth{number}"),
                ("fe80::1", "RoCE v2", f"eth{number}"),
                (f"10.1.{number}.5", "IB/RoCE v1", f"eth{number}"),
                (f"10.1.{number}.5", "RoCE v2", f"eth{number}"),
            ],
        )
    # The console's, which computes nothing.
    tree.pci("pci0000:00", "0000:00:1c.0", "0000:02:00.0", kind="0x030000", vendor="0x1a03", node=0)
    free = tree.pci("pci0000:16", "0000:16:02.0", "0000:17:00.0", node=0, driver="mlx5_core")
    tree.netdev("ens3", pci=free)
    tree.device("mlx5_2", free, gids=[("10.2.0.5", "RoCE v2", "ens3")])
    down = tree.pci("pci0000:16", "0000:16:03.0", "0000:18:00.0", node=0, driver="mlx5_core")
    tree.netdev("ens4", "down", pci=down)
    tree.device("mlx5_3", down, state="1: DOWN", physical="3: Disabled")
    return tree
