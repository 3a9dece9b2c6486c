"""bench measures what it says, beside limits that do the same work, and notices data that did not arrive."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist import Transfer, _limits
from aiodatadist.commands import bench, bench_cpu, bench_layers, bench_peer, bench_rows, bench_transfers, main
from aiodatadist.commands.bench_memory import Half, Remote, scattered

FIELDS = {"name", "path", "block", "value", "unit", "spread", "limit", "ratio", "limit_name", "better"}
FIELDS |= {"target", "met"}
SMALL = ("--quick", "--bytes", "1MiB", "--repeat", "2", "--peers", "3")
PATHS = ("shm-mapped", "shm-process_vm", "tcp")

measures = pytest.mark.skipif(bool(_limits.build_fault()), reason="measures release builds only")


# The rows. --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bench") / "report.json"
    with pytest.MonkeyPatch.context() as monkeypatch:
        # 640,000 blocks are moved for each of these: five would be half of all that is measured.
        monkeypatch.setattr(bench_transfers, "_SUBMITS", 1)
        # How precise a share of a processor is does not matter here.
        monkeypatch.setattr(bench_cpu, "_SECONDS", 0.05)
        monkeypatch.setattr(bench, "CpuScale", lambda nbytes, repeat, _: bench_cpu.CpuScale(nbytes, repeat, 0.1))
        assert main(["bench", *SMALL, "--block", "4KiB,64KiB", "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def named(report: dict[str, Any], name: str, path: str, block: int | None = None) -> dict[str, Any]:
    (row,) = (row for row in report["rows"] if (row["name"], row["path"], row["block"]) == (name, path, block))
    return dict(row)


@measures
def test_every_row_is_complete(report: dict[str, Any]) -> None:
    assert report["machine"]["cpus"] == os.cpu_count()
    assert {"cpu", "kernel", "copy_kernel", "python", "loop", "load"} <= set(report["machine"])
    for row in report["rows"]:
        assert set(row) == FIELDS
        assert row["name"].split()[0] in bench.SUBJECTS
        assert row["unit"] in ("GB/s", "us", "1/s", "ms", "KiB", "% of a core")
        assert row["better"] == ("higher" if row["unit"] in ("GB/s", "1/s") else "lower")
        assert math.isfinite(row["value"])
        # Memory comes in pages, and some find room in one that is there; a clock may tick coarsely.
        assert row["value"] > 0 or row["unit"] in ("KiB", "% of a core")
        assert math.isfinite(row["spread"])
        assert row["spread"] >= 0
        assert (row["limit"] is None) == (row["ratio"] is None) == (row["limit_name"] is None)
        if row["limit"] is not None:
            assert row["limit"] > 0
            assert row["ratio"] == pytest.approx(row["value"] / row["limit"])
        assert (row["target"] is None) == (row["met"] is None)
        if row["target"] is not None:
            reached = row["ratio"] >= row["target"] if row["better"] == "higher" else row["ratio"] <= row["target"]
            assert row["met"] == reached
    keys = [(row["name"], row["path"], row["block"]) for row in report["rows"]]
    assert len(set(keys)) == len(keys)
    assert sorted({name.split()[0] for name, _, _ in keys}) == sorted(bench.SUBJECTS)


@measures
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("direction", ["pull", "push"])
def test_every_path_stands_beside_its_limit(report: dict[str, Any], path: str, direction: str) -> None:
    for block in (4096, 65536):
        row = named(report, f"bandwidth {direction}", path, block)
        limits = [
            other
            for other in report["rows"]
            if (other["name"], other["path"], other["block"]) == ("bandwidth limit", row["limit_name"], block)
        ]
        assert limits[0]["value"] == row["limit"]
        beginning = {"shm-mapped": ("NT copy",), "shm-process_vm": ("process_vm_",), "tcp": ("raw sockets",)}
        assert row["limit_name"].startswith(beginning[path])
        assert "2 threads" in row["limit_name"] or "2 streams" in row["limit_name"]
        assert row["target"] == 0.9
        if path == "shm-process_vm":
            assert row["limit_name"].startswith(f"process_vm_{'readv' if direction == 'pull' else 'writev'}")
        if path == "tcp":
            assert row["limit_name"].endswith(direction)
        for percent in (50, 99):
            assert named(report, f"latency {direction} p{percent}", path, block)["limit_name"]
    row = named(report, "bandwidth pull of 256 neighbours", path, 4096)
    assert (row["limit_name"], row["target"]) == (f"one block of {1 << 20:,} bytes", 1.1)


@measures
@pytest.mark.parametrize(("path", "allowance"), [("shm-mapped", 1.5), ("shm-process_vm", 2.0), ("tcp", None)])
def test_target_of_an_await_allows_for_microseconds(report: dict[str, Any], path: str, allowance: float | None) -> None:
    row = named(report, "latency pull p50", path, 4096)
    if allowance is None:
        assert row["target"] == 1.3
    else:
        assert row["target"] * row["limit"] == pytest.approx(row["limit"] + allowance)
    for name, block in (("latency pull p99", 4096), ("latency push p50", 4096), ("latency pull p50", 65536)):
        assert named(report, name, path, block)["target"] is None


@measures
@pytest.mark.uvloop
@pytest.mark.parametrize("path", PATHS)
def test_completions_on_both_loops(report: dict[str, Any], path: str) -> None:
    targets = {
        ("64 tasks", "asyncio"): 0.35,
        ("gather of 64", "asyncio"): 0.2,
        ("64 tasks", "uvloop"): 0.35,
        ("gather of 64", "uvloop"): 0.25,
    }
    for (name, loop), target in targets.items():
        row = named(report, f"completions {name}, {loop}", path, 4096)
        assert "1 thread" in row["limit_name"] or "1 stream" in row["limit_name"]
        assert row["target"] == (None if path == "tcp" else target)


@measures
@pytest.mark.parametrize("path", PATHS)
def test_submit_fairness_and_cpu(report: dict[str, Any], path: str) -> None:
    for tensors in ("64 tensors", "1 tensor"):
        for form in ("arrays", "lists"):
            row = named(report, f"submit 10,000 blocks x {tensors}, {form}", path, 64)
            assert (row["limit_name"], row["limit"], row["target"]) == ("0.15 ms", 150, 1)
    assert named(report, "submit reading 20,000 cold numbers", path, None)["target"] is None
    row = named(report, "fairness pull p99 beside a large pull", path, 65536)
    assert (row["limit_name"], row["target"]) == ("alone", 5)
    for side in ("owner", "initiator"):
        for direction in ("pull", "push"):
            row = named(report, f"cpu {side}, {direction}", path, 65536)
            assert row["unit"] == "% of a core"
            assert (row["target"] is None) == (path == "tcp" or (side, direction) != ("owner", "pull"))


@measures
def test_scale_stands_beside_an_eighth(report: dict[str, Any]) -> None:
    rows = [row for row in report["rows"] if row["name"].startswith("scale")]
    assert {row["path"] for row in rows} == {*PATHS, "shm", "any"}
    assert all(row["target"] in (1.25, 1.0) for row in rows)
    for name, path, block, beside in (
        ("starting 1,000 pending pulls", "tcp", 1024, "8 x 125"),
        ("memory of 1,000 pending pulls", "tcp", 1024, "8 x the second 125"),
        ("making 48 links", "shm", None, "8 x the first 6"),
        ("48 pulls at once over 48 links", "shm-process_vm", None, "as much over 6"),
        ("pull of 100,000 blocks", "shm-mapped", 256, "in transfers of 10,000"),
        ("registering 8 GiB", "any", 65536, "8 x 1 GiB"),
        ("pull of 256 blocks across 8 GiB", "shm-process_vm", 65536, "across 1 GiB"),
    ):
        assert named(report, f"scale {name}", path, block)["limit_name"] == beside


@measures
@pytest.mark.parametrize("path", PATHS[:2])
def test_blocking_calls_stand_beside_awaits(report: dict[str, Any], path: str) -> None:
    row = named(report, "latency blocking pull p50", path, 4096)
    assert (row["limit_name"], row["unit"]) == ("await between two thread wake-ups", "us")


@measures
def test_links_and_an_idle_pair_have_rows(report: dict[str, Any]) -> None:
    for transport in ("shm", "tcp"):
        assert named(report, "links link 3 at once", transport)["limit_name"] == "one TCP connection made and closed"
        assert named(report, "links unlink 3 at once", transport)["unit"] == "1/s"
    row = named(report, "cpu both sides, idle", "shm+tcp")
    assert (row["limit_name"], row["target"]) == ("1 % of a core", 1)


@measures
@pytest.mark.parametrize("path", PATHS)
def test_layers_stand_beside_what_must_hold(report: dict[str, Any], path: str) -> None:
    for c in ("c = t", "c = 2 t"):
        layer = named(report, f"layerwise c, one layer computed, {c}", path, 65536)
        assert layer["limit_name"] == "t"
        gate = named(report, f"layerwise LayerGate, {c}", path, 65536)
        assert gate["target"] == (None if path == "tcp" else 1.1)
        for beside in ("push at the end", "LayerSynchronizer"):
            assert named(report, f"layerwise {beside}, {c}", path, 65536)["limit"] == gate["limit"]
        assert gate["limit_name"] == "16 c + t"
        assert gate["limit"] > layer["limit"]
    for when in ("GIL kept", "GIL kept, copying", "GIL kept, cores busy"):
        for percent in (50, 99):
            row = named(report, f"layerwise record p{percent}, {when}", path, 4096)
            assert (row["target"], row["limit"]) == ((1.0, 1000.0) if percent == 99 else (None, None))
            assert named(report, f"layerwise record to landed p{percent}, {when}", path, 4096)["unit"] == "us"
        assert named(report, f"layerwise a hop to the event loop, {when}", path, 4096)["unit"] == "us"


@measures
def test_json_to_stdout_is_all_that_is_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", *SMALL, "--block", "4096", "--paths", "tcp", "--json"]) == 0
    captured = capfd.readouterr()
    assert {row["name"].split()[0] for row in json.loads(captured.out)["rows"]} == {"latency"}
    assert captured.err.splitlines() == ["latency: tcp, one block of 4 KiB"]


@measures
@pytest.mark.uvloop
def test_runs_on_uvloop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--block", "4096", "--paths", "shm-mapped", "--loop", "uvloop", "--json", str(tmp_path / "x"))
    assert main(["bench", "completions", *SMALL, *options]) == 0
    assert json.loads((tmp_path / "x").read_text())["machine"]["loop"] == "uvloop"
    assert "completions 64 tasks, uvloop" in capsys.readouterr().out


def test_table_says_which_way_is_better(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench_rows.Rows()
    rows.add("bandwidth pull", "tcp", 4096, [3.0, 1.0, 2.0], "GB/s", "higher", ("raw sockets, 1 stream", [4.0] * 3))
    rows.add("latency pull p50", "tcp", 1 << 20, [3000.0], "us", "lower", ("raw socket round trip", [2000.0]))
    rows.add("cpu both sides, idle", "tcp", None, [0.25], "% of a core", "lower")
    bench_rows.print_table(rows.rows)
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[1] == [
        "bandwidth pull",
        "tcp",
        "4 KiB",
        "2.00",
        "1.00",
        "GB/s",
        "4.00",
        "50 %",
        "raw sockets, 1 stream",
    ]
    assert cells[2][2:] == ["1 MiB", "3,000", "0.00", "us", "2,000", "1.50 x", "raw socket round trip"]
    assert cells[3][2:] == ["0.25", "0.00", "% of a core"]


@pytest.mark.parametrize(("better", "shown"), [("higher", "150 %, missed"), ("lower", "1.50 x, met")])
def test_table_says_whether_a_target_is_met(better: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench_rows.Rows()
    rows.add("layerwise LayerGate", "tcp", None, [2.0], "ms", better, ("16 c + t", [2.0]), 1.5)
    assert rows.rows[0].met == (better == "lower")
    bench_rows.print_table(rows.rows)
    assert capsys.readouterr().out.splitlines()[1].endswith(f"16 c + t  {shown}")


async def test_steps_take_turns() -> None:
    order: list[str] = []

    def step(name: str) -> Callable[[], Any]:
        async def run() -> int:
            order.append(name)
            return len(order)

        return run

    found = await bench_rows.in_turn({name: step(name) for name in "abc"}, 3)
    assert "".join(order) == "abccbaabc"
    assert found == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


# Refusals. --------------------------------------------------------------------------------------------------


def test_refuses_a_debug_build(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if not _limits.build_fault():
        monkeypatch.setattr(_limits, "build_fault", lambda: "a debug build")
    assert main(["bench", "--quick"]) == 1
    assert "aiodatadist bench: error: this is a debug build" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "invalid choice: 'speed'"),
        (["--block", "12"], "a block of 12 bytes is outside 64 B..64 MiB"),
        (["--block", "100"], "no multiple of 8"),
        (["--block", "4KiB,many"], "'many' is no size"),
        (["--bytes", "1"], "1 is outside 64 KiB..64 GiB"),
        (["--paths", "tcp,pigeon"], "'pigeon' is no path; there are shm-mapped, shm-process_vm, tcp"),
        (["--repeat", "0"], "'0' is no number from 1 to 1000"),
        (["--peers", "-1"], "'-1' is no number from 1 to 4096"),
        (["--loop", "twisted"], "invalid choice: 'twisted'"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as why:
        main(["bench", *arguments])
    assert why.value.code == 2
    assert message in capsys.readouterr().err


@measures
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["latency", "--all"], 2, "bench latency --all says two things"),
        (["--json", "latency"], 2, "--json latency names a file; write bench latency --json"),
        (["--bytes", "1MiB", "--block", "2MiB"], 2, "a block of 2 MiB does not fit into --bytes 1 MiB"),
        (["--json", "/nowhere/at/all"], 1, "--json /nowhere/at/all: No such file or directory"),
        (["--bytes", "64g"], 1, "needs 384 GiB of memory"),
    ],
)
def test_what_cannot_be_measured(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_measure", None)  # nothing starts
    monkeypatch.setattr(bench, "_available", lambda: 1 << 34)
    assert main(["bench", *arguments]) == code
    assert message in capsys.readouterr().err


@measures
def test_missing_extra_names_the_pip_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert main(["bench", "--loop", "uvloop"]) == 1
    assert "pip install 'aiodatadist[bench]'" in capsys.readouterr().err


@measures
def test_path_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def reached(self: bench_transfers.Session, path: str) -> str:
        return "" if path == "tcp" else f"no {path} today"

    monkeypatch.setattr(bench_transfers.Session, "reached", reached)
    assert main(["bench", "latency", *SMALL, "--block", "4096"]) == 0
    captured = capsys.readouterr()
    assert "shm-mapped is left out: no shm-mapped today" in captured.err
    assert "latency pull p50" in captured.out
    assert main(["bench", "latency", *SMALL, "--block", "4096", "--paths", "shm-mapped"]) == 1
    assert "the path shm-mapped cannot be measured: no shm-mapped today" in capsys.readouterr().err


# Faults while measuring. ------------------------------------------------------------------------------------


@measures
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wrong", ["pull", "push"])
def test_wrong_data_is_noticed(
    path: str, wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    move = bench_transfers.Site.move

    def damaged(self: bench_transfers.Site, direction: bench_transfers.Direction) -> Transfer[None]:
        if direction != wrong:
            return move(self, direction)
        here, there = self.here.index, self.remote.index.copy()
        there[[3, 8]] = there[[8, 3]]
        caches = self.dd.cache_manager
        if direction == "pull":
            return caches.pull_blocks(self.key, self.cache, there, here)
        return caches.push_blocks(self.key, self.cache, here, there)

    monkeypatch.setattr(bench_transfers.Site, "move", damaged)
    assert main(["bench", "bandwidth", *SMALL, "--block", "4KiB", "--paths", path]) == 1
    message = f"{wrong} over {path} with blocks of 4 KiB: 2 of 256 blocks are not what was sent"
    assert message in capsys.readouterr().err


@measures
@pytest.mark.parametrize("path", ["shm-mapped", "tcp"])
def test_wrong_layers_are_noticed(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = bench_layers._Layers._start

    def damaged(self: bench_layers._Layers, layers: Any) -> adt.TransferTask:
        if isinstance(layers, adt.LayerGate):
            self._site.cache.tensors[2][self._site.here.index[0]] ^= 1
        return start(self, layers)

    monkeypatch.setattr(bench_layers._Layers, "_start", damaged)
    assert main(["bench", "layerwise", *SMALL, "--paths", path]) == 1
    message = f"LayerGate over {path} with blocks of 64 KiB: 1 of 16 blocks are not what was sent, the first in layer 2"
    assert message in capsys.readouterr().err


@measures
@pytest.mark.parametrize(
    ("subject", "path", "method", "limit"),
    [
        ("bandwidth", "shm-process_vm", "process_vm", "process_vm_readv, 1 thread, 1 iovec"),
        ("latency", "shm-mapped", "copy_each", "memcpy"),
    ],
)
def test_limit_that_moves_nothing_is_noticed(
    subject: str,
    path: str,
    method: str,
    limit: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Half, method, lambda self, *arguments, **options: 1e-9)
    assert main(["bench", subject, *SMALL, "--block", "4KiB", "--paths", path]) == 1
    assert f"{limit} over {path} with blocks of 4 KiB: 256 of 256 blocks are not" in capsys.readouterr().err


@measures
def test_killed_peer_ends_the_bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call = bench_peer.Peer.call
    pids = []

    async def fatal(self: bench_peer.Peer, name: str, **arguments: Any) -> Any:
        if name == "serve_raw":
            pids.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        return await call(self, name, **arguments)

    monkeypatch.setattr(bench_peer.Peer, "call", fatal)
    assert main(["bench", "latency", *SMALL, "--block", "4KiB", "--paths", "tcp"]) == 1
    assert f"the passive process {pids[0]} ended early, with exit code -9" in capsys.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@measures
def test_fault_of_the_peer_comes_back(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    async def confused(self: bench_transfers.Session, *arguments: Any) -> None:
        await self.peer.call("forget", model_id=99)

    monkeypatch.setattr(bench_transfers.Session, "latency", confused)
    assert main(["bench", "latency", *SMALL, "--paths", "tcp"]) == 1
    errors = capfd.readouterr().err
    assert "error: the passive process: KeyError: 99" in errors
    assert "Traceback" in errors


@measures
def test_peer_ends_with_the_bench() -> None:
    script = "import asyncio, os, signal\nfrom aiodatadist.commands.bench_peer import Peer\n"
    script += "async def main():\n async with Peer.start() as peer:\n"
    script += "  print(peer.pid, flush=True)\n  os.kill(os.getpid(), signal.SIGKILL)\nasyncio.run(main())"
    root = str(Path(bench.__file__).parents[2])
    # The peer holds the other end of this pipe until it ends, and so does the wait.
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert int(done.stdout) > 0


# The limits do the work. ------------------------------------------------------------------------------------


def halves(count: int = 300, block: int = 1024) -> tuple[Half, Half]:
    pools = [np.zeros((2 * count, block), np.uint8) for _ in range(2)]
    here, there = (Half.of(pool, scattered(2 * count, count, seed)) for seed, pool in enumerate(pools))
    there.fill()
    return here, there


@pytest.mark.sanitize
def test_blocks_in_wrong_places_are_counted() -> None:
    here, there = halves()
    assert here.wrong(there.index) == len(here.index)
    here.words[here.index] = there.words[there.index]
    assert here.wrong(there.index) == 0
    assert there.wrong(there.index) == 0
    here.words[here.index[5], -1] ^= 1
    here.words[here.index[7]], here.words[here.index[9]] = here.words[here.index[9]], here.words[here.index[7]].copy()
    assert here.wrong(there.index) == 3
    here.clear()
    assert not here.words.any()


@pytest.mark.sanitize
def test_layers_in_each_others_place_are_counted() -> None:
    index = scattered(20, 10, 3)
    layers = [Half.of(np.zeros((20, 64), np.uint8), index, number) for number in range(3)]
    for layer in layers:
        layer.fill()
    assert [layer.part(2, 5).wrong(index[2:7]) for layer in layers] == [0, 0, 0]
    assert Half(layers[2].words, index, layers[1].before).wrong(index) == 10


@pytest.mark.sanitize
@pytest.mark.parametrize("loop", ["memcpy", "stream", "stream-prefetch"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_raw_copies(loop: Any, threads: int) -> None:
    here, there = halves()
    assert here.copy(there, threads, loop) > 0
    assert here.wrong(there.index) == 0
    assert np.count_nonzero(here.words.any(axis=1)) == len(here.index)


@pytest.mark.sanitize
@pytest.mark.parametrize("iovecs", [1, 7, 1024])
@pytest.mark.parametrize("write", [False, True])
def test_raw_process_vm(iovecs: int, write: bool) -> None:
    here, there = halves()
    if write:
        remote = Remote(os.getpid(), here.address, here.index)
        assert there.process_vm(remote, 2, iovecs, write=True) > 0
    else:
        remote = Remote(os.getpid(), there.address, there.index)
        assert here.process_vm(remote, 2, iovecs, write=False) > 0
    assert here.wrong(there.index) == 0


@pytest.mark.sanitize
def test_raw_single_blocks() -> None:
    here, there = halves()
    took = here.copy_each(there)
    assert len(took) == len(here.index)
    assert (took >= 0).all()
    assert here.wrong(there.index) == 0
    here.clear()
    remote = Remote(os.getpid(), there.address, there.index)
    took = here.part(20, 10).process_vm_each(remote.part(20, 10), write=False)
    assert len(took) == 10
    assert (took > 0).all()
    assert here.part(20, 10).wrong(there.index[20:30]) == 0
    assert here.wrong(there.index) == len(here.index) - 10


@pytest.mark.sanitize
@pytest.mark.parametrize("streams", [0, 1, 2])
@pytest.mark.parametrize("asker_sends", [False, True])
async def test_raw_sockets(streams: int, asker_sends: bool) -> None:
    here, there = halves(1500, 4096)
    receiver, sender = here, there
    pairs = [socket.socketpair() for _ in range(max(1, streams))]
    asking, answering = ([pair[end].fileno() for pair in pairs] for end in (0, 1))
    source, target = (asking, answering) if asker_sends else (answering, asking)

    def run(half: Half, descriptors: list[int], sends: bool) -> Any:
        if streams:
            return half.sockets(descriptors, sends=sends, asks=sends == asker_sends)
        return half.socket_each(descriptors[0], sends=sends, asks=sends == asker_sends).sum()

    try:
        for _ in range(2):  # and are fit for more
            here.clear()
            took = await asyncio.gather(
                asyncio.to_thread(run, sender, source, True), asyncio.to_thread(run, receiver, target, False)
            )
            assert min(took) > 0
            assert here.wrong(there.index) == 0
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


@pytest.mark.sanitize
def test_raw_faults() -> None:
    here, there = halves()
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(ProcessLookupError):
        here.process_vm(Remote(gone.pid, there.address, there.index), 2, 1024, write=False)
    with pytest.raises(OSError, match="Bad address"):
        here.process_vm_each(Remote(os.getpid(), 4096, there.index), write=False)
    with pytest.raises(IndexError, match="differ"):
        here.copy(Half.of(np.zeros((4, 1024), np.uint8), np.array([1])), 1, "memcpy")
    with pytest.raises(IndexError, match=r"outside 0\.\.3"):
        Half.of(np.zeros((4, 1024), np.uint8), np.array([4]))
    ours, theirs = socket.socketpair()
    threading.Timer(0.05, theirs.close).start()
    with ours, pytest.raises((ConnectionResetError, BrokenPipeError)):
        here.sockets([ours.fileno()], sends=True, asks=True)
    with pytest.raises(ValueError, match=r"outside 1\.\.64"):
        here.sockets([], sends=True, asks=True)
