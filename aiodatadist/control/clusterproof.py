"""Proof of the cluster key: what both ends of a handshake compute, without any input or output.

Whoever knows the key can compute a MAC over all that was said so far. All means the bytes as they were sent,
each with its length and the side that said it. So a proof is good for one place in one handshake: both sides
contribute a random challenge, the token and both identities are part of it, a proof of the other direction has
another name, and a message that was changed, left out or put in on the way makes all later proofs wrong. The
key itself is never sent, and neither is the key of the session, which is derived from it at the same place on
both sides.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from . import wire

__all__ = ["KeyProof", "SessionKey"]

_PURPOSE: Final = b"aiodatadist cluster key 1: "
_CONNECTING: Final = b"c"
_LISTENING: Final = b"l"
_SESSION: Final = b"session"


class KeyProof:
    """One side's proofs in one handshake.

    Parameters
    ----------
    key : bytes
        The cluster key.
    dialed : bool
        This is the connecting side.
    """

    def __init__(self, key: bytes, *, dialed: bool) -> None:
        self._key = key
        self._here, self._there = (_CONNECTING, _LISTENING) if dialed else (_LISTENING, _CONNECTING)
        self._transcript = hashlib.sha256()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def said(self, message: bytes | memoryview) -> None:
        """Take note of a message of this side."""
        self._note(self._here, message)

    def heard(self, message: bytes | memoryview) -> None:
        """Take note of a message of the other side."""
        self._note(self._there, message)

    def _note(self, side: bytes, message: bytes | memoryview) -> None:
        self._transcript.update(side + len(message).to_bytes(4, "little"))
        self._transcript.update(message)

    def mine(self) -> bytes:
        """Return this side's proof at this place of the handshake."""
        return self._mac(self._here)

    def theirs(self) -> bytes:
        """Return what the other side has to send at this place."""
        return self._mac(self._there)

    def session_key(self) -> SessionKey:
        """Return the key of this session, for the connections that are still to come."""
        return SessionKey(self._mac(_SESSION))

    def _mac(self, name: bytes) -> bytes:
        return hmac.digest(self._key, _PURPOSE + name + b"\0" + self._transcript.digest(), "sha256")


class SessionKey:
    """What binds engine, data and unix connections to the session whose handshake proved the key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def seal(self, preamble: wire.Preamble) -> wire.Preamble:
        """Return the preamble with the MAC that the listening side wants to see."""
        text = b"connection" + bytes([preamble.kind]) + preamble.index.to_bytes(2, "little") + preamble.token
        return wire.Preamble(preamble.kind, preamble.index, preamble.token, hmac.digest(self._key, text, "sha256"))

    def host_nonce(self, nonce: bytes) -> bytes:
        """Return what a peer of this session shows at the unix socket in place of the nonce that it was given."""
        return hmac.digest(self._key, b"host" + nonce, "sha256")[: wire.ID_SIZE]
