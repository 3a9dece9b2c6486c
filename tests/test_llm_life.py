"""The life of a node of the drop-in: opening, interrupts at any place, forked children, and the interpreter's end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import aiodatadist as adt
from aiodatadist.llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMDataDist,
    LLMException,
    LLMRole,
)
from aiodatadist.llm_datadist.v2.config import EngineConfig

from .llm_nodes import DECODER, INVALID, POOL, PROMPT, Memory, Waiter, fails, node, options, pair

pytestmark = pytest.mark.filterwarnings("ignore:Placement.DEVICE means host memory")

KEY = BlocksCacheKey(PROMPT)


def test_a_forked_child_is_refused() -> None:
    with pair() as (prompt, decoder):
        held, mine = Memory(prompt), Memory(decoder, seed=2)
        manager = decoder.cache_manager
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads and fork
            child = os.fork()
        if child == 0:
            code = 1
            try:
                manager.pull_blocks(KEY, mine.cache, [0], [0])
            except LLMException as why:
                decoder.finalize()
                code = 0 if "forked" in str(why) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        manager.pull_blocks(KEY, mine.cache, [0], [0])
        del held


def test_a_forked_child_ends() -> None:
    """Also where a thread of the parent was just handing over a call, and whether or not the child finalizes."""
    with node(DECODER) as decoder:
        assert decoder._llm_datadist is not None
        held, release = threading.Event(), threading.Event()

        def hold(gate: threading.Lock) -> None:
            with gate:
                held.set()
                release.wait(60)

        other = threading.Thread(target=hold, args=(decoder._llm_datadist._portal._gate,))
        other.start()
        assert held.wait(60)
        for finalizes in (True, False):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads and fork
                child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(60)
                try:
                    engine = decoder._llm_datadist
                    if finalizes:
                        decoder.finalize()
                        with fails(INVALID, "forked"):
                            LLMDataDist(LLMRole.MIX, 9).init(options())
                    else:
                        decoder._llm_datadist = decoder._cache_manager = None
                    gone = weakref.ref(engine)
                    del engine
                    gc.collect()
                    code = 0 if gone() is None else 2
                except BaseException:
                    traceback.print_exc()
                    code = 1
                os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
        release.set()
        other.join()
        decoder.switch_role(LLMRole.MIX)


def test_threads_that_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One opens, and the other one is told so."""
    inside, proceed = threading.Semaphore(0), threading.Event()
    from_options = EngineConfig.from_options.__func__  # type: ignore[attr-defined]

    def slow(kind: type[EngineConfig], *args: Any) -> Any:
        inside.release()
        proceed.wait(0.2)  # so long for the second one, which must not come here
        return from_options(kind, *args)

    monkeypatch.setattr(EngineConfig, "from_options", classmethod(slow))
    nodes = [LLMDataDist(LLMRole.MIX, number) for number in (1, 2)]
    waiters = [Waiter(lambda one=one: one.init(options())) for one in nodes]  # type: ignore[misc]
    try:
        assert sorted(map(str, (waiter.join() for waiter in waiters))) == ["LLMStatusCode.LLM_FAILED", "None"]
        assert inside.acquire(blocking=False)
        assert not inside.acquire(blocking=False)
    finally:
        for one in nodes:
            one.finalize()


def interrupted(call: Callable[[], object]) -> None:
    """Make a call that sends its own process an interrupt, and see that it ends by that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("allocate", [False, True])
def test_an_interrupted_registration_leaves_no_cache(allocate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.get_ident()

    async def never(cache: Any) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        await asyncio.Event().wait()

    with node(PROMPT, mem_pool_cfg=POOL) as prompt:
        desc, key = CacheDesc(4, [8, 64], DataType.DT_UINT8), BlocksCacheKey(PROMPT, 3)

        def make() -> Any:
            if allocate:
                return prompt.cache_manager.allocate_blocks_cache(desc, key)
            return Memory(prompt, model=3)

        with monkeypatch.context() as patched:
            patched.setattr(adt.Cache, "ready", never)
            interrupted(make)
        make()  # the key is free


def test_a_script_that_ends_without_finalizing() -> None:
    """Also while another thread waits for a peer that says nothing."""
    script = """
import socket, threading
import aiodatadist
aiodatadist.install_as_llm_datadist()
from llm_datadist import LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole
config = LLMConfig()
config.enable_cache_manager = True
node = LLMDataDist(LLMRole.DECODER, 1)
node.init(config.generate_options())
silent = socket.create_server(("127.0.0.1", 0))
info = LLMClusterInfo()
info.remote_cluster_id = 2
info.append_local_ip_info("127.0.0.1", 0)
info.append_remote_ip_info("127.0.0.1", silent.getsockname()[1])
threading.Thread(target=node.link_clusters, args=([info], 600_000), daemon=True).start()
kept = silent.accept()
print("done", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, "done" in ended.stdout) == (0, True), ended.stderr
    assert "Traceback" not in ended.stderr
