"""What router and workers say to each other: JSON over HTTP, checked by type, never unpickled.

=====================  ==========================  =============================================================
endpoint               of                          body, answer
=====================  ==========================  =============================================================
``POST /register``     router                      `Registration`, `Registered`
``POST /deregister``   router                      `Deregistration`
``POST /pd/prefill``   prefill worker              `PrefillJob`, `Ticket`
``POST /pd/release``   prefill and decode worker   `ReleaseJob`, a count of what was released
``POST /pd/reserve``   decode worker (push)        `ReserveJob`, `Reservation`
``POST /pd/decode``    decode worker               `DecodeJob`, what the client gets (SSE or JSON)
``POST /pd/generate``  mixed worker                `GenerateJob`, what the client gets
``POST /pd/abort``     every worker                `AbortJob`, a count of what was aborted
``GET /health``        every worker                `Health`
=====================  ==========================  =============================================================

Each error is a `ServeError` in OpenAI's shape. With a cluster key, all of these but ``GET /health`` ask for the header
`KEY_HEADER`, which holds `internal_token`: like every bearer token it is only as secret as the network.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np

from .errors import ServeError

__all__ = [
    "DECODE_HEADER",
    "KEY_HEADER",
    "MODE_HEADER",
    "PREFILL_HEADER",
    "ROLES",
    "AbortJob",
    "DecodeJob",
    "Deregistration",
    "GenerateJob",
    "Generation",
    "Health",
    "KVLayout",
    "Load",
    "Peer",
    "PrefillJob",
    "Registered",
    "Registration",
    "ReleaseJob",
    "Reservation",
    "ReserveJob",
    "Sampling",
    "Ticket",
    "decode",
    "internal_token",
]

KEY_HEADER: Final = "X-Aiodatadist-Key"
# Of a router's answers: the hand-over, and the pair that served.
MODE_HEADER: Final = "X-Router-Mode"
PREFILL_HEADER: Final = "X-Router-Prefill-URL"
DECODE_HEADER: Final = "X-Router-Decode-URL"
ROLES: Final = ("prefill", "decode", "mixed")

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
T = TypeVar("T")


class Message(msgspec.Struct, kw_only=True, frozen=True):
    """What crosses between processes. Unknown fields are ignored, so that versions may differ."""


# Requests. --------------------------------------------------------------------------------------------------


class Sampling(Message, frozen=True):
    """How tokens are chosen; the token at a position depends on logits, `seed` and position alone.

    Attributes
    ----------
    temperature
        0: always the likeliest.
    seed
        Filled in by whoever takes the request in, so that a second attempt writes the same.
    ignore_end
        Go on behind the model's end token, for measurements.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    ignore_end: bool = False


class Generation(Message, frozen=True):
    """A client's request, checked, as workers get it (`openai.read_request` makes it).

    Attributes
    ----------
    request_id
        The router's, never the client's.
    prompt
        Text or tokens of a completion; None for a chat.
    turns
        Pairs of role and text of a chat.
    max_tokens
        Most new tokens; None: as `openai.DEFAULT_MAX_TOKENS` says.
    created
        Unix time in seconds.
    """

    request_id: Id
    model: str
    created: int
    prompt: str | list[int] | None = None
    turns: list[tuple[str, str]] = []
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: list[str] = []
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False

    @property
    def chat(self) -> bool:
        """Whether it came to the chat endpoint."""
        return self.prompt is None


# Workers. ---------------------------------------------------------------------------------------------------


class KVLayout(Message, frozen=True):
    """The shape of a paged KV cache: what must agree before a block can move."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, K and V of all layers."""
        size: int = np.dtype(self.dtype).itemsize
        return 2 * self.layers * self.kv_heads * self.head_dim * self.block_tokens * size


class Load(Message, frozen=True):
    """What a worker has to do, and room for.

    Attributes
    ----------
    free_blocks, num_blocks
        Of all its engines. Free are also those that only keep a prefix.
    running, waiting
        Requests that the model works on, and those that wait for it.
    tokens
        Prompt tokens that are not prefilled yet.
    """

    free_blocks: int = 0
    num_blocks: int = 0
    running: int = 0
    waiting: int = 0
    tokens: int = 0


