"""Reads a Llama-like model out of a GGUF file, in the names and layouts of the transformer here.

Only this module knows GGUF. It needs the package gguf, an extra: `aiodatadist[demo]`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from aiodatadist.errors import ModelError

from .transformer import Array, Model, ModelConfig

if TYPE_CHECKING:
    from pathlib import Path

_NORMAL, _CONTROL = 1, 3  # of the file's token types


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a byte-pair tokenizer is made of.

    Attributes
    ----------
    tokens : list of str
        The text of each token id, in the byte-level alphabet of GPT-2.
    merges : list of pair of str
        In the order of their rank.
    control : list of str
        Tokens that no text contains, such as those around the turns of a chat.
    splitting : str
        The file's name for the way in which texts are split before the merges.
    """

    tokens: list[str]
    merges: list[tuple[str, str]]
    control: list[str]
    splitting: str


def read_vocabulary(path: Path) -> Vocabulary:
    """Read the tokenizer's part of a GGUF file.

    Raises
    ------
    ModelError
        The file cannot be read, or its tokenizer is no byte-level BPE.
    """
    file = _File(path)
    kind = file.value("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise file.refused(f"its tokenizer is {kind!r}, not the byte-level BPE 'gpt2'")
    tokens: list[str] = file.value("tokenizer.ggml.tokens", list)
    types: list[int] = file.value("tokenizer.ggml.token_type", list)
    if len(types) != len(tokens) or not set(types) <= {_NORMAL, _CONTROL}:
        raise file.refused("its tokens are not all normal or control tokens")
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges", list)]
    if not all(len(merge) == 2 for merge in merges):
        raise file.refused("it has a merge of something else than two tokens")
    return Vocabulary(
        tokens=tokens,
        merges=cast("list[tuple[str, str]]", merges),
        control=[token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL],
        splitting=file.value("tokenizer.ggml.pre", str),
    )


def read_model(path: Path, end_tokens: tuple[str, ...]) -> Model:
    """Read configuration and weights of a GGUF file; quantised weights become float32.

    Parameters
    ----------
    path : Path
        The file.
    end_tokens : tuple of str
        Tokens that end a text.

    Raises
    ------
    ModelError
        The file cannot be read, or holds anything that the transformer does not compute: no tensor and no setting
        of the architecture is passed over.
    """
    file = _File(path)
    config = _read_config(file, end_tokens)
    weights = {
        "embedding": file.tensor("token_embd.weight", config.vocab, config.d_model),
        "final_norm": file.tensor("output_norm.weight", config.d_model),
    }
    for i in range(config.layers):
        weights.update(_read_layer(file, config, i))
    if left := file.unread():
        raise file.refused(f"the transformer has no use for its tensor {left[0]!r}")
    return Model(config, weights)


def _read_config(file: _File, end_tokens: tuple[str, ...]) -> ModelConfig:
    architecture = file.value("general.architecture", str)
    if architecture != "llama":
        raise file.refused(f"its architecture is {architecture!r}, not 'llama'")
    known = {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "vocab_size",
    }
    # Any other setting, such as a scaling of the positions, would change the results without a word.
    if strange := sorted(file.keys("llama.") - known):
        raise file.refused(f"the transformer does not know its setting {strange[0]!r}")
    tokens = file.value("tokenizer.ggml.tokens", list)
    if absent := sorted(set(end_tokens) - set(tokens)):
        raise file.refused(f"it has no token {absent[0]!r}")
    d_model, heads = file.value("llama.embedding_length", int), file.value("llama.attention.head_count", int)
    kv_heads = file.value("llama.attention.head_count_kv", int)
    head_dim = file.value("llama.rope.dimension_count", int)
    if heads < 1 or kv_heads < 1 or heads * head_dim != d_model or heads % kv_heads or head_dim % 2:
        raise file.refused(f"{heads} heads of {head_dim} over {kv_heads} do not make up a width of {d_model}")
    return ModelConfig(
        layers=file.value("llama.block_count", int),
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=file.value("llama.feed_forward_length", int),
        vocab=len(tokens),
        max_positions=file.value("llama.context_length", int),
        rope_theta=file.value("llama.rope.freq_base", float),
        norm_eps=file.value("llama.attention.layer_norm_rms_epsilon", float),
        end_tokens=tuple(tokens.index(token) for token in end_tokens),
    )


def _read_layer(file: _File, c: ModelConfig, i: int) -> dict[str, Array]:
    """Return the weights of a layer. The file has matrices as [outputs, inputs], the transformer the other way."""
    q_size, kv_size = c.heads * c.head_dim, c.kv_heads * c.head_dim
    q = _halves(file.tensor(f"blk.{i}.attn_q.weight", q_size, c.d_model), c.heads)
    k = _halves(file.tensor(f"blk.{i}.attn_k.weight", kv_size, c.d_model), c.kv_heads)
    v = file.tensor(f"blk.{i}.attn_v.weight", kv_size, c.d_model)
    gate = file.tensor(f"blk.{i}.ffn_gate.weight", c.ffn, c.d_model)
    up = file.tensor(f"blk.{i}.ffn_up.weight", c.ffn, c.d_model)
    return {
        f"blocks.{i}.attention_norm": file.tensor(f"blk.{i}.attn_norm.weight", c.d_model),
        f"blocks.{i}.wqkv": np.concatenate((q, k, v)).T,
        f"blocks.{i}.wo": file.tensor(f"blk.{i}.attn_output.weight", c.d_model, q_size).T,
        f"blocks.{i}.ffn_norm": file.tensor(f"blk.{i}.ffn_norm.weight", c.d_model),
        f"blocks.{i}.w13": np.concatenate((gate, up)).T,
        f"blocks.{i}.w2": file.tensor(f"blk.{i}.ffn_down.weight", c.d_model, c.ffn).T,
    }


def _halves(matrix: Array, heads: int) -> Array:
    """Undo the order in which GGUF files of this architecture have the rows of Q and K.

    There the two values that are rotated together are neighbours. Here, as in the models before they become GGUF,
    they are half a head apart.
    """
    rows, columns = matrix.shape
    return matrix.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


class _File:
    """A GGUF file. Whatever is wrong with it becomes a ModelError that names it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._gguf: Any = import_module("gguf")
        try:
            reader = self._gguf.GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError, UnicodeError, OverflowError) as why:
            raise self.refused(f"{why} ({type(why).__name__})") from why
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def refused(self, reason: str) -> ModelError:
        """Return the error to raise."""
        return ModelError(f"cannot use the model file {self._path}: {reason}")

    def keys(self, prefix: str) -> set[str]:
        """Return the names of all settings that begin so, without the prefix."""
        return {key.removeprefix(prefix) for key in self._fields if key.startswith(prefix)}

    def value(self, key: str, kind: Callable[..., Any]) -> Any:
        """Return a setting of that type."""
        field = self._fields.get(key)
        value = None if field is None else field.contents()
        if type(value) is not kind:
            raise self.refused(f"its setting {key!r} is {value!r:.40}, not of type {getattr(kind, '__name__', kind)}")
        return value

    def tensor(self, name: str, *shape: int) -> Array:
        """Return a tensor as float32, and count it as read."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise self.refused(f"it has no tensor {name!r}")
        found = tuple(reversed(tensor.shape.tolist()))
        if found != shape:
            raise self.refused(f"its tensor {name!r} has shape {found}, its settings say {shape}")
        try:
            array = self._gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise self.refused(f"its tensor {name!r} is {tensor.tensor_type.name}, which gguf cannot read") from None
        # A copy of what lies in the file: nothing here depends on the file once it is read.
        return np.array(array, dtype=np.float32).reshape(shape)

    def unread(self) -> list[str]:
        """Return the names of the tensors that nobody has read."""
        return list(self._tensors)
