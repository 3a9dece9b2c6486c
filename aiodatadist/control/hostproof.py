"""Proof that two processes share a host, a user and a kernel, and what shm needs from it.

Addresses prove nothing: containers share them and proxies fake them. So the connecting side sends, over an
abstract unix socket named in the handshake, a memfd that holds the nonce it was given on the control stream, or
with a cluster key what the key of the session makes of it;
the listening side writes its own nonce into it. Each side then names on the control stream what it saw there.
The kernel adds the other side's pid and uid, which become a pidfd, and process_vm is probed on a secret of
the peer.

Whatever fails is a reason in ``link.path``, never an exception: the link then goes over the network.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING, Final

from .. import _core
from .._loop import Deadline, HostChannel, HostListener, Runtime, Tasks, close_all, fork_generation
from ..errors import ProtocolError
from ..observe import get_logger
from . import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from .clusterproof import SessionKey

__all__ = ["ELSEWHERE", "HostDoor", "HostPeer", "HostRefused", "allow_ptracer", "prove_same_host"]

_log = get_logger()

ELSEWHERE: Final = "the peer runs on another host or in another network namespace"

_GREETING: Final = b"ADT1"
_ACCEPTED: Final = b"+"
_PROOF_BYTES: Final = 3 * wire.ID_SIZE
_MAX_CHANNELS: Final = 1024
_YAMA: Final = "/proc/sys/kernel/yama/ptrace_scope"


class HostRefused(Exception):
    """Not the same host, or not provably; the text is the reason."""


class HostPeer:
    """A peer that proved to be a process of this host and user.

    Attributes
    ----------
    channel : HostChannel
        Carries descriptors of mapped memory.
    pid : int
    nonce, answer : bytes
        The connecting and the listening side's nonce, as found in the memfd.
    process_vm : bool
        Whether this side may read and write the peer's memory.
    process_vm_reason : str
        Why not.
    secret : tuple of int and bytes
        Where this side has found which secret of the peer's process; (0, b"") if it may not read there.
    """

    def __init__(self, channel: HostChannel, pid: int, pidfd: int, nonce: bytes, answer: bytes) -> None:
        self.channel = channel
        self.pid = pid
        self.nonce = nonce
        self.answer = answer
        self.process_vm = False
        self.process_vm_reason = "not probed"
        self.secret = (0, b"")
        self._pidfd = pidfd
        self._last_sent = 0
        self._received: dict[int, int] = {}

    def take_pidfd(self) -> int:
        """Give the pidfd away."""
        pidfd, self._pidfd = self._pidfd, -1
        return pidfd

    def probe(self, address: int, secret: bytes) -> None:
        """Find out whether process_vm works, on the secret that the peer named."""
        if len(secret) < wire.ID_SIZE or not address:
            self.process_vm_reason = "the peer named no secret to probe"
            return
        code = _core.probe_process_vm(self.pid, address, secret)
        self.process_vm = code == 0
        if self.process_vm:
            self.secret = (address, secret)
        if code == errno.EBADMSG:
            self.process_vm_reason = f"process {self.pid} does not hold the peer's secret"
        elif code:
            self.process_vm_reason = f"process_vm_readv on process {self.pid}: {os.strerror(code)}"
            if code == errno.EPERM and ptrace_scope():
                self.process_vm_reason += f" (Yama's ptrace_scope is {ptrace_scope()})"
        else:
            self.process_vm_reason = ""

    async def send_fd(self, fd: int) -> int:
        """Send a descriptor ahead of the message that names its number, which is returned. Raises OSError."""
        self._last_sent += 1
        await self.channel.send(self._last_sent.to_bytes(8, "little"), fd)
        return self._last_sent

    def receive_fd(self, number: int) -> int:
        """Return the descriptor of this number, which the caller owns.

        It has arrived: it was sent before the message that names it, and a unix socket delivers at once.

        Raises
        ------
        ProtocolError
            The peer sent none, or something else.
        """
        while number not in self._received:
            try:
                message = self.channel.receive_nowait()
            except OSError as why:
                raise ProtocolError(f"the peer sent a descriptor that cannot be taken: {why}") from why
            if message is None:
                raise ProtocolError(f"the peer named descriptor {number}, which it did not send")
            data, fds = message
            if len(data) != 8 or len(fds) != 1:
                close_all(fds)
                raise ProtocolError(f"the peer sent {len(fds)} descriptors with {len(data)} bytes")
            sent = int.from_bytes(data, "little")
            if sent > number or sent in self._received:
                close_all(fds)
                raise ProtocolError(f"the peer sent descriptor {sent} instead of {number}")
            self._received[sent] = fds[0]
        return self._received.pop(number)

    def close(self) -> None:
        """Close what was not given away."""
        self.channel.close()
        if self._pidfd >= 0:
            os.close(self.take_pidfd())
        close_all(list(self._received.values()))
        self._received.clear()


# Yama. ------------------------------------------------------------------------------------------------------


def ptrace_scope() -> int:
    """Return Yama's ptrace_scope; 0 where there is no Yama."""
    try:
        with open(_YAMA, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


_tracer = 0  # the process that may access this one: a pid, 0 for none, -1 for any
_tracer_set_by = 0  # the fork generation that said so: a child has to say it anew


def allow_ptracer(pid: int, *, allow_any: bool) -> None:
    """Let a peer's process access this one's memory where Yama forbids it.

    Yama keeps one name per process. A second peer is let in only where `allow_any` lets everybody in; else it
    finds out by its probe that it may not, and uses mapped memory and tcp.
    """
    global _tracer, _tracer_set_by
    if _tracer_set_by != fork_generation():
        _tracer, _tracer_set_by = 0, fork_generation()
    if pid == os.getpid() or _tracer in (pid, -1) or not ptrace_scope():
        return
    if _tracer and not allow_any and _alive(_tracer):
        return
    wanted = -1 if allow_any and _tracer else pid
    code = _core.set_ptracer(wanted)
    if code:
        _log.warning("cannot let the peer access memory", pid=pid, error=os.strerror(code))
    else:
        _tracer = wanted


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# The connecting side. ---------------------------------------------------------------------------------------


def _peer_of(channel: HostChannel) -> tuple[int, int]:
    """Return pid and pidfd of a channel's other side.

    Raises
    ------
    HostRefused
        Another user, or a process that is not visible or gone.
    """
    pid, uid = channel.credentials()
    if uid != os.geteuid():
        raise HostRefused(f"the peer runs as user {uid}, this process as user {os.geteuid()}")
    if pid <= 0:
        raise HostRefused("the peer's process is not visible in this PID namespace")
    try:
        return pid, os.pidfd_open(pid)
    except OSError as why:
        raise HostRefused(f"pidfd_open of process {pid}: {why.strerror}") from why


def _shown(offer: wire.HostOffer, key: SessionKey | None) -> bytes:
    """Return what the peer's memfd has to hold: with a cluster key only the peer of this session knows it."""
    return offer.nonce if key is None else key.host_nonce(offer.nonce)


async def prove_same_host(runtime: Runtime, offer: wire.HostOffer, key: SessionKey | None, timeout: float) -> HostPeer:
    """Prove to the listening side that this process runs on its host.

    Raises
    ------
    HostRefused
        It does not, or cannot prove it.
    """
    channel: HostChannel | None = None
    memfd = pidfd = -1
    try:
        with Deadline(timeout) as limit:
            try:
                channel = await runtime.connect_host(offer.name)
            except ConnectionRefusedError:
                raise HostRefused(ELSEWHERE) from None
            pid, pidfd = _peer_of(channel)
            nonce = runtime.chance.randbytes(wire.ID_SIZE)
            memfd = os.memfd_create("aiodatadist-proof", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(memfd, _PROOF_BYTES)
            os.pwrite(memfd, _shown(offer, key) + nonce, 0)
            await channel.send(_GREETING, memfd)
            reply, fds = await channel.receive()
            close_all(fds)
            if reply != _ACCEPTED:
                raise HostRefused(reply.decode(errors="replace") or "the peer closed the unix connection")
            answer = os.pread(memfd, wire.ID_SIZE, 2 * wire.ID_SIZE)
            peer = HostPeer(channel, pid, pidfd, nonce, answer)
            channel, pidfd = None, -1
            return peer
        assert limit.expired
        raise HostRefused(f"the peer did not answer on its unix socket within {timeout:g} s")
    except OSError as why:
        raise HostRefused(f"the same-host proof failed: {why.strerror or why}") from why
    finally:
        if channel is not None:
            channel.close()
        close_all([fd for fd in (memfd, pidfd) if fd >= 0])


# The listening side. ----------------------------------------------------------------------------------------


class HostDoor:
    """Listens for same-host proofs.

    Parameters
    ----------
    runtime : Runtime
    tasks : Tasks
        Owns one task for each unix connection, which lasts until the proof or `timeout`.
    timeout : float
        Seconds.
    """

    def __init__(self, runtime: Runtime, tasks: Tasks, timeout: float) -> None:
        self._runtime = runtime
        self._tasks = tasks
        self._timeout = timeout
        self._channels = 0
        self._awaited: dict[bytes, Callable[[HostPeer], None]] = {}
        self._listener: HostListener | None = None

    def open(self) -> None:
        """Listen, under a random name. Raises OSError."""
        if self._listener is not None:
            return
        name = b"aiodatadist-" + self._runtime.chance.randbytes(16).hex().encode()
        self._listener = self._runtime.listen_host(name, self._on_channel)

    def offer(self) -> wire.HostOffer | None:
        """Return an offer, if this side listens."""
        if self._listener is None:
            return None
        return wire.HostOffer(name=self._listener.name, nonce=self._runtime.chance.randbytes(wire.ID_SIZE))

    def expect(self, offer: wire.HostOffer, key: SessionKey | None, on_peer: Callable[[HostPeer], None]) -> bytes:
        """Let in whoever shows what the offer asks for, until `withdraw` is called with what this returns.

        `on_peer` is called at most once, with a peer that it owns from then on.
        """
        shown = _shown(offer, key)
        self._awaited[shown] = on_peer
        return shown

    def withdraw(self, shown: bytes) -> None:
        """Let nobody in any more; undoes `expect`, if it was called."""
        self._awaited.pop(shown, None)

    def close(self) -> None:
        """Stop listening. May be opened again."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._awaited.clear()

    def _on_channel(self, channel: HostChannel) -> None:
        if self._channels >= _MAX_CHANNELS:
            channel.close()
            return
        self._channels += 1
        self._tasks.start(self._serve, channel, name="aiodatadist-host-proof")

    async def _serve(self, channel: HostChannel) -> None:
        keep = False
        try:
            with Deadline(self._timeout):
                try:
                    keep = await self._check(channel)
                except HostRefused as why:
                    await channel.send(str(why).encode()[:200])
        except OSError as why:
            _log.debug("a same-host proof broke off", error=str(why))
        finally:
            self._channels -= 1
            if not keep:
                channel.close()

    async def _check(self, channel: HostChannel) -> bool:
        pid, pidfd = _peer_of(channel)
        fds: list[int] = []
        try:
            data, fds = await channel.receive()
            if data != _GREETING or len(fds) != 1:
                raise HostRefused("this is not how a same-host proof begins")
            offered, nonce = _read_proof(fds[0])
            on_peer = self._awaited.pop(offered, None)
            if on_peer is None:
                raise HostRefused("the nonce is not one that was offered")
            answer = self._runtime.chance.randbytes(wire.ID_SIZE)
            os.pwrite(fds[0], answer, 2 * wire.ID_SIZE)
            await channel.send(_ACCEPTED)
            peer = HostPeer(channel, pid, pidfd, nonce, answer)
            pidfd = -1
            on_peer(peer)
            return True
        finally:
            close_all(fds)
            if pidfd >= 0:
                os.close(pidfd)


def _read_proof(fd: int) -> tuple[bytes, bytes]:
    """Return the two nonces in a memfd that a process of this user sent."""
    try:
        # Only memory files have seals. Anything else might block whoever reads it.
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        data = os.pread(fd, 2 * wire.ID_SIZE, 0)
    except OSError as why:
        raise HostRefused(f"the descriptor is no memfd: {why.strerror}") from why
    if len(data) != 2 * wire.ID_SIZE:
        raise HostRefused("the memfd is too short")
    return data[: wire.ID_SIZE], data[wire.ID_SIZE :]
