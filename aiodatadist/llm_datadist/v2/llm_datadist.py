"""`LLMDataDist`: one node, its life and its links."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from .._engine import Engine, Peer
from ..configs import LLMClusterInfo, LLMRole
from ..rank_table import check_link_arguments
from ..status import LLMException, LLMStatusCode, raise_if_false, raise_if_true
from ..utils import log
from ..utils.utils import check_int32, check_isinstance, check_uint64
from .cache_manager import CacheManager
from .config import ClusterConfig, EngineConfig
from .llm_types import RegisterMemStatus

__all__ = ["LLMDataDist"]

_CACHE_MANAGER = "llm.EnableCacheManager"
_REMOTE_ACCESSIBLE = "llm.EnableRemoteCacheAccessible"
_LISTEN = "llm.listenIpInfo"
_FLOW_GRAPH_MEMORY = "ge.flowGraphMemMaxSize"

# Two threads that open at once: the second one sees what the first one has made.
_opening: Final = threading.Lock()

ROLE_NAMES: Final = {LLMRole.PROMPT: "Prompt", LLMRole.DECODER: "Decoder", LLMRole.MIX: "Mix"}


class LLMDataDist:
    """One node: it links peers, and its caches move to and from theirs. At most one is live in a process.

    All methods may be called by any thread. Each blocks the thread that calls it, and no other; an interrupt ends the
    wait, and what it waited for.

    Parameters
    ----------
    role : LLMRole
        What the node is for. It restricts nothing.
    cluster_id : int
        0 to 2**64 - 1, unique among all that link each other.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, or is out of range.
    """

    llm_engine_instance: ClassVar[LLMDataDist | None] = None

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        check_isinstance("role", role, LLMRole)
        check_uint64("cluster_id", cluster_id)
        self._role = role
        self._cluster_id = int(cluster_id)
        self._engine_options: dict[str, str] = {}
        self._is_initialized = False
        self._enable_cache_mgr = False
        self._llm_datadist: Engine | None = None
        self._kv_cache_manager: Any = None
        self._cache_manager: CacheManager | None = None

    # Life. --------------------------------------------------------------------------------------------------

    def init(self, options: dict[str, str]) -> None:
        """Open the node.

        Parameters
        ----------
        options : dict of str to str
            As `LLMConfig.generate_options` makes them. They are copied. A node that is open already ignores them.

        Raises
        ------
        LLMException
            Another node is live (``LLM_FAILED``), an option cannot be used (``LLM_PARAM_INVALID``), or the address
            cannot be listened on (``LLM_FAILED``).
        ImportError
            Without ``llm.EnableCacheManager`` it would be a node of the first version, which is not here.
        TypeError, ValueError
            The options are no dict, or a port is no number.
        """
        with _opening:
            self._init(options)

    def _init(self, options: dict[str, str]) -> None:
        if self._is_initialized:
            return
        raise_if_false(
            LLMDataDist.llm_engine_instance is None,
            "another LLMDataDist is live in this process; finalize it first",
            status_code=LLMStatusCode.LLM_FAILED,
        )
        check_isinstance("options", options, dict)
        _check_flow_graph_memory(options.get(_FLOW_GRAPH_MEMORY))
        options = {**options, "llm.Role": self._role_to_str(self._role)}
        if "llm.LocalCommRes" in options:
            options.setdefault(_CACHE_MANAGER, "1")
            options.setdefault(_REMOTE_ACCESSIBLE, "1")
            raise_if_false(
                options[_CACHE_MANAGER] == "1", "with local_comm_res EnableCacheManager must not be switched off"
            )
        if "llm.TransferBackend" in options:
            raise_if_false(options.get(_CACHE_MANAGER) == "1", "with transfer_backend EnableCacheManager must be on")
            raise_if_false(
                options.setdefault(_REMOTE_ACCESSIBLE, "1") == "1",
                "with transfer_backend EnableRemoteCacheAccessible must not be switched off",
            )
            raise_if_false(_LISTEN in options, "with transfer_backend listenIpInfo must be given")
        if options.get(_CACHE_MANAGER) != "1":
            raise ImportError(
                "without enable_cache_manager this is a node of the first version of llm_datadist, which is the "
                "package llm_datadist_v1; it is not here",
                name="llm_datadist_v1",
            )
        if (address := listen_address(options)) is not None:
            options["llm.ListenIp"], options["llm.ListenPort"] = address[0], str(address[1])
        engine = Engine(EngineConfig.from_options(self._cluster_id, self._role, options))
        self._engine_options = options
        self._enable_cache_mgr = True
        self._llm_datadist = engine
        self._cache_manager = CacheManager(engine, options)
        self._is_initialized = True
        LLMDataDist.llm_engine_instance = self

    def finalize(self) -> None:
        """Close the node; nothing where it is not open. It may be opened again.

        Calls that other threads wait in end first. Links end, peers are told, and the memory of all caches is the
        caller's again.

        Raises
        ------
        LLMException
            A peer may still touch the memory of caches; the message names them. The node is closed all the same.
        """
        engine, self._llm_datadist = self._llm_datadist, None
        if engine is None:
            return
        self._is_initialized = False
        self._enable_cache_mgr = False
        self._cache_manager = None
        try:
            engine.finalize()
        finally:
            if LLMDataDist.llm_engine_instance is self:
                LLMDataDist.llm_engine_instance = None

    @property
    def cluster_id(self) -> int:
        """Id of the node."""
        return self._cluster_id

    @property
    def cache_manager(self) -> CacheManager:
        """Registers caches and moves them; always the same object until `finalize`."""
        self._engine()
        assert self._cache_manager is not None
        return self._cache_manager

    @property
    def kv_cache_manager(self) -> Any:
        """Of the first version: always an `LLMException`."""
        self._engine()
        raise_if_true(self._enable_cache_mgr, "kv_cache_manager is not there with enable_cache_manager")

    def _engine(self) -> Engine:
        engine = self._llm_datadist
        if engine is None:
            raise RuntimeError("llm datadist is not initialized")
        return engine

    @staticmethod
    def _role_to_str(role: LLMRole) -> str:
        return ROLE_NAMES[role]

    def _cluster_config(self) -> ClusterConfig:
        return ClusterConfig.from_options(self._cluster_id, self._role, self._engine_options)

    # Links. -------------------------------------------------------------------------------------------------

    def link_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link peers, all at once.

        One link carries transfers in both directions. With the backend hixl each side links, and each side's link
        counts: a link that the peer has made is counted a second time, and ends when both have unlinked.

        Parameters
        ----------
        clusters : list or tuple of LLMClusterInfo
            Each with an address of the peer, and one of this node.
        timeout : int
            Milliseconds, above 0.

        Returns
        -------
        status : LLMStatusCode
            ``LLM_SUCCESS``, or the last failure; ``LLM_PARAM_INVALID`` without any cluster.
        statuses : list of LLMStatusCode
            One for each cluster. ``LLM_ALREADY_LINK``: there is a link, and the peer answers. What has failed is also
            logged, with the reason.

        Raises
        ------
        LLMException, TypeError, ValueError
            An argument cannot be used; nothing was linked.
        """
        engine = self._engine()
        peers = self._peers(clusters, timeout, needs_local=not engine.config.local_comm_res)
        return _outcome(engine.link_clusters(peers, timeout / 1000))

    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """End links, all at once, on both sides. Either side may, and a peer that is gone is no error.

        Parameters
        ----------
        clusters : list or tuple of LLMClusterInfo
            Only the cluster id of each matters. One that is not linked is no error.
        timeout : int
            Milliseconds, above 0. Transfers of this node on a link are waited for first.
        force : bool
            Wait neither for them nor for the peer.

        Returns
        -------
        status : LLMStatusCode
        statuses : list of LLMStatusCode
            As of `link_clusters`. ``LLM_TIMEOUT``: the link is ended here, and the peer has not answered.

        Raises
        ------
        LLMException, TypeError, ValueError
            An argument cannot be used; nothing was unlinked.
        """
        engine = self._engine()
        peers = self._peers(clusters, timeout, needs_local=False)
        check_isinstance("force", force, bool)
        return _outcome(engine.unlink_clusters(peers, timeout / 1000, bool(force)))

    @staticmethod
    def _peers(clusters: Sequence[LLMClusterInfo], timeout: int, *, needs_local: bool) -> list[Peer]:
        check_int32("timeout", timeout)
        raise_if_false(timeout > 0, "timeout={} must be above 0", timeout)
        check_isinstance("clusters", clusters, (list, tuple), LLMClusterInfo, allow_none=False)
        peers = []
        for cluster in clusters:
            raise_if_true(needs_local and not cluster.local_ip_info_list, "local_ip_info_list is empty")
            check_uint64("remote_cluster_id", cluster.remote_cluster_id)
            assert cluster.remote_cluster_id is not None
            peers.append(Peer(cluster.remote_cluster_id, cluster.local_ip_info_list, cluster.remote_ip_info_list))
        return peers

    def check_link_status(self, remote_cluster_id: int) -> None:
        """Of the first version: always an `LLMException`."""
        self._engine()
        raise_if_true(self._enable_cache_mgr, "check_link_status is not there with enable_cache_manager")

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Take another role; listen at another address, or no longer. The same role is no error.

        Parameters
        ----------
        role : LLMRole
        switch_options : dict of str to str, optional
            ``llm.listenIpInfo`` says where to listen from now on; without it the node stops listening. With the backend
            hixl it goes on listening where it does.

        Raises
        ------
        LLMException
            ``LLM_EXIST_LINK``: peers are linked. ``LLM_FAILED``: the address cannot be listened on; where it listened
            before it still does. ``LLM_FEATURE_NOT_ENABLED``: another address with the backend hixl.
        TypeError, ValueError
            An argument has a wrong type, or the port is no number.
        """
        engine = self._engine()
        check_isinstance("role", role, LLMRole)
        check_isinstance("switch_options", switch_options, dict)
        self._role_to_str(role)
        engine.switch_role(role, listen_address(switch_options or {}))
        self._role = role

    # Two-sided links. ---------------------------------------------------------------------------------------

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Join a communicator, whose members all call this with the same arguments, and link all of them.

        Nobody has to listen. The members meet at the one with the lowest rank: on one host by `comm_name`, from other
        hosts at its ``host_ip``, or its ``server_id`` where that is an address, on port ``HCCL_IF_BASE_PORT`` (60000)
        plus its device id.

        Parameters
        ----------
        comm_name : str
            1 to 127 characters.
        cluster_rank_info : dict of int to int
            The 2 to 4 members, this node among them: cluster id to rank, by ascending rank.
        rank_table : str
            HCCL's JSON, of version 1.0 or 1.2, with exactly these ranks.

        Returns
        -------
        int
            Id of the communicator, from 1. It is not linked yet: `query_register_mem_status` says when it is, at the
            latest after ``link_total_time`` seconds (0: ``HCCL_CONNECT_TIMEOUT``, 120).

        Raises
        ------
        LLMException
            ``LLM_PARAM_INVALID``: an argument cannot be used. ``LLM_LINK_FAILED``: the others cannot come to this node.
            ``LLM_FEATURE_NOT_ENABLED``: the backend is hixl.
        TypeError, ValueError
            An argument has a wrong type, or a number does not fit.
        """
        engine = self._engine()
        members = check_link_arguments(comm_name, cluster_rank_info, rank_table)
        comm_id = engine.join(comm_name, members)
        self.cache_manager.set_is_call_linked()
        return comm_id

    def unlink(self, comm_id: int) -> None:
        """Leave a communicator: links to its members end that no other one has, and that were not there before.

        Parameters
        ----------
        comm_id : int
            As `link` has returned it.

        Raises
        ------
        LLMException
            ``LLM_NOT_YET_LINK``: there is none of that id. ``LLM_UNLINK_FAILED``: a member has not answered; the
            link is ended here.
        TypeError, ValueError
            It is no integer, or out of range.
        """
        engine = self._engine()
        engine.leave(_comm_id(comm_id))

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Return how far a communicator is.

        Parameters
        ----------
        comm_id : int
            As `link` has returned it.

        Returns
        -------
        RegisterMemStatus
            ``OK`` once all members are linked. ``FAILED``: `unlink` it and link again; the log says what was missing.

        Raises
        ------
        LLMException
            ``LLM_NOT_YET_LINK``: there is none of that id.
        TypeError, ValueError
            It is no integer, or out of range.
        """
        engine = self._engine()
        return engine.joined(_comm_id(comm_id))


def _comm_id(comm_id: int) -> int:
    check_isinstance("comm_id", comm_id, int, allow_none=False)
    check_uint64("comm_id", comm_id)
    return int(comm_id)


def _outcome(codes: list[LLMStatusCode]) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
    if not codes:
        return LLMStatusCode.LLM_PARAM_INVALID, []
    failed = [code for code in codes if code is not LLMStatusCode.LLM_SUCCESS]
    return failed[-1] if failed else LLMStatusCode.LLM_SUCCESS, codes


def listen_address(options: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where options say to listen; None where they do not."""
    if _LISTEN not in options:
        return None
    parts = options[_LISTEN].split(":")
    raise_if_false(len(parts) == 2, "listenIpInfo={!r:.80} is not 'ip:port'", options[_LISTEN])
    return parts[0], int(parts[1])


def _check_flow_graph_memory(value: object) -> None:
    if value is None:
        return
    check_isinstance(_FLOW_GRAPH_MEMORY, value, str)
    assert isinstance(value, str)
    raise_if_true("," in value, "{}={!r:.80} must be one number", _FLOW_GRAPH_MEMORY, value)
    raise_if_false(value.isascii() and value.isdecimal(), "{}={!r:.80} is no number", _FLOW_GRAPH_MEMORY, value)


def _shutdown_handler() -> None:
    """Finalize the live node, when the interpreter exits."""
    if (live := LLMDataDist.llm_engine_instance) is not None:
        try:
            live.finalize()
        except LLMException as why:
            log.error("at exit: %s", why)


atexit.register(_shutdown_handler)
