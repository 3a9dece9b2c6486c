"""The tokenizer of a chat model: byte-level BPE, and the marks around the turns of a chat.

Needs the package tokenizers, an extra: `aiodatadist[demo]`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from aiodatadist.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .gguf_file import Vocabulary

TURN_BEGIN: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"


class ChatTokenizer:
    """Turns a user's request into the tokens of a chat that the model has to go on with, and tokens into text.

    Parameters
    ----------
    vocabulary : Vocabulary
        Must have `TURN_BEGIN` and `TURN_END` among its control tokens.
    system : str
        What the model is told ahead of every chat.

    Raises
    ------
    ModelError
        The vocabulary is of another kind.
    """

    def __init__(self, vocabulary: Vocabulary, system: str) -> None:
        if vocabulary.splitting != "smollm":
            raise ModelError(f"texts are split the way 'smollm' here, not {vocabulary.splitting!r}")
        if absent := {TURN_BEGIN, TURN_END} - set(vocabulary.control):
            raise ModelError(f"the vocabulary has no control token {min(absent)!r}")
        bpe: Any = import_module("tokenizers")
        ids = {token: index for index, token in enumerate(vocabulary.tokens)}
        self._tokenizer = bpe.Tokenizer(bpe.models.BPE(vocab=ids, merges=vocabulary.merges))
        # Each digit by itself, and then the words as GPT-2 has them.
        self._tokenizer.pre_tokenizer = bpe.pre_tokenizers.Sequence(
            [bpe.pre_tokenizers.Digits(individual_digits=True), bpe.pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._tokenizer.decoder = bpe.decoders.ByteLevel()
        control = [bpe.AddedToken(token, special=True, normalized=False) for token in vocabulary.control]
        self._tokenizer.add_special_tokens(control)
        # A user who writes out a control token must not get one: it would end the user's turn.
        self._tokenizer.encode_special_tokens = True
        self._begin, self._end = ids[TURN_BEGIN], ids[TURN_END]
        self._system = system

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a chat in which the user has said `text`, and the model has the word."""
        return self.encode_chat([("system", self._system), ("user", text)])

    def encode_chat(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens of a chat, up to where the model's own turn has to go on.

        Parameters
        ----------
        turns : sequence of pair of str
            Role (``system``, ``user`` or ``assistant``) and text of each turn; nothing is put ahead of them.
        """
        tokens = []
        for role, text in turns:
            tokens += [self._begin, *self.encode_text(f"{role}\n{text}"), self._end, *self.encode_text("\n")]
        return [*tokens, self._begin, *self.encode_text("assistant\n")]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`; control tokens vanish and broken UTF-8 becomes U+FFFD."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text alone, without a chat around it."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens
