"""The demo proves that a cache arrived, and fails when it did not: each control, a killed node, a wrong path.

What both modes share is tried in one of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist import _core
from aiodatadist.commands import CommandError, demo, demo_messages, demo_nodes, main
from aiodatadist.model import draw_prompt

from .pairs import USER, linked, pattern
from .waiting import PATIENCE, until, until_now

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "aiodatadist", "demo"]
DIGESTS = 4 * 38  # layers times blocks of the drawn prompt


def run_demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def row(output: str, name: str) -> str:
    """Return the text of a row of the table, on one line."""
    match = re.search(rf"^  {re.escape(name)}\s+(.*(?:\n {{14}}.*)*)", output, re.M)
    assert match, f"no row {name} in:\n{output}"
    return re.sub(r"\n\s+", " ", match[1])


def test_every_transport_and_memory_brings_the_same_tokens() -> None:
    texts = set()
    for transport, memory, path in (
        ("auto", "library", "shm-mapped"),
        ("shm", "ordinary", "shm-process_vm"),
        ("tcp", "library", "tcp"),
    ):
        options = ("--transport", transport, "--memory", memory, "--seed", "11", "--tokens", "40")
        done = run_demo(*options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        assert row(done.stdout, "path").startswith(path)
        assert row(done.stdout, "digests") == f"{DIGESTS} of {DIGESTS} (layer, block) agree"
        assert row(done.stdout, "tokens") == "40 of 40 as in a single process"
        assert "601 tokens, 38 blocks, 1,245,184 bytes" in row(done.stdout, "KV cache")
        assert "GB/s" in row(done.stdout, "whole cache")
        assert draw_prompt(11, 600).text[-40:].replace("\n", "\\n") in row(done.stdout, "prompt")
        assert "--seed 11 repeats this run" in done.stdout
        assert "\nOK: " in done.stdout
        texts.add(row(done.stdout, "generated"))
    assert len(texts) == 1


def test_verbs_is_used_or_the_reason_is_told() -> None:
    """What was asked for is not replaced by something else in silence."""
    probed = {name: (usable, why) for name, usable, why in _core.probe_transports()}
    usable, why = probed.get("verbs", (False, "verbs"))
    done = run_demo("--transport", "verbs", "--tokens", "8")
    if usable:
        assert done.returncode == 0, done.stdout + done.stderr
        assert row(done.stdout, "path").startswith("verbs")
    else:
        assert done.returncode == 1
        assert "verbs was asked for" in done.stderr
        assert why in done.stderr


def test_layers_are_pushed_while_the_model_computes() -> None:
    done = run_demo("--mode", "layerwise", "--seed", "11", "--tokens", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert row(done.stdout, "path").startswith("shm-mapped")
    assert row(done.stdout, "digests") == f"{DIGESTS} of {DIGESTS} (layer, block) agree"
    assert row(done.stdout, "tokens") == "12 of 12 as in a single process"
    assert "601 tokens, 38 blocks, 1,245,184 bytes in 4 layers" in row(done.stdout, "KV cache")
    found = re.match(r"([\d,]+) of 1,245,184 bytes \((\d) of 4 layers\) were on", row(done.stdout, "overlap"))
    assert found, row(done.stdout, "overlap")
    assert int(found[1].replace(",", "")) == int(found[2]) * 1_245_184 // 4
    if "takes too long to be repeated" not in done.stdout:  # as on a very busy machine
        assert re.match(r"all bytes \S+ [mu]?s .*after .* pushed at the end \S+ [mu]?s ", row(done.stdout, "repeated"))
    assert "\nOK: " in done.stdout


@pytest.mark.parametrize("at_end", [False, True])
async def test_a_layer_leaves_before_the_next_is_computed(at_end: bool) -> None:
    layers, src, dst = 3, [4, 1, 6], [0, 7, 2]
    async with linked() as pair:
        here = await pair.offer(pattern(1, (8, 256), tensors=2 * layers))
        there = await pair.take(pattern(2, (8, 256), tensors=2 * layers), key=demo_nodes.DECODE_CACHE)
        await until(lambda: demo_nodes.DECODE_CACHE in pair.owner.links[USER].table)
        untouched = [tensor.copy() for tensor in there.tensors]

        def compute(on_layer: Callable[[int], None]) -> str:
            for layer in range(layers):
                mine, theirs = here.tensors[2 * layer : 2 * layer + 2], there.tensors[2 * layer : 2 * layer + 2]
                for tensor in mine:
                    tensor[src] = layer + 1
                on_layer(layer)
                if not at_end:
                    # Pushed at the end, it would never be there.
                    until_now(lambda theirs=theirs, all_of=layer + 1: all((t[dst] == all_of).all() for t in theirs))
                elif layer < layers - 1:
                    assert all(np.array_equal(*both) for both in zip(there.tensors, untouched, strict=True))
            return "logits"

        places = demo_messages.Places(dst, [(0, layers)], at_end)
        result, computed = await demo_nodes.push_layers(pair.owner.cache_manager, here, compute, src, places)
        assert result == "logits"
        assert computed == sorted(computed)
        assert len(computed) == layers
        for mine, theirs in zip(here.tensors, there.tensors, strict=True):
            assert np.array_equal(theirs[dst], mine[src])


async def test_a_layer_that_is_not_wanted_is_not_pushed_and_a_lost_decode_node_is_an_error() -> None:
    async with linked() as pair:
        here = await pair.offer(pattern(1, (4, 64), tensors=6))
        there = await pair.take(pattern(2, (4, 64), tensors=6), key=demo_nodes.DECODE_CACHE)
        await until(lambda: demo_nodes.DECODE_CACHE in pair.owner.links[USER].table)
        untouched = [tensor.copy() for tensor in there.tensors]

        def compute(on_layer: Callable[[int], None]) -> None:
            for layer in range(3):
                on_layer(layer)

        caches = pair.owner.cache_manager
        places = demo_messages.Places([1], [(0, 1), (2, 3)])
        await demo_nodes.push_layers(caches, here, compute, [3], places)
        same = [np.array_equal(*both) for both in zip(there.tensors, untouched, strict=True)]
        assert same == [False, False, True, True, False, False]
        await pair.user.cache_manager.unregister_cache(there)
        await until(lambda: demo_nodes.DECODE_CACHE not in pair.owner.links[USER].table)
        with pytest.raises(ExceptionGroup) as raised:
            await demo_nodes.push_layers(caches, here, compute, [3], places)
        assert [type(error) for error in raised.value.exceptions] == [adt.CacheNotFound] * 2


def test_overlap_is_what_landed_before_the_last_layer() -> None:
    assert demo._tail([1.0, 2.0, 3.0], [(0, 1.5), (1, 2.5), (2, 3.25)]) == 0.25
    assert demo._tail([1.0, 2.0, 3.0], [(0, 1.5), (1, 2.5)]) == 0.0  # the last was left out


@pytest.mark.parametrize(
    ("control", "options", "where", "agree"),
    [
        ("flip-byte", ["--mode", "layerwise"], r"layer \d, block (\d+) ", DIGESTS - 1),
        ("swap-blocks", ["--transport", "tcp"], r"all 4 layers, blocks \d+(, |-)\d+ ", DIGESTS - 8),
        ("swap-blocks", ["--mode", "layerwise"], r"all 4 layers, blocks \d+(, |-)\d+ ", DIGESTS - 8),
        ("drop-layer", ["--memory", "ordinary"], r"layer \d, blocks 0-37 ", DIGESTS - 38),
        ("drop-layer", ["--mode", "layerwise", "--transport", "tcp"], r"layer \d, blocks 0-37 ", DIGESTS - 38),
        ("zero", [], r"all 4 layers, block \d+ ", DIGESTS - 4),
    ],
)
def test_damage_is_noticed_and_named(control: str, options: list[str], where: str, agree: int) -> None:
    done = run_demo("--seed", "3", "--control", control, "--tokens", "60", *options)
    output = done.stdout
    assert done.returncode == 1, output + done.stderr
    assert done.stderr == ""
    assert row(output, "digests") == f"{agree} of {DIGESTS} (layer, block) agree"
    assert re.search(rf"^DIFFERS: {DIGESTS - agree} of {DIGESTS} digests differ: {where}", output, re.M), output
    assert "\nFAILED: " in output
    assert "\nOK: " not in output
    # Garbage in a layer, or a value of 1e38, cannot leave the text as it was; a lost block of filler can.
    if control in ("flip-byte", "drop-layer"):
        assert re.search(r"^DIFFERS: the tokens differ from token \d+ on: ", output, re.M), output
    assert "the tokens differ" in output or "The tokens are equal in spite of that" in output


@pytest.mark.parametrize(("node", "moment"), [("prefill", "started"), ("prefill", "listening"), ("decode", "pulled")])
def test_killed_node_ends_the_demo(node: str, moment: str) -> None:
    while True:
        killed, code, output, errors, pids = kill_a_node(node, moment)
        if killed and code:
            break  # else it had done its work before
    assert code == 1, output + errors
    assert f"error: the {node} process was killed by SIGKILL" in errors
    assert "\nOK: " not in output
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            pytest.fail(f"process {pid} is still there")


def kill_a_node(node: str, moment: str) -> tuple[bool, int, str, str, list[int]]:
    """Run the demo, kill a node at that moment, and return whether it was there, and how the demo ended."""
    with subprocess.Popen(
        [*COMMAND, "--tokens", "1024"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            pids: dict[str, int] = {}
            for line in process.stdout:
                pids.update((name, int(pid)) for name, pid in re.findall(r"(\w+) process (\d+)", line))
                if moment in line:
                    break
            try:
                os.kill(pids[node], signal.SIGKILL)
                killed = True
            except ProcessLookupError:
                killed = False
            output, errors = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    return killed, process.returncode, output, errors, list(pids.values())


def test_tracebacks_of_nodes_come_back() -> None:
    done = run_demo(AIODATADIST_TRANSPORTS="smoke-signals")
    assert done.returncode == 1
    assert "[prefill] Traceback" in done.stderr
    assert "[prefill] aiodatadist.errors.ConfigError: " in done.stderr
    assert "error: the prefill process ended with exit code 1" in done.stderr


def test_short_prompt_of_ones_own() -> None:
    done = run_demo("--prompt", "né\n", "--tokens", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert row(done.stdout, "prompt") == r'"n\xe9\n"'
    assert "5 tokens, 1 block," in row(done.stdout, "KV cache")


def test_other_path_than_the_one_asked_for_fails() -> None:
    linked = demo_messages.Linked(0.1, "tcp (not shm: no proof)", "tcp", "not mapped", ["shm", "tcp"])
    demo._check_path(linked, "auto")
    demo._check_path(linked, "tcp")
    with pytest.raises(
        CommandError, match=r"shm was asked for, .* over tcp: not mapped; link: tcp \(not shm: no proof\)"
    ):
        demo._check_path(linked, "shm")
    mapped = msgspec.structs.replace(linked, cache="shm-mapped")
    demo._check_path(mapped, "shm")


def test_decode_node_is_told_nothing_of_the_prompt() -> None:
    told = {
        field.name
        for kind in (demo_messages.DecodeJob, demo_messages.Handoff, demo_messages.Offer, demo_messages.FirstToken)
        for field in msgspec.structs.fields(kind)
    }
    assert told == {
        "address", "max_new_tokens", "transport", "memory", "mode", "layout_seed", "control",
        "first_token", "length", "blocks", "token",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "outside 1..1024"),
        (["--transport", "pigeon"], "invalid choice"),
        (["--control", "nothing"], "invalid choice"),
        (["--mode", "push-pull"], "invalid choice"),
        (["--prompt", ""], "it is empty"),
        (["--prompt", "\udcff"], "not valid text"),
        (["--prompt", "a" * 2000], "more than the model's 2048"),
        (["--prompt", "a" * 15, "--control", "swap-blocks"], "swapping blocks takes two"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as why:
        main(["demo", *arguments])
    assert why.value.code == 2
    assert message in capsys.readouterr().err


def test_names_of_blocks() -> None:
    assert demo._name_blocks([(0, 3), (0, 4), (0, 5), (0, 9), (2, 1)], 4) == "layer 0, blocks 3-5, 9; layer 2, block 1"
    assert demo._name_blocks([(0, 1), (1, 1)], 2) == "all 2 layers, block 1"
    assert demo._name_blocks([(0, 1)], 1) == "all 1 layers, block 1"
