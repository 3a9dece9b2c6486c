"""Every way in which a process, a loop or a DataDist may end: each ends within seconds, and says nothing it need not.

Each test runs a script in an interpreter of its own. The script holds a DataDist that is linked to a peer process,
which can be stopped, so that transfers over tcp stay pending for as long as a test wants. Over shm, where the script's
own engine copies, an endless one does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap

import pytest

from . import endless
from .peers import ROOT, PeerProcess, spawn

pytestmark = pytest.mark.loop
SECONDS = 100.0
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])

PRELUDE = """
import asyncio, gc, os, signal, sys, threading, time, warnings, weakref
import numpy as np
import aiodatadist as adt
from tests import endless
from tests.waiting import native_threads, until_now

ADDRESS, TRANSPORT, LOOP = sys.argv[1:4]
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background were told to ignore it
KEY = adt.BlocksCacheKey(1)
BLOCKS = range(64)

def new_loop():
    if LOOP == "uvloop":
        import uvloop
        return uvloop.new_event_loop()
    loop = asyncio.new_event_loop()
    loop.slow_callback_duration = 1000  # on a busy machine any callback is slow
    return loop

def run(coroutine):
    with asyncio.Runner(loop_factory=new_loop, debug=LOOP == "debug") as runner:
        return runner.run(coroutine)

def tell(what):
    # Asks the test to do something to the peer, or to this process, and waits until it is done.
    print(what, flush=True)
    sys.stdin.readline()

async def enter(dd):
    await dd.link(adt.ClusterInfo(1, ADDRESS))
    kv = dd.cache_manager.register_blocks_cache([np.zeros((64, 1 << 20), np.uint8)])
    await kv.ready()
    while KEY not in dd.links[1].table:
        await asyncio.sleep(0.001)
    return kv

def node(cluster_id=2):
    return adt.DataDist(cluster_id, config=adt.Config(transports=(TRANSPORT,), drain_timeout=0.3))

async def opened(cluster_id=2):
    dd = await node(cluster_id).open()
    return dd, await enter(dd)

def pull(dd, kv, n=4):
    return [dd.cache_manager.pull_blocks(KEY, kv, BLOCKS, BLOCKS, timeout=None) for _ in range(n)]

async def pending(dd, kv):
    # The first of them does not end by itself.
    if TRANSPORT == "tcp":
        tell("stop")
        transfers = pull(dd, kv)
    else:
        sink = dd.cache_manager.register_blocks_cache([endless.memory()])
        await sink.ready()
        source = adt.BlocksCacheKey(1, 9)
        transfers = [dd.cache_manager.pull_blocks(source, sink, endless.SOURCES, endless.TARGETS, timeout=None)]
        transfers += pull(dd, kv, 3)
    assert not any(t.done() for t in transfers)
    for t in transfers:
        # asyncio complains about errors that nobody looks at, here as with any future.
        t.add_done_callback(lambda t: t.cancelled() or t.exception())
    await asyncio.sleep(0)
    return transfers
