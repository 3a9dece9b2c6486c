"""Scripts that import `llm_datadist` as code for Ascend does, run unchanged by the drop-in's launcher."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiodatadist as adt
from aiodatadist.llm_datadist import host_npu

from .pairs import OWNER, linked, pattern
from .waiting import PATIENCE

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "examples/llm_datadist"
LAUNCH = [sys.executable, "-m", "aiodatadist.llm_datadist"]


class Nursery:
    """Runs scripts in processes that are forked from one where everything is imported."""

    def __init__(self, *modules: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.llm_nursery", str(PATIENCE), *modules],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *commands: list[str]) -> list[tuple[int, str, str]]:
        """Run them all at once, and return exit status, stdout and stderr of each."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(commands), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, "the nursery is gone"
        return [tuple(one) for one in json.loads(answer)]

    def close(self) -> None:
        self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="module")
def torch_nursery() -> Iterator[Nursery]:
    made = Nursery("torch")
    yield made
    made.close()


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    """Keep pairs of ports that follow each other, and return the address of the first of each."""
    held: list[socket.socket] = []
    found: list[str] = []

    def take(port: int) -> int:
        keeper = socket.socket()
        held.append(keeper)
        # Listeners with the same option may share the port with a socket that does not listen.
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", port))
        return int(keeper.getsockname()[1])

    while len(found) < 4:
        port = take(0)
        try:
            take(port + 1)
        except (OSError, OverflowError):
            continue
        found.append(f"127.0.0.1:{port}")
    yield found
    for keeper in held:
        keeper.close()


def command(script: str, role: str, where: list[str], *more: str) -> list[str]:
    return [str(SCRIPTS / script), "--role", role, "--prompt", where[0], "--decoder", where[1], *more]


def said(results: list[tuple[int, str, str]]) -> list[str]:
    """Check that all processes ended well, and return what they printed last."""
    for status, out, err in results:
        assert status == 0, f"{out}\n{err}"
    return [out.splitlines()[-1] for _, out, _ in results]


# What the two processes print last, and options.
PAIRS: dict[str, tuple[str, str]] = {
    "pull_blocks.py": ("the blocks were pulled", "every block is right"),
    "push_blocks.py": ("the blocks were pushed", "every block is right"),
    "pull_and_push_cache.py": ("one entry was pulled, and one was pushed", "every entry is right"),
    "pull_cache_into_blocks.py": ("a request was pulled", "every block is right"),
    "switch_role.py": ("pulled in both roles, every block is right",) * 2,
    "link_both_sides.py": ("every block is right",) * 2,
    "link_by_rank_table.py": ("every block is right",) * 2,
    "layerwise_by_address.py": ("the request was sent layer by layer", "every layer is right"),
    "layerwise_by_key.py": ("the blocks were sent layer by layer", "every layer is right"),
}


def run_pair(nursery: Nursery, script: str, memory: str, where: list[str], *variables: str) -> None:
    options = ["--memory", memory]
    if script == "link_by_rank_table.py":
        options += ["--name", where[0]]
    pair = [[*variables, "--cpu", *command(script, role, where, *options)] for role in "pd"]
    assert said(nursery.run(*pair)) == list(PAIRS[script])


@pytest.mark.parametrize("script", PAIRS)
def test_scripts(script: str, nursery: Nursery, addresses: list[str]) -> None:
    run_pair(nursery, script, "numpy", addresses)


OVER_VERBS = "AIODATADIST_TRANSPORTS=verbs"


@pytest.mark.verbs
@pytest.mark.parametrize("script", PAIRS)
def test_scripts_over_verbs(script: str, nursery: Nursery, addresses: list[str]) -> None:
    """No other transport could take over."""
    run_pair(nursery, script, "numpy", addresses, OVER_VERBS)


# Those that differ in what they do with memory.
TORCH_PAIRS = ("pull_blocks.py", "pull_cache_into_blocks.py", "layerwise_by_address.py", "layerwise_by_key.py")


@pytest.mark.torch
@pytest.mark.parametrize("script", TORCH_PAIRS)
def test_scripts_with_torch(script: str, torch_nursery: Nursery, addresses: list[str]) -> None:
    run_pair(torch_nursery, script, "torch", addresses)


def prefill_and_decode(nursery: Nursery, where: list[str], *options: str) -> None:
    script = str(ROOT / "examples/ascend_pd.py")
    ends = ["--prompt", where[0], "--decoder", where[1], *options]
    results = nursery.run(*(["--cpu", script, "--role", role, *ends] for role in "pd"))
    assert said(results) == ["prefill is done, and 0 requests were left over", "8 answers are right"]