class Peer(Message, frozen=True):
    """How to link a worker's DataDist, and which cache of it is meant."""

    cluster_id: int
    incarnation: str
    listen: list[str] = []
    rank: int = 0


class Registration(Message, frozen=True):
    """A worker's heartbeat: all that a router knows of it, each time, so that a new router knows it as well.

    Attributes
    ----------
    incarnation
        Random for each start of the process.
    url
        Where its HTTP listens, for the router.
    peer
        None for a mixed worker.
    modes
        Hand-overs that it takes part in, of ``pull`` and ``push``.
    ttl_s
        Without a heartbeat for so long, it is gone. The router fills in three of the periods that it asks for.
    """

    worker_id: Id
    incarnation: Id
    role: str
    url: str
    model: str
    model_hash: str
    layout: KVLayout
    max_positions: int
    slots: int
    transports: list[str] = []
    modes: list[str] = []
    peer: Peer | None = None
    load: Load = Load()
    draining: bool = False
    ttl_s: float = 6.0


class Registered(Message, frozen=True):
    """The router's answer to a heartbeat. Another `router_id` than before: it was restarted."""

    router_id: str
    heartbeat_s: float


class Deregistration(Message, frozen=True):
    """A worker leaves."""

    worker_id: Id
    incarnation: Id


class Health(Message, frozen=True):
    """Who answers at this address."""

    worker_id: str
    incarnation: str
    role: str
    model: str
    load: Load


# Jobs. ------------------------------------------------------------------------------------------------------


class PrefillJob(Message, frozen=True):
    """Compute a prompt. With `reservation` push it there, else hold it under a ticket."""

    generation: Generation
    attempt: int = 0
    reservation: Reservation | None = None


class Ticket(Message, frozen=True):
    """A computed prompt that a prefill worker holds, once, for whoever brings this first.

    Attributes
    ----------
    request_id, attempt
        Names it at its owner.
    lease
        Of the library: adopt it to keep the blocks, release it when they are here.
    blocks
        In the owner's cache, in the prompt's order; the last one may be part full.
    token
        The first new token, which the owner sampled.
    ttl_s
        How long the blocks stay if nobody adopts the lease, from when the ticket was made.
    pushed
        True: nothing is held, and the KV is in the reservation already.
    digests
        Of the blocks, layer by layer, where the owner was told to make them; else empty.
    """

    request_id: Id
    attempt: int
    owner: Peer
    lease: int
    blocks: list[int]
    prompt_tokens: int
    cached_tokens: int
    token: int
    ttl_s: float
    pushed: bool = False
    digests: list[str] = []


class ReleaseJob(Message, frozen=True):
    """Give up a ticket or a reservation. Again is no error."""

    request_id: Id
    attempt: int


class ReserveJob(Message, frozen=True):
    """Reserve blocks for a prompt that will be pushed, and for its answer.

    Attributes
    ----------
    writer
        Cluster id of the prefill worker that may write them.
    """

    generation: Generation
    attempt: int
    writer: int


class Reservation(Message, frozen=True):
    """Blocks of a decode worker that one prefill worker may write, until it says so or time is up."""

    request_id: Id
    attempt: int
    owner: Peer
    blocks: list[int]
    ttl_s: float


class DecodeJob(Message, frozen=True):
    """Take over a prompt and go on with it. The generation comes without its prompt."""

    generation: Generation
    ticket: Ticket


class GenerateJob(Message, frozen=True):
    """Do all of it."""

    generation: Generation
    attempt: int = 0


class AbortJob(Message, frozen=True):
    """End requests; those that are not here are no error."""

    request_ids: list[Id] = []
    abort_all: bool = False


def decode(body: bytes, kind: type[T]) -> T:
    """Read a message. Raises ServeError, code ``invalid_request``."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as why:
        raise ServeError("invalid_request", f"not a {kind.__name__}: {why}") from why


def internal_token(cluster_key: bytes) -> str:
    """Return what proves the cluster key to HTTP endpoints: derived from it, so that the key itself stays at home."""
    return hmac.new(cluster_key, b"aiodatadist serve, internal endpoints", hashlib.sha256).hexdigest()


def encode(message: Any) -> bytes:
    """Return a message as JSON."""
    return msgspec.json.encode(message)
