"""What the processes of the demo tell each other.

Jobs and orders go from the demo to its nodes, reports come back: JSON, one object a line, over the nodes' stdin and
stdout, as a router would speak with its workers. What the prefill node and the decode node tell each other is another
matter: `Handoff` and its like go through the library.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

__all__ = [
    "BLOCK_SIZE",
    "CONTROLS",
    "DECODE_ID",
    "MODES",
    "PREFILL_ID",
    "Arrived",
    "CacheDigest",
    "Computed",
    "DecodeJob",
    "Finish",
    "FirstToken",
    "Generated",
    "Handoff",
    "Landing",
    "Linked",
    "Listening",
    "Load",
    "Loaded",
    "Measure",
    "Measured",
    "Offer",
    "Order",
    "Places",
    "Prefilled",
    "PrefillJob",
    "ReferenceJob",
    "Repeat",
    "Repeated",
    "TellDigest",
    "read_order",
    "read_report",
    "write",
]

PREFILL_ID: Final = 1
DECODE_ID: Final = 2
"""Cluster ids."""

BLOCK_SIZE: Final = 16
"""Tokens of a block."""

CONTROLS: Final = ("flip-byte", "swap-blocks", "drop-layer", "zero")
"""Ways to damage the transfer on purpose."""

MODES: Final = ("pull", "layerwise")
"""Who moves the blocks: the decode node, when the prefill is over, or the prefill node, each layer once it is there."""

Digests: TypeAlias = list[tuple[int, int, str]]
"""Layer, logical block and hexdigest, as in `aiodatadist.model.BlockDigest`."""

Landing: TypeAlias = tuple[int, float]
"""A layer, and the time at which the decode node's event loop heard that it is there.

All times are those of CLOCK_MONOTONIC, which all processes of a host share.
"""


class Message(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Base of all: the class travels by name."""


# Jobs and orders. -------------------------------------------------------------------------------------------


class Load(Message, frozen=True):
    """Load the model: what every node is told first.

    Attributes
    ----------
    model : str
        One of `aiodatadist.model.MODEL_NAMES`.
    cache_dir : str or None
        Folder with what was fetched of the model, if not the usual one.
    num_blocks : int
        Blocks of the node's cache.
    limit : float
        Seconds after which the node gives up.
    """

    model: str
    cache_dir: str | None
    num_blocks: int
    limit: float


class PrefillJob(Message, frozen=True):
    """Fill a cache from a prompt and serve it.

    Attributes
    ----------
    tokens : list of int
        The prompt. No other node but the reference gets it.
    transport : str
        ``auto``, ``shm`` or ``tcp``.
    memory : str
        ``library`` or ``ordinary``.
    mode : str
        One of `MODES`.
    layout_seed : int
        For the choice of blocks, and for what lies in the blocks before.
    """

    tokens: list[int]
    transport: str
    memory: str
    mode: str
    layout_seed: int


class DecodeJob(Message, frozen=True):
    """Link the prefill node, take what it hands over, and go on generating.

    Attributes
    ----------
    address : str
        Where the prefill node listens.
    max_new_tokens : int
    transport, memory, mode, layout_seed
        As in `PrefillJob`.
    control : str or None
        One of `CONTROLS`: damage the transfer that way.
    """

    address: str
    max_new_tokens: int
    transport: str
    memory: str
    mode: str
    layout_seed: int
    control: str | None


class ReferenceJob(Message, frozen=True):
    """Generate in a single process, without any transfer."""

    tokens: list[int]
    max_new_tokens: int


class Measure(Message, frozen=True):
    """Pull once more, several times: the request's blocks, and all blocks of the prefill node's cache."""


class Repeat(Message, frozen=True):
    """Prefill again, several times: layer by layer and, every other time, pushing only at the end. For both nodes.

    Attributes
    ----------
    pairs : int
        How often each.
    """

    pairs: int


class TellDigest(Message, frozen=True):
    """Digest the whole cache."""


class Finish(Message, frozen=True):
    """Close and exit."""


Order: TypeAlias = Load | PrefillJob | DecodeJob | ReferenceJob | Measure | Repeat | TellDigest | Finish


# Reports. ---------------------------------------------------------------------------------------------------


class Loaded(Message, frozen=True):
    """The node has its model and waits for its job.

    Attributes
    ----------
    seconds : float
    layers, width, heads, kv_heads : int
        The model's shape.
    """

    seconds: float
    layers: int
    width: int
    heads: int
    kv_heads: int


class Listening(Message, frozen=True):
    """The prefill node can be linked.

    Attributes
    ----------
    address : str
    """

    address: str


class Prefilled(Message, frozen=True):
    """The prefill node has filled its cache.

    Attributes
    ----------
    blocks : list of int
        Where the prompt lies in its cache.
    layers : int
    seconds : float
        The model's time.
    digests : Digests
        Of whole blocks, also of the rows behind the prompt's end.
    computed : list of float
        In layerwise mode, for each layer the time at which its keys and values were in the cache.
    """

    blocks: list[int]
    layers: int
    seconds: float
    digests: Digests
    computed: list[float]


class Linked(Message, frozen=True):
    """The decode node has its link.

    Attributes
    ----------
    seconds : float
    link : str
        The link's path and why not the others.
    cache : str
        How the memory of the prefill node's cache is reached: ``shm-mapped``, ``shm-process_vm`` or ``tcp``.
    why : str
        Why not better.
    preferred : list of str
        Transports in the order of preference.
    """

    seconds: float
    link: str
    cache: str
    why: str
    preferred: list[str]


class Arrived(Message, frozen=True):
    """The blocks are on the decode node.

    Attributes
    ----------
    blocks : list of int
        Where the prompt lies in the decode node's cache.
    nbytes : int
        Bytes moved.
    seconds : float
        From asking for them to the last one. In layerwise mode the prefill lies within.
    received : int
        Bytes of the prefill node's messages: all that the decode node was told.
    digests : Digests
    damage : str
        What was damaged on purpose, or empty.
    landings : list of Landing
        In layerwise mode, the layers as they came.
    """

    blocks: list[int]
    nbytes: int
    seconds: float
    received: int
    digests: Digests
    damage: str
    landings: list[Landing]


class Generated(Message, frozen=True):
    """New tokens, of the decode node or the reference."""

    tokens: list[int]
    seconds: float


class Measured(Message, frozen=True):
    """What more pulls took.

    Attributes
    ----------
    again : list of float
        Seconds of each pull of the request's blocks, into other ones.
    whole : list of float
        Seconds of each pull of the whole cache.
    nbytes : int
        Bytes of the whole cache.
    piece : int
        Bytes that lie together: one block of one tensor.
    digest : str
        Of the whole cache as it arrived, in the order of the prefill node's blocks.
    """

    again: list[float]
    whole: list[float]
    nbytes: int
    piece: int
    digest: str


class Computed(Message, frozen=True):
    """When the layers of each repeated prefill were in the cache, as `Prefilled.computed`."""

    rounds: list[list[float]]


class Repeated(Message, frozen=True):
    """What the decode node saw of the repeated prefills.

    Attributes
    ----------
    rounds : list of list of Landing
        The layers of each as they came, layer by layer first and then by turns.
    digests : list of Digests
        Of the blocks after each.
    """

    rounds: list[list[Landing]]
    digests: list[Digests]


class CacheDigest(Message, frozen=True):
    """The digest of the prefill node's whole cache."""

    digest: str


Report: TypeAlias = (
    Loaded | Listening | Prefilled | Linked | Arrived | Generated | Measured | Computed | Repeated | CacheDigest
)


# From node to node. -----------------------------------------------------------------------------------------


class Handoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pulling: all that a decode node needs besides the blocks themselves. The prompt is not part of it.

    Attributes
    ----------
    first_token : int
        What the prefill chose to write first.
    length : int
        Tokens of the prompt.
    blocks : list of int
        Where they lie in the prefill node's cache.
    """

    first_token: int
    length: int
    blocks: list[int]


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layer by layer, from the prefill node: a prompt of so many tokens is about to be computed."""

    length: int


class Places(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layer by layer, the decode node's answer to `Offer`.

    Attributes
    ----------
    blocks : list of int
        Where in the decode node's cache the prefill node shall put its blocks, as many as the prompt fills.
    layers : list of pair of int
        First and last + 1 of each run of layers that are wanted.
    at_end : bool
        Push nothing before the last layer is computed.
    """

    blocks: list[int]
    layers: list[tuple[int, int]]
    at_end: bool = False


class FirstToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layer by layer, from the prefill node, behind all layers: what the prefill chose to write first."""

    token: int


# Reading and writing. ---------------------------------------------------------------------------------------

_encoder = msgspec.json.Encoder()
_orders = msgspec.json.Decoder(Order)
_reports = msgspec.json.Decoder(Report)


def write(message: Message) -> bytes:
    """Return the line of a message."""
    return _encoder.encode(message) + b"\n"


def read_order(line: bytes) -> Order:
    """Read a line that a node got."""
    return _orders.decode(line)


def read_report(line: bytes) -> Report:
    """Read a line that a node wrote."""
    return _reports.decode(line)
