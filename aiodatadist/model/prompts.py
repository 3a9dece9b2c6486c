"""Prompts from a seeded grammar: the same kind of text that the shipped weights were trained on.

A text numbers people, each with a trade, a thing and a place, between sentences that say nothing of use. It
ends with a cue, after which the people are listed again in order, without those sentences. The names are made
of random syllables, so the model cannot know them: it has to fetch each one, and each trade, thing and place,
from the KV cache of the prompt. A block that is lost, swapped or damaged therefore shows up in the
continuation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

MIN_LENGTH: Final = 96
"""Shortest prompt in bytes: an opening, one person, a filler sentence and the cue always fit."""

CUE: Final = "\nOnce more:"
END: Final = "\nThe end."

_ONSETS: Final = (*"bdfghjklmnprstvz", "br", "dr", "st", "tr")
_VOWELS: Final = ("a", "e", "i", "o", "u")
_CODAS: Final = ("", "", "l", "m", "n", "r", "s", "th")
_TRADES: Final = (
    "baker", "weaver", "miller", "sailor", "farmer", "tailor", "potter", "hunter", "teacher", "doctor",
    "singer", "painter", "carpenter", "gardener", "blacksmith", "fisherman", "clockmaker", "shepherd",
    "cook", "guard",
)  # fmt: skip
_COLOURS: Final = (
    "red", "blue", "green", "yellow", "black", "white", "golden", "silver", "purple", "brown", "tiny",
    "heavy", "broken", "rusty", "shiny", "dusty", "wooden", "striped", "warm", "round",
)  # fmt: skip
_THINGS: Final = (
    "kite", "lamp", "drum", "ring", "book", "boat", "clock", "coat", "key", "bell", "hat", "cup", "map",
    "knife", "basket", "flute", "mirror", "candle", "ladder", "pillow", "hammer", "bottle", "wheel",
    "carpet", "letter", "button",
)  # fmt: skip
_PLACES: Final = (
    "barn", "cellar", "bridge", "mill", "well", "roof", "garden", "market", "stable", "lake", "tower",
    "chest", "oven", "shelf", "harbour", "forest", "stairs", "gate", "chapel", "hill",
)  # fmt: skip
_OPENINGS: Final = ("The book of {town}.", "A list from {town}.", "Who lives in {town}?", "Read in {town}:")
_ENTRY: Final = " {number}: {name} {trade}, {colour} {thing}, {place}."
_FILLER_SUBJECTS: Final = (
    "Rain", "The wind", "A dog", "The river", "An owl", "A cart", "The moon", "Some snow", "A cloud",
)  # fmt: skip
_FILLER_VERBS: Final = (
    "came", "passed", "went by", "was quiet", "moved slowly", "came and went", "made no sound at all",
)  # fmt: skip


def _fillers_by_length() -> dict[int, tuple[str, ...]]:
    table: dict[int, list[str]] = {}
    for subject in _FILLER_SUBJECTS:
        for verb in _FILLER_VERBS:
            sentence = f" {subject} {verb}."
            table.setdefault(len(sentence), []).append(sentence)
    return {length: tuple(table[length]) for length in sorted(table)}


_FILLERS: Final = _fillers_by_length()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and what a perfect reader would write after it.

    Attributes
    ----------
    text
        The prompt; ASCII, so its length in characters is its length in bytes.
    continuation
        The text that belongs after `text`, to the end. The shipped model is
        small and makes mistakes; compare runs of the model with each other, not with this.
    """

    text: str
    continuation: str


def _word(rng: random.Random, syllables: int) -> str:
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables)]
    return ("".join(parts) + rng.choice(_CODAS)).capitalize()


def _fill(rng: random.Random, room: int) -> list[str] | None:
    """Return filler sentences of exactly `room` bytes together, or None if no choice of sentences fits."""
    fits = [True] + [False] * room  # fits[n]: some choice of sentences has n bytes together
    for size in range(1, room + 1):
        fits[size] = any(length <= size and fits[size - length] for length in _FILLERS)
    if not fits[room]:
        return None
    sentences = []
    while room:
        length = rng.choice([n for n in _FILLERS if n <= room and fits[room - n]])
        sentences.append(rng.choice(_FILLERS[length]))
        room -= length
    return sentences


def draw_prompt(seed: int | random.Random, length: int = 400) -> Prompt:
    """Draw a prompt of exactly `length` bytes.

    Parameters
    ----------
    seed
        An integer, for the same prompt every time, or a generator to draw from. With 20 trades, 20 colours,
        26 things, 20 places and some 80,000 names, two seeds do not give the same prompt in practice.
    length
        Bytes of the prompt, at least `MIN_LENGTH`. The tokens are one more (`BOS`).

    Raises
    ------
    ValueError
        `length` is below `MIN_LENGTH`.
    """
    if length < MIN_LENGTH:
        raise ValueError(f"a prompt has at least {MIN_LENGTH} bytes, not {length}")
    rng = seed if isinstance(seed, random.Random) else random.Random(seed)
    # A random share of the prompt is people and the rest is filler, so that distances vary.
    share = rng.uniform(0.65, 0.95)
    while True:
        opening = rng.choice(_OPENINGS).format(town=_word(rng, 2))
        entries: list[str] = []
        room = length - len(opening) - len(CUE)
        filler = room * (1.0 - share)
        names: set[str] = set()
        colours = rng.sample(_COLOURS, len(_COLOURS))
        while True:
            # Within a text a name is one person's and, until the colours run out, a colour one thing's.
            name = _word(rng, 2)
            entry = _ENTRY.format(
                number=len(entries) + 1,
                name=name,
                trade=rng.choice(_TRADES),
                colour=colours[len(entries) % len(colours)],
                thing=rng.choice(_THINGS),
                place=rng.choice(_PLACES),
            )
            if name in names:
                continue
            if entries and room - len(entry) < filler:
                break
            names.add(name)
            entries.append(entry)
            room -= len(entry)
        fillers = _fill(rng, room) if room >= 0 else None
        if fillers is not None:
            break
    sentences = entries.copy()
    for sentence in fillers:
        sentences.insert(rng.randint(0, len(sentences)), sentence)
    return Prompt("".join([opening, *sentences, CUE]), "".join([*entries, END]))