"""


class Ended:
    def __init__(self, code: int, out: list[str], err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    def cleanly(self, *said: str, warned: int = 0) -> None:
        """Check that it ended well, has printed this, and has warned so often, and of nothing else."""
        assert (self.code, self.out) == (0, list(said)), self.err
        lines = [line for line in self.err.splitlines() if line.strip()]
        warnings = [line for line in lines if "unclosed DataDist" in line]
        # A warning is followed by the line of source that it names.
        others = [
            line
            for number, line in enumerate(lines)
            if line not in warnings and not (number and lines[number - 1] in warnings and line.startswith("  "))
        ]
        assert not others, self.err
        assert len(warnings) == warned, self.err


@pytest.fixture
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--loop"))


async def script(loop_kind: str, transport: str, source: str) -> Ended:
    """Run it, do what it asks for, and see how it ends."""
    async with spawn(1, transports=(transport,)) as peer:
        await peer.cache("kv", tensors=1, shape=(64, 1 << 20), memory="ordinary", value=7)
        await peer.cache("one", tensors=1, shape=(1, endless.BLOCK_BYTES), memory="ordinary", model_id=9)
        assert peer.address is not None
        return await _script(peer, loop_kind, transport, source)


async def _script(peer: PeerProcess, loop_kind: str, transport: str, source: str) -> Ended:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-X", "faulthandler", "-W", "always::ResourceWarning:", "-c", PRELUDE + textwrap.dedent(source),
        str(peer.address), transport, loop_kind,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    out: list[str] = []
    try:
        async with asyncio.timeout(SECONDS):
            while line := (await process.stdout.readline()).decode().strip():
                match line:
                    case "stop":
                        peer.stop()
                    case "resume":
                        peer.resume()
                    case "interrupt":
                        process.send_signal(signal.SIGINT)
                    case _:
                        out.append(line)
                        continue
                process.stdin.write(b"\n")
            await process.wait()
    except TimeoutError:
        process.send_signal(signal.SIGABRT)
        await process.wait()
        pytest.fail(f"the script hangs after {out}:\n{(await errors).decode()}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process.stdin.close()
    assert process.returncode is not None
    return Ended(process.returncode, out, (await errors).decode())


# --- the interpreter ends -----------------------------------------------------------------------------


@TRANSPORTS
async def test_exit_with_pending_work_and_an_open_loop(loop_kind: str, transport: str) -> None:
    (
        await script(
            loop_kind,
            transport,
            """
            loop = new_loop()
            dd, kv = loop.run_until_complete(opened())
            transfers = loop.run_until_complete(pending(dd, kv))
            print("end")
            """,
        )
    ).cleanly("end", warned=1)


@TRANSPORTS
async def test_asyncio_run_with_pending_work(loop_kind: str, transport: str) -> None:
    """`main` returns while tasks of its own still wait, and nobody closes the DataDist."""
    (
        await script(
            loop_kind,
            transport,
            """
            async def main():
                dd, kv = await opened()
                tasks = [asyncio.create_task(t.wait()) for t in await pending(dd, kv)]
                await asyncio.sleep(0)
                return dd, tasks
            kept = run(main())
            assert kept[1][0].cancelled()
            print("end")
            """,
        )
    ).cleanly("end", warned=1)


@TRANSPORTS
async def test_sys_exit_in_the_middle(loop_kind: str, transport: str) -> None:
    ended = await script(
        loop_kind,
        transport,
        """
        async def main():
            async with node() as dd:
                kv = await enter(dd)
                dd._config = adt.Config(link_timeout=0.5)
                await pending(dd, kv)
                sys.exit(5)
        run(main())
        """,
    )
    assert (ended.code, ended.err) == (5, "")


async def test_os_exit_in_the_middle(loop_kind: str) -> None:
    ended = await script(
        loop_kind,
        "tcp",
        """
        async def main():
            dd, kv = await opened()
            await pending(dd, kv)
            os._exit(3)
        run(main())
        """,
    )
    assert (ended.code, ended.out, ended.err) == (3, [], "")


@TRANSPORTS
async def test_exit_while_a_daemon_thread_runs_the_loop(loop_kind: str, transport: str) -> None:
    """The thread is frozen at some point by the interpreter's end; the native side has to be stopped before."""
    (
        await script(
            loop_kind,
            transport,
            """
            began = threading.Event()
            async def main():
                dd, kv = await opened()
                transfers = await pending(dd, kv)
                began.set()
                while True:
                    await asyncio.sleep(0)
            threading.Thread(target=run, args=(main(),), daemon=True).start()
            began.wait()
            print("end")
            """,
        )
    ).cleanly("end", warned=1)


# --- signals, errors and cancelling ---------------------------------------------------------------------


@TRANSPORTS
@pytest.mark.parametrize("kept", [True, False], ids=["async with", "unclosed"])
async def test_keyboard_interrupt(loop_kind: str, transport: str, kept: bool) -> None:
    ended = await script(
        loop_kind,
        transport,
        f"""
        async def work(dd, kv):
            threading.Thread(target=tell, args=("interrupt",), daemon=True).start()
            while True:
                await asyncio.gather(*pull(dd, kv))
        async def main():
            if {kept}:
                async with node() as dd:
                    await work(dd, await enter(dd))
            else:
                await work(*await opened())
        try:
            run(main())
        except KeyboardInterrupt:
            print("interrupted")
        """,
    )
    ended.cleanly("interrupted", warned=0 if kept else 1)


