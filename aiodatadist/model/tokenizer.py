"""Byte-level tokens: the text's UTF-8 bytes are the tokens, plus two specials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BOS: Final = 256
"""Begins every text, so that position 0 is the same for all prompts."""

EOS: Final = 257
"""Ends a text; greedy generation stops after it."""

VOCAB_SIZE: Final = 258


def encode(text: str) -> list[int]:
    """Return the tokens of a text that begins here: `BOS`, then its UTF-8 bytes."""
    return [BOS, *text.encode("utf-8")]


def encode_text(text: str) -> list[int]:
    """Return the tokens of a text to go on with: the model that ships does nothing else."""
    return encode(text)


def encode_chat(turns: Sequence[tuple[str, str]]) -> list[int]:
    """Return the tokens of a chat: the texts of its turns, a line each. The model that ships knows no roles."""
    return encode("\n".join(text for _, text in turns))


def decode(tokens: Iterable[int]) -> str:
    """Return the text of `tokens`; specials vanish and broken UTF-8 becomes U+FFFD.

    A damaged KV cache may make the model emit any byte, so decoding must never raise.
    """
    return bytes(token for token in tokens if 0 <= token < 256).decode("utf-8", errors="replace")
