"""The models by name: what the demo and serving know of a model, whichever it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from . import tokenizer, wheels
from .prompts import draw_prompt
from .smollm2 import SmolLM2
from .transformer import Model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

MODEL_NAMES: Final = ("small", "smollm2")
"""What `find_model` takes; the first needs neither an extra nor a network."""

_PROMPT_BYTES: Final = 600


class Tokenizer(Protocol):
    """Between texts and tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens with which the model answers `text`: all that belongs ahead and after is there."""

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text that the model is to go on with, and nothing of a chat around it."""

    def encode_chat(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens of a chat of pairs of role and text, up to where the model's own turn goes on."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`, whatever they are; what stands for no text vanishes."""


class LanguageModel(Protocol):
    """A model before it is loaded: where its weights and its tokenizer come from.

    Attributes
    ----------
    name : str
        Of `MODEL_NAMES`.
    """

    name: str

    def fetch(self, tell: Callable[[str], None]) -> None:
        """Bring what the model is made of onto this machine, if it is not there yet. Blocks; needs the network then.

        Parameters
        ----------
        tell : callable
            Called with one line of text before each step that takes long.

        Raises
        ------
        ExtraMissing
            The model needs packages that are not installed.
        ModelError
            It cannot be fetched.
        """

    def load(self) -> Model:
        """Load the weights; `fetch` first. Blocks. Raises ModelError."""

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer alone; `fetch` first. Blocks. Raises ModelError."""

    def draw_prompt(self, seed: int) -> str:
        """Return a prompt that nobody has seen before, the same for the same seed. Needs nothing but this object."""


class SmallModel:
    """The model that ships with the package, as a `LanguageModel`."""

    name = "small"

    def fetch(self, tell: Callable[[str], None]) -> None:
        """Do nothing: it is here."""

    def load(self) -> Model:
        """Load the weights that ship."""
        return Model.load()

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of bytes."""
        return tokenizer

    def draw_prompt(self, seed: int) -> str:
        """Draw one of the texts that the model was trained to go on with, 600 bytes long."""
        return draw_prompt(seed, _PROMPT_BYTES).text


def find_model(name: str, cache_dir: Path | None = None) -> LanguageModel:
    """Return a model by its name.

    Parameters
    ----------
    name : str
        One of `MODEL_NAMES`.
    cache_dir : Path, optional
        Folder for what has to be fetched; ``$XDG_CACHE_HOME/aiodatadist`` or ``~/.cache/aiodatadist`` if left out.
    """
    if name == SmallModel.name:
        return SmallModel()
    if name == SmolLM2.name:
        return SmolLM2(wheels.default_cache_dir() if cache_dir is None else cache_dir)
    raise ValueError(f"{name!r} is not one of {', '.join(MODEL_NAMES)}")