@pytest.mark.parametrize("backend", ["default", "hixl"])
def test_prefill_and_decode(backend: str, nursery: Nursery, addresses: list[str]) -> None:
    prefill_and_decode(nursery, addresses, "--memory", "numpy", "--backend", backend)


@pytest.mark.torch
def test_prefill_and_decode_with_torch(torch_nursery: Nursery, addresses: list[str]) -> None:
    prefill_and_decode(torch_nursery, addresses, "--memory", "torch", "--backend", "hixl")


def test_members_on_two_hosts(nursery: Nursery, addresses: list[str]) -> None:
    more = ["--memory", "numpy", "--name", addresses[0], "--decoder_host", "127.0.0.2"]
    base_port = f"HCCL_IF_BASE_PORT={addresses[2].partition(':')[2]}"
    pair = [[base_port, *command("link_by_rank_table.py", role, addresses, *more)] for role in "pd"]
    assert said(nursery.run(*pair)) == ["every block is right"] * 2


@pytest.mark.parametrize("variables", [(), pytest.param((OVER_VERBS,), marks=pytest.mark.verbs)], ids=["", "verbs"])
def test_one_decoder_and_three_prompts(nursery: Nursery, addresses: list[str], variables: tuple[str, ...]) -> None:
    script, memory = str(SCRIPTS / "three_prompts.py"), ["--memory", "numpy"]
    prompts = addresses[:3]
    four = [
        [*variables, script, "--role", "p", "--number", str(number), "--prompt", address, *memory]
        for number, address in enumerate(prompts, 1)
    ]
    four.append([*variables, script, "--role", "d", "--prompts", *prompts, *memory])
    assert said(nursery.run(*four)) == ["the blocks were pulled"] * 3 + ["every block is right"]


def test_every_script_is_run() -> None:
    assert {path.name for path in SCRIPTS.glob("*.py")} == {*PAIRS, "shared.py", "three_prompts.py"}


# The launcher. ------------------------------------------------------------------------------------------------


def test_two_terminals(addresses: list[str]) -> None:
    """As the head of examples/llm_datadist/shared.py says."""
    prompt, decoder = (
        subprocess.Popen(
            [*LAUNCH, "--cpu", *command("pull_blocks.py", role, addresses, "--memory", "numpy")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role in "pd"
    )
    try:
        results = [
            (one.returncode, *output) for one in (prompt, decoder) if (output := one.communicate(timeout=PATIENCE))
        ]
    finally:
        prompt.kill()
        decoder.kill()
    assert said(results) == ["the blocks were pulled", "every block is right"]
    for _, _, err in results:
        assert re.findall("^aiodatadist: --cpu: no NPU is used", err, re.M)
        assert err.count("Placement.DEVICE means host memory") == 1


def run_script(nursery: Nursery, folder: Path, text: str, *options: str, arguments: tuple[str, ...] = ()) -> Any:
    path = folder / "script.py"
    path.write_text(text)
    (result,) = nursery.run([*options, str(path), *arguments])
    return result


def test_a_script_is_main(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WHERE = __file__")
    text = """
import sys, pickle, __main__, beside
class Mine: pass
assert __name__ == "__main__" and __main__.Mine is Mine and __spec__ is None
assert isinstance(pickle.loads(pickle.dumps(Mine())), Mine)
print(__file__, beside.WHERE, sys.path[0], *sys.argv, sep="|")
"""
    status, out, err = run_script(nursery, tmp_path, text, arguments=("--cpu", "-x", "a b"))
    script = str(tmp_path / "script.py")
    assert status == 0, err
    assert out.strip().split("|") == [script, str(tmp_path / "beside.py"), str(tmp_path), script, "--cpu", "-x", "a b"]
    assert err == ""


def test_how_a_script_ends(nursery: Nursery, tmp_path: Path) -> None:
    assert run_script(nursery, tmp_path, "import atexit; atexit.register(print, 'end'); raise SystemExit(7)") == (
        7,
        "end\n",
        "",
    )
    status, _, err = run_script(nursery, tmp_path, "def f():\n    1 / 0\nf()\n")
    assert status == 1
    assert f'File "{tmp_path / "script.py"}", line 2, in f' in err
    assert "ZeroDivisionError" in err
    status, _, err = run_script(nursery, tmp_path, "x =")
    assert status == 1
    assert "SyntaxError" in err


def test_scripts_that_cannot_be_read(nursery: Nursery, tmp_path: Path) -> None:
    for arguments in ([], ["--cpu"], [str(tmp_path / "none.py")], [str(tmp_path)], ["--gpu", "x.py"]):
        ((status, out, err),) = nursery.run(arguments)
        assert (status, out) == (2, "")
        assert "python -m aiodatadist.llm_datadist: error: " in err


ALIASES = """
import aiodatadist.llm_datadist as ours
import importlib, pkgutil
import llm_datadist
from llm_datadist.v2.llm_types import CacheDesc, PushType
from llm_datadist.utils.utils import check_uint64
import llm_datadist.v2.llm_types as types
from llm_datadist.status import LLMException

assert llm_datadist is ours and types is ours.v2.llm_types and CacheDesc is ours.CacheDesc
assert llm_datadist.v2.llm_types is types and LLMException is ours.LLMException
assert ours.__name__ == ours.__spec__.name == "aiodatadist.llm_datadist", ours.__spec__
for found in pkgutil.walk_packages(llm_datadist.__path__, "llm_datadist."):
    if not found.name.endswith("__main__") and ".children." not in found.name:
        module = importlib.import_module(found.name)
        assert module is importlib.import_module("aiodatadist." + found.name), found.name
        assert module.__spec__.name == module.__name__ == "aiodatadist." + found.name
importlib.reload(ours.utils.utils)
import aiodatadist, sys
aiodatadist.install_as_llm_datadist()  # once more is no error
assert sum("aliases" in type(finder).__module__ for finder in sys.meta_path) == 1
for name in ("llm_datadist.nothing", "llm_datadist.v2.nothing", "llm_datadist.status.nothing"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name == name, error.name
    else:
        raise AssertionError(name)
print("the same modules")
"""


def test_every_path_is_the_same_module(nursery: Nursery, tmp_path: Path) -> None:
    status, out, err = run_script(nursery, tmp_path, ALIASES)
    assert (status, out) == (0, "the same modules\n"), err


REFUSED = """
import sys
sys.path.insert(0, {real!r})
import aiodatadist as adt
import llm_datadist
try:
    adt.install_as_llm_datadist()
except adt.UsageError as error:
    assert {real!r} in str(error), error
else:
    raise AssertionError
import llm_datadist.more
assert llm_datadist.REAL and llm_datadist.more.REAL and sys.modules["llm_datadist"] is llm_datadist
print("as it should be")
"""


def test_installing_refuses_where_the_real_one_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "llm_datadist"
    package.mkdir()
    for name in ("__init__", "more"):
        (package / f"{name}.py").write_text("REAL = True")
    text = REFUSED.format(real=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "as it should be\n"), done.stderr


CHILDREN = """
import multiprocessing, subprocess, sys

def work(queue):
    import llm_datadist.v2.llm_types
    from llm_datadist import LLMDataDist
    queue.put([LLMDataDist.__module__, llm_datadist.v2.llm_types.CacheDesc is llm_datadist.CacheDesc])

import llm_datadist

if __name__ == "__main__":
    if len(sys.argv) > 1:
        import torchair, torch_npu
        assert torch_npu.npu.current_device() == 0 and torchair.llm_datadist.create_npu_tensors
        print("a child")
    else:
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        child = context.Process(target=work, args=(queue,))
        child.start()
        child.join()
        if child.exitcode == 0:
            print(*queue.get(), flush=True)
        sys.exit(child.exitcode or subprocess.call([sys.executable, __file__, "child"]))
"""


def test_processes_of_the_script_are_served_too(nursery: Nursery, tmp_path: Path) -> None:
    said = "aiodatadist.llm_datadist.v2.llm_datadist True\n"
    status, out, err = run_script(nursery, tmp_path, CHILDREN, "--cpu")
    assert (status, out) == (0, said + "a child\n"), err


# torch_npu on host memory. ------------------------------------------------------------------------------------


def test_cpu_needs_no_torch(nursery: Nursery, tmp_path: Path) -> None:
    text = """
import sys
import torch_npu, torchair
from torchair.llm_datadist import create_npu_tensors
import torchair.llm_datadist
assert torchair.llm_datadist.create_npu_tensors is create_npu_tensors
torch_npu.npu.set_device(1)
assert torch_npu.npu.current_device() == 1
for name in ("empty_cache", "Stream"):
    try:
        getattr(torch_npu.npu, name)
    except AttributeError as error:
        assert "--cpu" in str(error)
    else:
        raise AssertionError(name)
assert "torch" not in sys.modules
print("without torch")
"""
    status, out, err = run_script(nursery, tmp_path, text, "--cpu")
    assert (status, out) == (0, "without torch\n"), err
    assert err == "aiodatadist: --cpu: no NPU is used; torch.npu and torch_npu here are host memory\n"
    status, _, err = run_script(nursery, tmp_path, "import torch_npu")
    assert status == 1
    assert "No module named 'torch_npu'" in err


def test_without_cpu_nothing_is_said(nursery: Nursery, tmp_path: Path) -> None:
    assert run_script(nursery, tmp_path, "import llm_datadist") == (0, "", "")


TORCH = """
import sys
assert ("torch" in sys.modules) is {imported}
import torch
assert type(torch.__spec__.loader).__module__ != "aiodatadist.llm_datadist.host_npu"
for device in (3, "npu:3", torch.device("cpu", 3)):
    torch.npu.set_device(0)
    torch.npu.set_device(device)
    assert torch.npu.current_device() == 3
torch.npu.synchronize()
torch.npu.synchronize("npu:0")
try:
    torch.npu.set_device("cuda:0")
except ValueError as error:
    assert "cuda:0" in str(error)
else:
    raise AssertionError
begin, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
begin.record()
end.record()
end.synchronize()
end.wait()
assert end.query() is True and begin.elapsed_time(end) >= 0
host = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
device = host.npu()
assert device.data_ptr() != host.data_ptr() and device.equal(host)
assert device.npu() is device and device.npu("npu:0", non_blocking=True) is device
assert device[1:].npu().data_ptr() == device[1:].data_ptr()
import torch_npu, torchair
assert torch_npu.npu is torch.npu
(same,) = torchair.llm_datadist.create_npu_tensors([3, 2], torch.bfloat16, [device.data_ptr()])
same[2, 1] = 40
assert device[1, 2] == 40 and same.npu() is same
print("with torch")
"""


def test_torch_is_completed_after_a_look_for_it(nursery: Nursery, tmp_path: Path) -> None:
    """Also where a script asks first whether torch is there, and where its first import fails."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(
        """\
import os
if os.environ.setdefault("TRIED", "") == "":
    os.environ["TRIED"] = "1"
    raise ImportError("not yet")
class Tensor:
    pass
"""
    )
    text = """\
import importlib.util, sys
assert importlib.util.find_spec("torch") is not None
assert "torch" not in sys.modules
try:
    import torch
except ImportError:
    pass
import torch
torch.npu.set_device(2)
assert torch.npu.current_device() == 2 and torch.Tensor.npu
assert importlib.util.find_spec("torch") is torch.__spec__
assert type(torch.__spec__.loader).__module__ != "aiodatadist.llm_datadist.host_npu"
assert not any(type(finder).__module__ == "aiodatadist.llm_datadist.host_npu" for finder in sys.meta_path)
print("completed")
"""
    status, out, err = run_script(nursery, tmp_path, text, "--cpu")
    assert (status, out) == (0, "completed\n"), err


@pytest.mark.torch
def test_torch_on_host_memory(nursery: Nursery, torch_nursery: Nursery, tmp_path: Path) -> None:
    status, out, err = run_script(torch_nursery, tmp_path, TORCH.format(imported=True), "--cpu")
    assert (status, out) == (0, "with torch\n"), err
    status, out, err = run_script(nursery, tmp_path, TORCH.format(imported=False), "--cpu")
    assert (status, out) == (0, "with torch\n"), err


@pytest.mark.loop
async def test_events_on_host_memory_say_that_layers_are_computed() -> None:
    async with linked() as pair:
        there = await pair.offer(pattern(1, (8, 64), tensors=4))
        here = await pair.take(pattern(2, (8, 64), tensors=4))
        events = [host_npu.Event() for _ in range(2)]
        for event in events:
            event.record()
        target = adt.TransferWithCacheKeyConfig(adt.BlocksCacheKey(OWNER))
        assert len(await pair.user.cache_manager.transfer_cache_async(here, events, [target], [1, 2], [5, 6])) == 1
        for sent, landed in zip(here.tensors, there.tensors, strict=True):
            assert (sent[[1, 2]] == landed[[5, 6]]).all()
