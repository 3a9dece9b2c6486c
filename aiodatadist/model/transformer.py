"""A decoder-only transformer in numpy over a paged KV cache that the caller owns.

The model exists to check a KV cache that has travelled: what it writes after a prompt depends on the cached
keys and values of the whole prompt, and it computes them the same way everywhere, to the last bit. For that,
every product runs row by row: numpy's stacked `matmul` makes one BLAS call per token, always of the same
shape, whether the token is one of 500 in a prefill or alone in a decode step. (One call for many tokens would
be faster, but BLAS picks other kernels for other numbers of rows, and they differ in the last bits.) Run BLAS
with one thread, see `one_blas_thread`; on one kind of processor with one build of numpy the results are then
identical between processes, and between prefill and decode.

The cache holds the keys before their rotation; attention rotates them by the positions that the block table
gives them. With rotated keys in the cache, as many servers have it, attention would not notice that two
blocks have changed places: their rows would carry their positions along. Here a misplaced block changes the
text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, resources
from typing import TYPE_CHECKING, BinaryIO, Final, Self, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from . import tokenizer

if TYPE_CHECKING:
    from os import PathLike

Array: TypeAlias = NDArray[np.float32]
KVCache: TypeAlias = Sequence[Array]
"""K, V of layer 0, K, V of layer 1, ...; each float32 `[num_blocks, block_size, kv_heads, head_dim]`."""
BlockTable: TypeAlias = Sequence[int] | NDArray[np.integer]
"""Physical block of each logical block.