@TRANSPORTS
async def test_exception_in_async_with(loop_kind: str, transport: str) -> None:
    (
        await script(
            loop_kind,
            transport,
            """
            async def main():
                transfers = []
                try:
                    async with node() as dd:
                        kv = await enter(dd)
                        transfers += await pending(dd, kv)
                        dd._config = adt.Config(link_timeout=0.5)
                        raise LookupError("mine")
                except LookupError as error:
                    # Closing ran into the stopped peer; what the block raised counts.
                    print(error.args[0])
                assert all(t.done() for t in transfers)
                for t in transfers:
                    t.exception()
                print(repr(dd))
            run(main())
            """,
        )
    ).cleanly("mine", "<DataDist 2: closed>")


@TRANSPORTS
async def test_cancelled_aclose(loop_kind: str, transport: str) -> None:
    (
        await script(
            loop_kind,
            transport,
            """
            async def main():
                dd, kv = await opened()
                tensors = kv.tensors
                transfers = await pending(dd, kv)
                closing = asyncio.create_task(dd.aclose())
                await asyncio.sleep(0)
                closing.cancel()
                try:
                    await closing
                except asyncio.CancelledError:
                    print("cancelled")
                # It ends in an abort, which ends by itself.
                async with asyncio.timeout(60):
                    await dd.wait_closed()
                for t in transfers:
                    try:
                        await t
                    except adt.ClosedError:
                        pass
                assert kv.tensors == ()
                tensors[0][:] = 0x33
                await asyncio.sleep(0.1)
                assert (tensors[0] == 0x33).all()
                await dd.aclose()
                print("quiet")
            run(main())
            """,
        )
    ).cleanly("cancelled", "quiet")


# --- loops ------------------------------------------------------------------------------------------------


@TRANSPORTS
async def test_closed_loop_with_pending_work(loop_kind: str, transport: str) -> None:
    (
        await script(
            loop_kind,
            transport,
            """
            loop = new_loop()
            dd, kv = loop.run_until_complete(opened())
            transfers = loop.run_until_complete(pending(dd, kv))
            tensor, alive = kv.tensors[0], weakref.ref(kv)
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
            manager = dd.cache_manager
            for call in (dd.stats, dd.events, lambda: manager.pull_blocks(KEY, kv, [0], [0])):
                try:
                    call()
                except (adt.WrongLoopError, adt.ClosedError):
                    pass
                else:
                    raise AssertionError
            del dd, manager, kv, call
            gc.collect()
            # Dropping it has stopped it: the memory is quiet.
            tensor[:] = 0x33
            time.sleep(0.2)
            assert (tensor == 0x33).all()
            # What is left of the transfers is harmless.
            for t in transfers:
                t.progress, t.cancel(), t.cancelling(), repr(t)
            del t, transfers
            until_now(lambda: (gc.collect(), alive())[1] is None)
            print("end")
            """,
        )
    ).cleanly("end", warned=1)


@TRANSPORTS
async def test_closed_loop_with_a_datadist_that_is_kept(loop_kind: str, transport: str) -> None:
    (
        await script(
            loop_kind,
            transport,
            """
            loop = new_loop()
            dd, kv = loop.run_until_complete(opened())
            transfers = loop.run_until_complete(pending(dd, kv))
            loop.close()
            print(repr(dd).startswith("<DataDist 2"))
            """,
        )
    ).cleanly("True", warned=1)


