"""The demo's transformer: paging, reproducibility to the last bit, and that damage to its cache shows."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiodatadist.model import (
    BlockDigest,
    Model,
    ModelConfig,
    block_digests,
    differing_blocks,
    draw_prompt,
    one_blas_thread,
    tokenizer,
)
from aiodatadist.model import prompts as prompts_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BLOCK_SIZE = 16
NUM_BLOCKS = 48
Cache = list[np.ndarray]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with one_blas_thread():
        yield Model.load()


def prompt_tokens(seed: int, length: int = 300) -> list[int]:
    return tokenizer.encode(draw_prompt(seed, length).text)


def shuffled_table(seed: int) -> list[int]:
    return random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)


def garbage_cache(model: Model) -> Cache:
    """Return a cache whose every row is NaN, so that a read of a row that was never written shows."""
    return [np.full(shape, np.nan, dtype=np.float32) for shape in model.kv_shapes(NUM_BLOCKS, BLOCK_SIZE)]


def layer_of(kv: Cache, layer: int) -> Cache:
    return kv[2 * layer : 2 * layer + 2]


def transfer(source: Cache, target: Cache, src_table: list[int], dst_table: list[int], count: int) -> None:
    """Move `count` blocks the way the library does."""
    for src, dst in zip(source, target, strict=True):
        dst[dst_table[:count]] = src[src_table[:count]]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class TestReproducible:
    def test_paged_equals_contiguous(self, model: Model) -> None:
        tokens = prompt_tokens(1)
        contiguous = [np.full(shape, np.nan, np.float32) for shape in model.kv_shapes(1, len(tokens))]
        paged = garbage_cache(model)
        expected = model.prefill(tokens, contiguous, [0])
        assert same_bits(model.prefill(tokens, paged, shuffled_table(1)), expected)

    def test_block_table_permutation_gives_identical_logits(self, model: Model) -> None:
        tokens = prompt_tokens(2)
        results = set()
        for seed in range(3):
            kv, table = garbage_cache(model), shuffled_table(seed)
            logits = model.prefill(tokens, kv, table)
            step = model.decode_step(int(logits.argmax()), len(tokens), kv, table)
            results.add((logits.tobytes(), step.tobytes(), tuple(block_digests(kv, table, len(tokens) + 1))))
        assert len(results) == 1

    def test_decode_steps_equal_prefill(self, model: Model) -> None:
        tokens = prompt_tokens(3, 200)
        whole, pieces = garbage_cache(model), garbage_cache(model)
        table = shuffled_table(3)
        expected = model.prefill(tokens, whole, table)
        model.prefill(tokens[:90], pieces, table)
        model.prefill(tokens[90:150], pieces, table, start=90)
        for position in range(150, len(tokens) - 1):
            model.decode_step(tokens[position], position, pieces, table)
        logits = model.decode_step(tokens[-1], len(tokens) - 1, pieces, table)
        assert same_bits(logits, expected)
        assert block_digests(pieces, table, len(tokens)) == block_digests(whole, table, len(tokens))

    def test_a_batch_gives_each_text_the_bits_it_has_alone(self, model: Model) -> None:
        lengths = (1, 15, 16, 17, 60, 111)
        texts = [prompt_tokens(20 + index, 200)[:length] for index, length in enumerate(lengths)]
        kv, table = garbage_cache(model), shuffled_table(7)
        tables = []
        for tokens in texts:
            needed = len(tokens) // BLOCK_SIZE + 1
            tables.append(table[:needed])
            table = table[needed:]
            model.prefill(tokens, kv, tables[-1])
        alone = []
        for tokens, own in zip(texts, tables, strict=True):
            alone.append(model.decode_step(65, len(tokens), [each.copy() for each in kv], own))
        for size in range(1, len(texts) + 1):
            for chosen in (range(size), range(len(texts) - size, len(texts))):
                logits = model.decode_batch([65] * size, [lengths[i] for i in chosen], kv, [tables[i] for i in chosen])
                assert all(same_bits(row, alone[i]) for row, i in zip(logits, chosen, strict=True))

    def test_a_batch_refuses_what_fits_no_table(self, model: Model) -> None:
        kv = garbage_cache(model)
        for tokens, positions, tables in (
            ([], [], []),
            ([1, 2], [0], [[0]]),
            ([1], [16], [[0]]),
            ([1], [-1], [[0]]),
            ([9999], [0], [[0]]),
            ([1], [0], [[NUM_BLOCKS]]),
        ):
            with pytest.raises(ValueError):
                model.decode_batch(tokens, positions, kv, tables)

    def test_split_run_equals_reference(self, model: Model) -> None:
        tokens = prompt_tokens(4)
        reference_kv, reference_table = garbage_cache(model), list(range(NUM_BLOCKS))
        reference = model.generate_greedy(tokens, reference_kv, reference_table, 40)

        prefill_kv, decode_kv = garbage_cache(model), garbage_cache(model)
        src_table, dst_table = shuffled_table(4), shuffled_table(5)
        first = int(model.prefill(tokens, prefill_kv, src_table).argmax())
        transfer(prefill_kv, decode_kv, src_table, dst_table, -(-len(tokens) // BLOCK_SIZE))
        assert model.decode_greedy(first, len(tokens), decode_kv, dst_table, 40) == reference
        length = len(tokens) + len(reference) - 1
        assert block_digests(decode_kv, dst_table, length) == block_digests(reference_kv, reference_table, length)

    def test_other_process_computes_the_same_bits(self, model: Model) -> None:
        tokens, table = prompt_tokens(6, 200), shuffled_table(6)
        kv = garbage_cache(model)
        logits = model.prefill(tokens, kv, table)
        program = (
            "from aiodatadist.model import Model, block_digests, draw_prompt, tokenizer\n"
            "model = Model.load()\n"
            "kv = model.allocate_kv(48)\n"
            "tokens = tokenizer.encode(draw_prompt(6, 200).text)\n"
            "print(model.prefill(tokens, kv, range(48)).tobytes().hex())\n"
            "print(*(d.hexdigest for d in block_digests(kv, range(48), len(tokens))))\n"
        )
        threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        path = os.pathsep.join(entry for entry in sys.path if entry)
        answer = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **threads, "PYTHONPATH": path},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.splitlines()
        assert answer[0] == logits.tobytes().hex()
        assert answer[1].split() == [digest.hexdigest for digest in block_digests(kv, table, len(tokens))]

    def test_only_own_rows_are_written(self, model: Model) -> None:
        tokens, table = prompt_tokens(7, 200), shuffled_table(7)
        kv = garbage_cache(model)
        model.prefill(tokens, kv, table)
        written = np.zeros((NUM_BLOCKS, BLOCK_SIZE), dtype=bool)
        for position in range(len(tokens)):
            written[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
        for tensor in kv:
            assert np.array_equal(~np.isnan(tensor).any(axis=(2, 3)), written)


class TestLayers:
    def test_layer_is_complete_when_announced(self, model: Model) -> None:
        tokens, table = prompt_tokens(8, 200), shuffled_table(8)
        kv, moved = garbage_cache(model), garbage_cache(model)
        seen: list[int] = []

        def on_layer(layer: int) -> None:
            seen.append(layer)
            transfer(layer_of(kv, layer), layer_of(moved, layer), table, table, NUM_BLOCKS)
            assert all(np.isnan(tensor).all() for tensor in kv[2 * layer + 2 :])

        model.prefill(tokens, kv, table, on_layer=on_layer)
        assert seen == list(range(model.config.layers))
        assert block_digests(moved, table, len(tokens)) == block_digests(kv, table, len(tokens))


def flip_byte(kv: Cache, table: list[int]) -> None:
    kv[3].view(np.uint8)[table[5], 2, 1, 7] ^= 0x40  # one bit of one value of V in layer 1


def spoil_byte(kv: Cache, table: list[int]) -> None:
    kv[3].view(np.uint8)[table[5], 2, 1, 4 * 9 + 3] = 0x7E  # the exponent: the value becomes some 1e38


def swap_blocks(kv: Cache, table: list[int]) -> None:
    for tensor in kv:
        tensor[[table[3], table[6]]] = tensor[[table[6], table[3]]]


def drop_layer(kv: Cache, table: list[int]) -> None:
    for tensor in kv[4:6]:
        tensor[table] = 0.0


def zero_block(kv: Cache, table: list[int]) -> None:
    for tensor in kv:
        tensor[table[3]] = 0.0


BLOCKS = -(-301 // BLOCK_SIZE)
LAYERS = ModelConfig().layers


class TestDamage:
    @pytest.mark.parametrize(
        ("damage", "where"),
        [
            (flip_byte, [(1, 5)]),
            (spoil_byte, [(1, 5)]),
            (swap_blocks, [(layer, block) for layer in range(LAYERS) for block in (3, 6)]),
            (drop_layer, [(2, block) for block in range(BLOCKS)]),
            (zero_block, [(layer, 3) for layer in range(LAYERS)]),
        ],
    )
    def test_digests_name_the_damaged_blocks(
        self, model: Model, damage: Callable[[Cache, list[int]], None], where: list[tuple[int, int]]
    ) -> None:
        tokens, table = prompt_tokens(9), shuffled_table(9)
        kv = garbage_cache(model)
        model.prefill(tokens, kv, table)
        before = block_digests(kv, table, len(tokens))
        assert len(before) == LAYERS * BLOCKS
        assert differing_blocks(before, before) == []
        damage(kv, table)
        assert differing_blocks(before, block_digests(kv, table, len(tokens))) == where

    # The model finds some entries again in spite of swapped blocks: there the digests are the proof.
    @pytest.mark.parametrize(("damage", "least"), [(spoil_byte, 3), (swap_blocks, 1), (drop_layer, 3), (zero_block, 3)])
    def test_prompts_continue_differently(
        self, model: Model, damage: Callable[[Cache, list[int]], None], least: int
    ) -> None:
        changed = 0
        for seed in range(20, 25):
            tokens, table = prompt_tokens(seed), shuffled_table(seed)
            kv = garbage_cache(model)
            first = int(model.prefill(tokens, kv, table).argmax())
            intact, damaged = [tensor.copy() for tensor in kv], kv
            damage(damaged, table)
            right = model.decode_greedy(first, len(tokens), intact, table, 120)
            changed += model.decode_greedy(first, len(tokens), damaged, table, 120) != right
        assert changed >= least

    def test_rows_beyond_the_length_are_not_digested(self, model: Model) -> None:
        tokens, table = prompt_tokens(10), shuffled_table(10)
        kv = garbage_cache(model)
        model.prefill(tokens, kv, table)
        before = block_digests(kv, table, len(tokens))
        kv[0][table[len(tokens) // BLOCK_SIZE], len(tokens) % BLOCK_SIZE :] = 7.0
        assert block_digests(kv, table, len(tokens)) == before

    def test_missing_digest_differs(self) -> None:
        both = [BlockDigest(0, 0, "a"), BlockDigest(0, 1, "b")]
        assert differing_blocks(both, both[:1]) == [(0, 1)]


class TestText:
    def test_continuation_tells_the_prompt_again(self, model: Model) -> None:
        found = wanted = 0
        for seed in range(30, 36):
            prompt = draw_prompt(seed, 300)
            kv, table = garbage_cache(model), shuffled_table(seed)
            written = tokenizer.decode(model.generate_greedy(tokenizer.encode(prompt.text), kv, table, 120))
            words = prompt.continuation[:120].split()
            wanted += len(words)
            found += sum(word in written for word in words)
        assert found / wanted > 0.6

    def test_generation_ends_with_eos(self, model: Model) -> None:
        kv = garbage_cache(model)
        assert model.decode_greedy(tokenizer.EOS, 0, kv, shuffled_table(0), 5) == [tokenizer.EOS]

    def test_tokens(self) -> None:
        assert tokenizer.encode("Aé") == [tokenizer.BOS, 65, 0xC3, 0xA9]
        assert tokenizer.decode([*tokenizer.encode("Aé"), tokenizer.EOS]) == "Aé"
        assert tokenizer.decode([0xC3]) == "\ufffd"


class TestPrompts:
    def test_exact_length_seeded_and_fresh(self) -> None:
        for length in (prompts_module.MIN_LENGTH, 161, 250, 333, 512, 900):
            drawn = [draw_prompt(seed, length) for seed in range(20)]
            assert all(len(prompt.text.encode()) == length for prompt in drawn)
            assert len({prompt.text for prompt in drawn}) == 20
            assert drawn[3] == draw_prompt(3, length)

    def test_continuation_uses_only_what_was_told(self) -> None:
        prompt = draw_prompt(1, 400)
        for sentence in prompt.continuation.removesuffix(prompts_module.END).removesuffix(".").split(". "):
            assert f"{sentence}." in prompt.text

    def test_too_short_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 96"):
            draw_prompt(1, 20)


class TestWrongInput:
    def test_config_matches_the_weights(self, model: Model) -> None:
        assert model.config == ModelConfig()
        assert model.kv_shapes(5, 8) == [(5, 8, 2, 32)] * 8
        assert [tensor.shape for tensor in model.allocate_kv(5, 8)] == model.kv_shapes(5, 8)

    def test_refused(self, model: Model) -> None:
        kv = model.allocate_kv(2)
        for tokens, table, start, message in (
            ([], [0], 0, "at least one token"),
            ([258], [0], 0, "tokens are"),
            ([-1], [0], 0, "tokens are"),
            ([1] * 17, [0], 0, "need 2 blocks"),
            ([1], [0], 16, "need 2 blocks"),
            ([1], [2], 0, "outside 0..1"),
            ([1], [-1], 0, "outside 0..1"),
            ([1], [0], -1, "positions"),
            ([1], [0], 2048, "positions"),
        ):
            with pytest.raises(ValueError, match=message):
                model.prefill(tokens, kv, table, start=start)
        with pytest.raises(ValueError, match="need 8"):
            model.prefill([1], kv[:-1], [0])
        with pytest.raises(ValueError, match="float64"):
            model.prefill([1], [*kv[:-1], kv[-1].astype(np.float64)], [0])
        with pytest.raises(ValueError, match="cache arrays are"):
            model.prefill([1], [tensor[:, :, :1] for tensor in kv], [0])
        with pytest.raises(ValueError, match="at least 1"):
            model.decode_greedy(1, 0, kv, [0], 0)
        with pytest.raises(ValueError, match="need 2 blocks"):
            block_digests(kv, [0], 17)

    def test_weights_must_fit_the_configuration(self, tmp_path: Path) -> None:
        config = np.array('{"layers": 0, "d_model": 64}')
        np.savez(tmp_path / "w.npz", config=config, embedding=np.zeros((258, 128), np.float16))
        with pytest.raises(ValueError, match=r"embedding has shape \(258, 128\)"):
            Model.load(tmp_path / "w.npz")