Position `p` is row `p % block_size` of block `block_table[p // block_size]`.
"""

TENSORS_PER_LAYER: Final = 2
"""K and V: the `tensor_num_per_layer` to give to the transfer library for a `KVCache`."""


@contextmanager
def one_blas_thread() -> Iterator[bool]:
    """Run the body with one BLAS thread, if that can be arranged in a running process.

    Yields
    ------
    bool
        True if BLAS is limited; False if threadpoolctl is not installed. A process that can set its
        environment before numpy is imported needs neither:
        `OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_NUM_THREADS=1`.
    """
    try:
        threadpoolctl = import_module("threadpoolctl")  # an extra: `aiodatadist[demo]`
    except ImportError:
        yield False
        return
    with threadpoolctl.threadpool_limits(limits=1, user_api="blas"):
        yield True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of the transformer; the defaults are the shape of the weights that ship.

    Attributes
    ----------
    layers, d_model, heads, kv_heads, head_dim, ffn, vocab
        Sizes in elements; `heads` is a multiple of `kv_heads`.
    max_positions
        Longest text in tokens. The shipped weights were trained on up to 1024 tokens and write nonsense
        beyond.
    rope_theta
        Base of the rotary frequencies.
    norm_eps
        Added to the mean square in RMSNorm.
    end_tokens
        Tokens that end a text; greedy generation stops after the first of them.
    """

    layers: int = 4
    d_model: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 352
    vocab: int = tokenizer.VOCAB_SIZE
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    end_tokens: tuple[int, ...] = (tokenizer.EOS,)

    def rotary_tables(self) -> tuple[Array, Array]:
        """Return cosines and sines of the rotary angles, each float32 `[max_positions, head_dim / 2]`."""
        frequencies = self.rope_theta ** (-np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)
        angles = np.arange(self.max_positions, dtype=np.float64)[:, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer, float32; matrices are `[inputs, outputs]`."""

    attention_norm: Array
    wqkv: Array
    wo: Array
    ffn_norm: Array
    w13: Array
    w2: Array


def _rows_times(x: Array, matrix: Array) -> Array:
    """Return `x @ matrix` for `x` `[rows, inputs]`, one BLAS call per row (see the top of the file)."""
    return cast("Array", np.matmul(x[:, None, :], matrix)[:, 0, :])


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    mean_square = np.matmul(x[:, None, :], x[:, :, None])[:, :, 0] / np.float32(x.shape[1])
    return cast("Array", x / np.sqrt(mean_square + np.float32(eps)) * weight)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate `x` `[rows, heads, head_dim]` by angles of `cos` and `sin`, each `[rows, head_dim / 2]`."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    c, s = cos[:, None, :], sin[:, None, :]
    return np.concatenate((a * c - b * s, b * c + a * s), axis=-1)


class Model:
    """The transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embedding.

    A model holds weights only and may be shared between threads. All state is in the KV cache, whose arrays
    the caller owns and passes in; the methods write the rows of the tokens they are given and read the rows
    before them.

    Parameters
    ----------
    config
        The shape.
    weights
        Arrays by the names that `examples/train_demo_model.py` writes; any float dtype, computed with as
        float32. Arrays that are float32 already are kept, not copied.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, NDArray[np.floating]]) -> None:
        def take(name: str, *shape: int) -> Array:
            array = np.asarray(weights[name], dtype=np.float32)
            if array.shape != shape:
                raise ValueError(f"weight {name} has shape {array.shape}, the configuration says {shape}")
            return array

        c = config
        self.config = config
        self._layers = [
            _Layer(
                attention_norm=take(f"blocks.{i}.attention_norm", c.d_model),
                wqkv=take(f"blocks.{i}.wqkv", c.d_model, (c.heads + 2 * c.kv_heads) * c.head_dim),
                wo=take(f"blocks.{i}.wo", c.heads * c.head_dim, c.d_model),
                ffn_norm=take(f"blocks.{i}.ffn_norm", c.d_model),
                w13=take(f"blocks.{i}.w13", c.d_model, 2 * c.ffn),
                w2=take(f"blocks.{i}.w2", c.ffn, c.d_model),
            )
            for i in range(c.layers)
        ]
        self._embedding = take("embedding", c.vocab, c.d_model)
        self._unembedding = self._embedding.T
        self._final_norm = take("final_norm", c.d_model)
        self._cos, self._sin = c.rotary_tables()

    @classmethod
    def load(cls, path: str | PathLike[str] | None = None) -> Self:
        """Load the weights that ship with the package, or those in the .npz at `path`."""
        if path is not None:
            with open(path, "rb") as file:
                return cls._read(file)
        with resources.files(__package__).joinpath("weights.npz").open("rb") as file:
            return cls._read(cast("BinaryIO", file))

    @classmethod
    def _read(cls, file: BinaryIO) -> Self:
        with np.load(file, allow_pickle=False) as stored:
            return cls(ModelConfig(**json.loads(stored["config"].item())), stored)

    def kv_shapes(self, num_blocks: int, block_size: int = 16) -> list[tuple[int, int, int, int]]:
        """Return the shapes of a `KVCache`'s float32 arrays, in its order: K, V of layer 0 first."""
        shape = (num_blocks, block_size, self.config.kv_heads, self.config.head_dim)
        return [shape] * (TENSORS_PER_LAYER * self.config.layers)

    def allocate_kv(self, num_blocks: int, block_size: int = 16) -> list[Array]:
        """Return a `KVCache` of zeros in ordinary memory, for runs that transfer nothing."""
        return [np.zeros(shape, dtype=np.float32) for shape in self.kv_shapes(num_blocks, block_size)]

    def prefill(
        self,
        tokens: Sequence[int],
        kv: KVCache,
        block_table: BlockTable,
        *,
        start: int = 0,
        on_layer: Callable[[int], None] | None = None,
    ) -> Array:
        """Compute `tokens`: write their keys and values into the cache and return the last one's logits.

        Parameters
        ----------
        tokens
            At least one token id.
        kv
            The cache. Rows before position `start` are read; those of `tokens` are written; no other row is
            touched.
        block_table
            Must cover all positions up to the last of `tokens`.
        start
            Position of the first token. A prompt computed in two pieces gives the same bits as in one.
        on_layer
            Called with each layer's index, in order, as soon as the keys and values of all `tokens` are
            written in that layer, while its attention and all deeper layers are still to be computed. A layer
            may be sent from here.

        Returns
        -------
        logits
            float32 `[vocab]`, for the token after the last one.

        Raises
        ------
        ValueError
            A token, a position or the cache does not fit the model or the block table.
        """
        c = self.config
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.ndim != 1 or ids.size == 0:
            raise ValueError("prefill needs a flat sequence of at least one token")
        if ids.min() < 0 or ids.max() >= c.vocab:
            raise ValueError(f"tokens are 0..{c.vocab - 1}")
        end = start + ids.size
        if start < 0 or end > c.max_positions:
            raise ValueError(f"positions {start}..{end - 1} are outside 0..{c.max_positions - 1}")
        block_size = self._check_cache(kv)
        table = np.asarray(block_table, dtype=np.intp)
        needed = -(-end // block_size)
        used = table[:needed]
        if used.size < needed:
            raise ValueError(f"{end} positions need {needed} blocks, the block table has {used.size}")
        if used.min() < 0 or used.max() >= kv[0].shape[0]:
            raise ValueError(f"block table names a block outside 0..{kv[0].shape[0] - 1}")

        positions = np.arange(start, end)

        def attend(q: Array, of: NDArray[np.integer], key_cache: Array, value_cache: Array) -> Array:
            return self._attend(q, of, key_cache, value_cache, used)

        # Below the last layer's keys and values only the last row has a reader: its logits.
        logits = self._forward(ids, positions, kv, used[positions // block_size], attend, slice(-1, None), on_layer)
        return cast("Array", logits[0])

    def decode_batch(
        self, tokens: Sequence[int], positions: Sequence[int], kv: KVCache, block_tables: Sequence[BlockTable]
    ) -> Array:
        """Compute one token of each of several texts: `decode_step` for all of them at once, to the same bits.

        Nothing is padded: a row is computed by the same calls, of the same shapes, whoever else is in the batch.

        Parameters
        ----------
        tokens, positions, block_tables
            Token, its position and block table of each text; at least one. No two texts write the same block.
        kv
            The cache they share.

        Returns
        -------
        logits
            float32 `[texts, vocab]`.

        Raises
        ------
        ValueError
            A token, a position or the cache does not fit the model or its block table.
        """
        c = self.config
        ids, at = np.asarray(tokens, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        if ids.ndim != 1 or ids.size == 0 or not ids.size == at.size == len(block_tables):
            raise ValueError("a batch needs one token, position and block table for each text, and at least one text")
        if ids.min() < 0 or ids.max() >= c.vocab:
            raise ValueError(f"tokens are 0..{c.vocab - 1}")
        if at.min() < 0 or at.max() >= c.max_positions:
            raise ValueError(f"positions are 0..{c.max_positions - 1}")
        block_size = self._check_cache(kv)
        tables = [
            np.asarray(table, dtype=np.intp)[: position // block_size + 1]
            for table, position in zip(block_tables, at.tolist(), strict=True)
        ]
        for table, position in zip(tables, at.tolist(), strict=True):
            if table.size <= position // block_size:
                raise ValueError(f"position {position} is beyond its block table")
            if table.min() < 0 or table.max() >= kv[0].shape[0]:
                raise ValueError(f"block table names a block outside 0..{kv[0].shape[0] - 1}")

        def attend(q: Array, of: NDArray[np.integer], key_cache: Array, value_cache: Array) -> Array:
            return np.concatenate(
                [
                    self._attend(q[row : row + 1], of[row : row + 1], key_cache, value_cache, table)
                    for row, table in enumerate(tables)
                ]
            )

        blocks = np.array([table[-1] for table in tables], dtype=np.intp)
        return self._forward(ids, at, kv, blocks, attend, slice(None), None)

    def _forward(
        self,
        ids: NDArray[np.integer],
        positions: NDArray[np.integer],
        kv: KVCache,
        blocks: NDArray[np.intp],
        attend: Callable[[Array, NDArray[np.integer], Array, Array], Array],
        readers: slice,
        on_layer: Callable[[int], None] | None,
    ) -> Array:
        """Run all layers over rows of tokens; return the logits of the rows `readers`."""
        c = self.config
        rows = positions % kv[0].shape[1]
        cos, sin = self._cos[positions], self._sin[positions]
        q_size, kv_size = c.heads * c.head_dim, c.kv_heads * c.head_dim
        x = self._embedding[ids]
        # A damaged cache may hold infinities and NaN: they must flow through to wrong tokens, quietly.
        with np.errstate(all="ignore"):
            for index, layer in enumerate(self._layers):
                key_cache, value_cache = kv[2 * index], kv[2 * index + 1]
                h = _rows_times(_rms_norm(x, layer.attention_norm, c.norm_eps), layer.wqkv)
                q = _rotate(h[:, :q_size].reshape(-1, c.heads, c.head_dim), cos, sin)
                k = h[:, q_size : q_size + kv_size].reshape(-1, c.kv_heads, c.head_dim)
                key_cache[blocks, rows] = k
                value_cache[blocks, rows] = h[:, q_size + kv_size :].reshape(-1, c.kv_heads, c.head_dim)
                if on_layer is not None:
                    on_layer(index)
                if index == c.layers - 1:
                    x, q, positions = x[readers], q[readers], positions[readers]
                x = x + _rows_times(attend(q, positions, key_cache, value_cache), layer.wo)
                h = _rows_times(_rms_norm(x, layer.ffn_norm, c.norm_eps), layer.w13)
                gate, up = h[:, : c.ffn], h[:, c.ffn :]
                gate /= np.float32(1) + np.exp(-gate)
                x = x + _rows_times(gate * up, layer.w2)
            return _rows_times(_rms_norm(x, self._final_norm, c.norm_eps), self._unembedding)

    def fingerprint(self) -> str:
        """Return a digest of configuration and weights, in hexadecimal: equal for models that write the same."""
        digest = hashlib.blake2b(repr(self.config).encode(), digest_size=16)
        arrays = [self._embedding, self._final_norm]
        for layer in self._layers:
            arrays += [
                layer.attention_norm, layer.wqkv, layer.wo, layer.ffn_norm, layer.w13, layer.w2,
            ]  # fmt: skip
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def decode_step(self, token: int, position: int, kv: KVCache, block_table: BlockTable) -> Array:
        """Compute one token at `position`: write its row and return its logits, float32 `[vocab]`."""
        return self.prefill([token], kv, block_table, start=position)

    def decode_greedy(
        self, first_token: int, position: int, kv: KVCache, block_table: BlockTable, max_new_tokens: int
    ) -> list[int]:
        """Go on greedily from a filled cache: the decode node's half of the work.

        Parameters
        ----------
        first_token
            The token at `position`, which the prefill's logits chose; its row is not in the cache yet.
        position
            The prompt's length in tokens; the cache holds the rows before it.
        kv, block_table
            The cache; the table must cover `position + max_new_tokens - 1` positions.
        max_new_tokens
            Most tokens to return, at least 1.

        Returns
        -------
        tokens
            `first_token` and the tokens after it, at most `max_new_tokens`; ends early with one of the
            configuration's `end_tokens`.
        """
        if max_new_tokens < 1:
            raise ValueError("max_new_tokens is at least 1")
        new = [first_token]
        while len(new) < max_new_tokens and new[-1] not in self.config.end_tokens:
            logits = self.decode_step(new[-1], position + len(new) - 1, kv, block_table)
            new.append(int(np.argmax(logits)))
        return new

    def generate_greedy(
        self, tokens: Sequence[int], kv: KVCache, block_table: BlockTable, max_new_tokens: int
    ) -> list[int]:
        """Prefill `tokens` and go on greedily in the same cache: the single-process reference.

        Returns
        -------
        tokens
            The new tokens only, as `decode_greedy` returns them.
        """
        first = int(np.argmax(self.prefill(tokens, kv, block_table)))
        return self.decode_greedy(first, len(tokens), kv, block_table, max_new_tokens)

    def _attend(
        self,
        q: Array,
        positions: NDArray[np.integer],
        key_cache: Array,
        value_cache: Array,
        used: NDArray[np.intp],
    ) -> Array:
        """Return the attention of each row, `[rows, heads * head_dim]`, to all positions up to its own.

        `q` is `[rows, heads, head_dim]`. The pages are gathered once; then row by row, because the shape of a
        product must depend on the row's position alone.
        """
        c = self.config
        end = int(positions[-1]) + 1
        keys, values = (cache[used].reshape(-1, c.kv_heads, c.head_dim)[:end] for cache in (key_cache, value_cache))
        keys = _rotate(keys, self._cos[:end], self._sin[:end])
        # [kv_heads, positions, head_dim]: one contiguous matrix for each head, wherever the pages lie.
        keys, values = (np.ascontiguousarray(array.transpose(1, 0, 2)) for array in (keys, values))
        keys_t = keys.transpose(0, 2, 1)
        scaled = (q * np.float32(c.head_dim**-0.5)).reshape(-1, c.kv_heads, c.heads // c.kv_heads, c.head_dim)
        out = np.empty_like(scaled)
        for row, position in enumerate(positions.tolist()):
            scores = np.matmul(scaled[row], keys_t[:, :, : position + 1])
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            total = scores.sum(axis=-1, keepdims=True)
            np.matmul(scores, values[:, : position + 1], out=out[row])
            out[row] /= total
        return out.reshape(-1, c.heads * c.head_dim)

    def _check_cache(self, kv: KVCache) -> int:
        """Return the block size of `kv`, or raise ValueError if it is not a cache of this model."""
        c = self.config
        if len(kv) != TENSORS_PER_LAYER * c.layers:
            raise ValueError(f"the cache has {len(kv)} arrays, {c.layers} layers need {2 * c.layers}")
        shape = kv[0].shape
        if len(shape) != 4 or shape[2:] != (c.kv_heads, c.head_dim) or shape[1] < 1:
            wanted = f"[num_blocks, block_size, {c.kv_heads}, {c.head_dim}]"
            raise ValueError(f"cache arrays are {wanted}, not {shape}")
        for index, array in enumerate(kv):
            if array.shape != shape or array.dtype != np.float32:
                raise ValueError(f"cache array {index} is {array.dtype} {array.shape}, not float32 {shape}")
        return int(shape[1])