@TRANSPORTS
async def test_unclosed_and_dropped_while_the_loop_runs(loop_kind: str, transport: str) -> None:
    (
        await script(
            loop_kind,
            transport,
            """
            async def main():
                dd, kv = await opened()
                alive = weakref.ref(kv)
                transfers = await pending(dd, kv)
                del dd, kv
                # A thread that registered memory may hold it for another moment.
                while not all(t.done() for t in transfers):
                    gc.collect()
                    await asyncio.sleep(0.05)
                results = await asyncio.gather(*transfers, return_exceptions=True)
                assert all(isinstance(r, (adt.ClosedError, type(None))) for r in results), results
                while len(asyncio.all_tasks()) > 1:
                    await asyncio.sleep(0.01)
                del transfers, results
                until_now(lambda: (gc.collect(), alive())[1] is None)
                # Another one can be opened, and works.
                if TRANSPORT == "tcp":
                    tell("resume")
                dd, kv = await opened()
                await asyncio.gather(*pull(dd, kv))
                assert (kv.tensors[0] == 7).all()
                await dd.aclose()
                print("end")
            run(main())
            """,
        )
    ).cleanly("end", warned=1)


@TRANSPORTS
async def test_loops_one_after_the_other(loop_kind: str, transport: str) -> None:
    (
        await script(
            loop_kind,
            transport,
            """
            async def main():
                async with node() as dd:
                    kv = await enter(dd)
                    await asyncio.gather(*pull(dd, kv, 2))
                    assert (kv.tensors[0] == 7).all()
            def left():
                gc.collect()
                # The directory's own descriptor is gone when its link is read.
                fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
                return sorted(os.readlink(fd).split(":")[0] for fd in fds if os.path.exists(fd))
            run(main())
            until_now(lambda: not native_threads())
            before = left()
            for _ in range(5):
                run(main())
            assert left() == before, (left(), before)
            until_now(lambda: not native_threads())
            print("end")
            """,
        )
    ).cleanly("end")


async def test_two_threads_with_a_loop_each(loop_kind: str) -> None:
    (
        await script(
            loop_kind,
            "shm",
            """
            failures = []
            async def main(cluster_id):
                for _ in range(5):
                    async with node(cluster_id) as dd:
                        kv = await enter(dd)
                        for _ in range(3):
                            await asyncio.gather(*pull(dd, kv, 2))
                            assert (kv.tensors[0] == 7).all()
            def thread(cluster_id):
                try:
                    run(main(cluster_id))
                except BaseException as error:
                    failures.append(error)
                    raise
            threads = [threading.Thread(target=thread, args=(2 + i,)) for i in range(2)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert not failures
            until_now(lambda: not native_threads())
            print("end")
            """,
        )
    ).cleanly("end")


# --- fork ---------------------------------------------------------------------------------------------------


@TRANSPORTS
@pytest.mark.parametrize("way", ["sys.exit(0)", "os._exit(0)", "return", "raise KeyError"])
async def test_exit_in_a_forked_child(loop_kind: str, transport: str, way: str) -> None:
    """The child ends its own way, with all that belongs to it; the parent's links do not notice."""
    if way not in ("sys.exit(0)", "os._exit(0)") and transport == "tcp":
        pytest.skip("one transport is enough for this way")
    if way != "os._exit(0)" and loop_kind == "uvloop":
        # Each of these leaves through the runner, which closes the loop, also sys.exit.
        pytest.skip("the child closes libuv's loop, which changes the epoll shared with the parent, whose libuv aborts")
    ended = await script(
        loop_kind,
        transport,
        f"""
        async def main():
            dd, kv = await opened()
            transfers = pull(dd, kv)
            pid = os.fork()
            if pid == 0:
                gc.collect()
                {way}
                return 0
            await asyncio.gather(*transfers)
            # A child that ends by way of asyncio takes the self-pipe off the epoll that it shares with its parent,
            # which so cannot wait for threads any more; that is not ours.
            while not (code := os.waitpid(pid, os.WNOHANG))[0]:
                await asyncio.sleep(0.01)
            await asyncio.gather(*pull(dd, kv))
            assert (kv.tensors[0] == 7).all()
            assert dd.links[1].epoch == 1
            await dd.aclose()
            print("child ended with", os.waitstatus_to_exitcode(code[1]), flush=True)
            os._exit(0)
        run(main())
        """,
    )
    fails = way == "raise KeyError"
    assert (ended.code, ended.out) == (0, [f"child ended with {int(fails)}"]), ended.err
    assert ended.err.count("Traceback") == ended.err.count("KeyError\n") == int(fails), ended.err
    assert fails or ended.err == ""
