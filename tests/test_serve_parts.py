"""The parts of serving that need no process: texts, blocks, sampling, requests, the registry, the engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")

from aiodatadist.model import Model, tokenizer
from aiodatadist.serve import openai, sampling
from aiodatadist.serve.engine import Reserved
from aiodatadist.serve.errors import CODES, Retry, ServeError
from aiodatadist.serve.numpy_engine import BLOCK_TOKENS, NumpyEngine
from aiodatadist.serve.paged import BlockPool
from aiodatadist.serve.policies import POLICIES, Question, make_policy
from aiodatadist.serve.protocol import Deregistration, KVLayout, Peer, Registration, Sampling
from aiodatadist.serve.pushing import STATES, Reservations, Word, _Entry
from aiodatadist.serve.registry import Registry, fits
from aiodatadist.serve.text import TextStream

from .waiting import until

# Texts. -----------------------------------------------------------------------------------------------------


def stream_of(text: bytes, *stop: str) -> tuple[list[str], bool]:
    """Push bytes one by one; return what came out at each, and whether it stopped."""
    stream = TextStream(tokenizer, stop)
    out = []
    for byte in text:
        out.append(stream.push(byte))
        if stream.has_stopped():
            return out, True
    out.append(stream.end())
    return out, stream.has_stopped()


def test_characters_come_whole() -> None:
    out, _ = stream_of("aé€😀b".encode())
    assert out == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]


def test_broken_characters_do_not_hold_up_the_text() -> None:
    out, _ = stream_of(b"\xe2a\xff\xff\xff\xffb")
    assert "".join(out) == tokenizer.decode(b"\xe2a\xff\xff\xff\xffb")
    assert out[-2].endswith("b")


@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        ("hello world", ("wor",), ("hello ", True)),
        ("aaab", ("aab",), ("a", True)),
        ("one two", ("tow",), ("one two", False)),
        ("xy", ("xyz",), ("xy", False)),
        ("abcd", ("d", "bc"), ("a", True)),
        ("né", ("é",), ("n", True)),
    ],
)
def test_a_stop_string_is_never_seen(text: str, stop: tuple[str, ...], wanted: tuple[str, bool]) -> None:
    out, stopped = stream_of(text.encode(), *stop)
    assert ("".join(out), stopped) == wanted


# Blocks. ----------------------------------------------------------------------------------------------------


def test_a_finished_prompt_is_found_and_then_evicted_from_its_end() -> None:
    pool = BlockPool(6, 4)
    prompt = list(range(14))  # three full blocks and a bit
    blocks = pool.take(4)
    assert blocks is not None
    pool.keep(prompt, blocks)
    pool.give(blocks)
    assert pool.free == 6

    found = pool.find([*prompt[:12], 99, 98])
    assert found == (blocks[:3], 12)
    # The last token is always left to compute.
    again = pool.find(prompt[:12])
    assert again == (blocks[:2], 8)
    pool.give(found.blocks)
    pool.give(again.blocks)
    assert pool.free == 6

    taken = pool.take(4)  # three empty ones, and the end of the prompt
    assert taken is not None
    assert blocks[2] in taken
    assert pool.find(prompt).blocks == blocks[:2]
    assert pool.take(1) is None
    assert pool.free == 0


def test_a_block_is_not_given_back_twice() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.take(1)
    assert blocks is not None
    pool.give(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.give(blocks)


# Sampling. --------------------------------------------------------------------------------------------------


def test_a_token_depends_on_logits_seed_and_position_alone() -> None:
    logits = np.random.default_rng(1).normal(size=50).astype(np.float32)
    warm = Sampling(temperature=0.8, seed=7)
    tokens = [sampling.choose(logits, warm, position) for position in range(200)]
    assert tokens == [sampling.choose(logits, warm, position) for position in range(200)]
    assert len(set(tokens)) > 10
    assert tokens != [sampling.choose(logits, Sampling(temperature=0.8, seed=8), p) for p in range(200)]
    assert {sampling.choose(logits, Sampling(temperature=0), p) for p in range(9)} == {int(logits.argmax())}
    assert {sampling.choose(logits, Sampling(top_p=1e-6, seed=p), p) for p in range(9)} == {int(logits.argmax())}
    assert sampling.choose(logits, Sampling(seed=-(2**63)), 5) in range(50)


def test_the_shares_of_tokens_are_those_of_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    counts = np.bincount([sampling.choose(logits, Sampling(seed=3), p) for p in range(4000)], minlength=3)
    assert np.abs(counts / 4000 - [0.5, 0.3, 0.2]).max() < 0.04
    half = {sampling.choose(logits, Sampling(seed=3, top_p=0.6), p) for p in range(500)}
    assert half == {0, 1}


# Requests. --------------------------------------------------------------------------------------------------


def read(chat: bool = False, **fields: Any) -> Any:
    import msgspec

    body: dict[str, Any] = {"model": "small"}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    return openai.read_request(msgspec.json.encode(body | fields), chat=chat)


def test_a_request_is_read() -> None:
    asked = read(max_tokens=5, seed=3, stop="x", stream=True, temperature=0.5, best_of=1, n=1, user="me")
    assert (asked.prompt, asked.max_tokens, asked.stop, asked.stream) == ("hi", 5, ["x"], True)
    assert asked.sampling == Sampling(temperature=0.5, seed=3)
    chat = read(
        chat=True, max_completion_tokens=9, messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    )
    assert (chat.chat, chat.turns, chat.max_tokens) == (True, [("user", "a")], 9)
    assert read(prompt=[[1, 2]]).prompt == [1, 2]
    assert read().request_id != read().request_id


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temperature": 3}, "invalid_request", "temperature"),
        ({"temperature": "hot"}, "invalid_request", "temperature"),
        ({"top_p": 0}, "invalid_request", "top_p"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"stop": [""]}, "invalid_request", "stop"),
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"seed": 2**64}, "invalid_request", "seed"),
        ({"n": 2}, "unsupported", "n"),
        ({"logprobs": 0}, "unsupported", "logprobs"),
        ({"prompt": ["a", "b"]}, "unsupported", "prompt"),
        ({"chat": True, "messages": []}, "invalid_request", "messages"),
        ({"chat": True, "tools": [{}]}, "unsupported", "tools"),
    ],
)
def test_a_bad_request_names_its_field(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ServeError) as caught:
        read(**fields)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.status == 400


def test_no_error_of_a_client_is_tried_again() -> None:
    assert not [code for code, facts in CODES.items() if facts.status < 500 and facts.retry is not Retry.NEVER]


# The registry. ----------------------------------------------------------------------------------------------

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype="float32")


def registration(worker_id: str, role: str = "prefill", **more: Any) -> Registration:
    fields: dict[str, Any] = {
        "incarnation": "1", "url": "http://here", "model": "m", "model_hash": "h", "layout": LAYOUT,
        "max_positions": 99, "slots": 4, "transports": ["tcp"], "modes": ["pull"],
        "peer": Peer(cluster_id=1, incarnation="1", listen=["here:1"]),
    }  # fmt: skip
    return Registration(worker_id=worker_id, role=role, **(fields | more))


def test_a_silent_worker_is_forgotten_and_one_that_returns_begins_anew() -> None:
    now = [0.0]
    registry = Registry(clock=lambda: now[0])
    member = registry.put(registration("a", ttl_s=6.0))
    lease = member.take(10)
    now[0] = 6.0
    assert registry.sweep() == []
    assert registry.put(registration("a", ttl_s=6.0)) is member
    now[0] = 12.5
    assert registry.sweep() == [member]
    newer = registry.put(registration("a", incarnation="2"))
    assert newer is not member
    assert not registry.remove(Deregistration(worker_id="a", incarnation="1"))
    lease.release()
    lease.release()
    assert (member.requests, member.tokens, newer.requests) == (0, 0, 0)


def test_only_what_fits_is_a_pair() -> None:
    prefill, decode = registration("p"), registration("d", "decode")
    assert fits(prefill, decode, "pull")
    assert not fits(prefill, decode, "push")
    assert not fits(prefill, registration("d", "decode", model_hash="other"), "pull")
    assert not fits(prefill, registration("d", "decode", transports=["shm"]), "pull")
    other = KVLayout(layers=2, kv_heads=1, head_dim=8, block_tokens=16, dtype="float32")
    assert not fits(prefill, registration("d", "decode", layout=other), "pull")


@pytest.mark.parametrize("bad", [{"role": "cook"}, {"url": "here"}, {"peer": None}, {"modes": []}, {"ttl_s": 0.0}])
def test_what_cannot_be_is_not_registered(bad: dict[str, Any]) -> None:
    with pytest.raises(ServeError) as caught:
        Registry().put(registration("a", **bad))
    assert caught.value.code == "registration_refused"


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_chooses_of_what_there_is(name: str) -> None:
    registry = Registry()
    members = [registry.put(registration(each)) for each in "abc"]
    policy = make_policy(name, "prefill")
    chosen = [policy.choose(members, Question(b"hello", 5)) for _ in range(30)]
    assert set(chosen) <= set(members)
    assert policy.choose(members[:1], Question(b"", 0)) is members[0]


# The engine. ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load()


async def running_engine(model: Model, num_blocks: int = 64, slots: int = 4) -> NumpyEngine:
    engine = NumpyEngine(model, "small", num_blocks, slots, fingerprint="x")
    engine.bind([np.zeros(shape, np.float32) for shape in engine.tensor_shapes()])
    await engine.start()
    return engine


async def write(engine: NumpyEngine, reserved: Reserved, limit: int, how: Sampling) -> list[int]:
    tokens = [await engine.prefill(reserved, how)]
    if limit > 1:
        async for more in engine.decode(reserved, tokens[0], len(reserved.prompt), how, limit - 1):
            tokens += more
    return tokens


async def test_the_engine_writes_what_the_model_alone_does_whoever_else_is_there(model: Model) -> None:
    engine = await running_engine(model)
    try:
        how = Sampling(temperature=0, ignore_end=True)
        prompts = [tokenizer.encode("Once upon a time"[: n % 16] * (n // 16 + 1)) for n in (1, 14, 15, 16, 40, 77)]

        async def one(prompt: list[int]) -> list[int]:
            while (reserved := engine.reserve(len(prompt) + 30, prompt)) is None:
                await asyncio.sleep(0.001)
            try:
                return await write(engine, reserved, 30, how)
            finally:
                engine.free(reserved)

        for _ in range(2):  # the second time from kept prefixes
            written = await asyncio.gather(*map(one, prompts))
            for prompt, tokens in zip(prompts, written, strict=True):
                kv = model.allocate_kv(16)
                first = int(model.prefill(prompt, kv, range(16)).argmax())
                expected = [first]
                while len(expected) < 30:
                    at = len(prompt) + len(expected) - 1
                    expected.append(int(model.decode_step(expected[-1], at, kv, range(16)).argmax()))
                assert tokens == expected
        assert engine.pool.hits > 0
        await until(lambda: engine.pool.free == 64)
    finally:
        await engine.close()


async def test_blocks_come_back_when_the_model_has_let_go(model: Model) -> None:
    engine = await running_engine(model)
    try:
        how = Sampling(temperature=0, ignore_end=True)
        prompt = tokenizer.encode("x" * 900)
        reserved = engine.reserve(len(prompt), prompt)
        assert reserved is not None
        filling = asyncio.ensure_future(engine.prefill(reserved, how))
        await asyncio.sleep(0)
        filling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await filling
        engine.free(reserved)
        engine.free(reserved)
        await until(lambda: engine.pool.free == 64)

        reserved = engine.reserve(600)
        assert reserved is not None
        decoding = engine.decode(reserved, 65, 0, how, 500)
        assert await anext(aiter(decoding))
        assert engine.load().running == 1
        engine.free(reserved)
        await until(lambda: engine.pool.free == 64)
        load = engine.load()
        assert (load.running, load.waiting, load.tokens) == (0, 0, 0)
        assert engine.reserve(64 * BLOCK_TOKENS + 1) is None
    finally:
        await engine.close()


async def test_a_model_that_fails_fails_its_request_alone(model: Model) -> None:
    engine = await running_engine(model)
    try:
        how = Sampling(temperature=0)
        bad = engine.reserve(3, [1, 2, 3])
        assert bad is not None
        bad.prompt = [9999]
        with pytest.raises(ServeError, match="the model failed") as caught:
            await engine.prefill(bad, how)
        assert caught.value.code == "internal_error"
        engine.free(bad)
        good = engine.reserve(20, [1, 2, 3])
        assert good is not None
        assert len(await write(engine, good, 3, how)) == 3
        engine.free(good)
        await until(lambda: engine.pool.free == 64)
    finally:
        await engine.close()


# Reservations. ----------------------------------------------------------------------------------------------


class Pieces:
    """Counts how often what is reserved is freed; stands for units, a placed request and a node."""

    def __init__(self) -> None:
        self.freed = 0
        self.unit: Any = SimpleNamespace(cache=object())
        self.cache_manager = SimpleNamespace(pull_blocks=self.say)
        self.links = {7: object()}

    def __iter__(self) -> Any:
        return iter([self.unit])

    def free(self) -> None:
        self.freed += 1

    def say(self, *_: Any, **__: Any) -> asyncio.Future[None]:
        said = asyncio.get_running_loop().create_future()
        said.set_result(None)
        return said


@pytest.mark.parametrize("how", ["released after the commit", "cancelled after both", "cancelled after the end"])
async def test_what_is_reserved_is_freed_once(how: str) -> None:
    pieces: Any = Pieces()
    reservations = Reservations(pieces, Peer(cluster_id=1, incarnation="1"), pieces, 30.0, 10.0)
    ticket: Any = SimpleNamespace(request_id="r", attempt=1)
    entry = _Entry(("r", 1), pieces, 7)
    reservations._entries[entry.key] = entry
    reservations.hear(7, Word(word="begin", request_id="r", attempt=1))
    taking = asyncio.create_task(reservations.take(ticket))
    await asyncio.sleep(0)
    if how == "cancelled after the end":
        reservations.hear(7, Word(word="ended", request_id="r", attempt=1))
    else:
        reservations.hear(7, Word(word="commit", request_id="r", attempt=1))
        assert reservations.release("r", 1) == 1
    if how.startswith("cancelled"):
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
    else:
        with pytest.raises(ServeError, match="without a commit"):
            await taking
    await reservations.close()
    assert (pieces.freed, reservations.counts()) == (1, dict.fromkeys(STATES, 0))
