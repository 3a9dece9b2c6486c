"""FastDeploy's flags: what they become, and a worker that was started with them."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")

from aiodatadist import _core
from aiodatadist.commands import serve, serve_fastdeploy
from aiodatadist.errors import ConfigError, UsageError
from aiodatadist.serve.config import HealthLimits, Timeouts
from aiodatadist.serve.router import Router

from .serve_local import inner_cluster
from .test_serve import client, complete, wait_for
from .waiting import reserved_address


def has_rdma(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """Let this transport for RDMA be the one that can be used, whatever is on the machine or loaded by other tests."""
    found = [(each, each == name, f"{each} was looked for") for each in ("tcp", "verbs")]
    monkeypatch.setattr(_core, "probe_transports", lambda: found)
    engine = object() if name == "hixl" else None
    monkeypatch.setattr(serve_fastdeploy, "open_engine", lambda *_: (engine, "hixl was looked for"))


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


def worker(*words: str) -> Any:
    return serve._worker_config(parse("worker", *words))


def router(*words: str) -> Any:
    return serve._router_config(parse("router", *words))


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_the_role_is_a_flag(role: str) -> None:
    assert worker("--splitwise-role", role).role == role
    assert serve._worker_config(parse(role)).role == role
    assert worker().role == "mixed"


@pytest.mark.parametrize(
    ("listed", "transports"),
    [
        ("ipc", ("shm",)),
        ("tcp,ipc", ("tcp", "shm")),
        ("ipc,ipc", ("shm",)),
        ("", ("tcp",)),
    ],
)
def test_protocols_are_transports(listed: str, transports: tuple[str, ...]) -> None:
    assert worker("--cache-transfer-protocol", listed).transports == transports
    assert worker().transports == ("shm", "tcp")


@pytest.mark.parametrize("name", ["verbs", "hixl"])
def test_rdma_is_the_transport_that_can_be_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    has_rdma(monkeypatch, name)
    assert worker("--cache-transfer-protocol", "rdma").transports == (name,)
    assert worker("--cache-transfer-protocol", "rdma,ipc").transports == (name, "shm")


def test_rdma_alone_needs_rdma(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    has_rdma(monkeypatch, None)
    with pytest.raises(SystemExit):
        worker("--cache-transfer-protocol", "rdma")
    assert "rdma cannot be used here (verbs: verbs was looked for; hixl: " in capsys.readouterr().err
    assert worker("--cache-transfer-protocol", "rdma,ipc").transports == ("shm",)
    assert "the other protocols are" in capsys.readouterr().err


def test_one_port_serves(capsys: pytest.CaptureFixture[str]) -> None:
    config = worker("--pd-comm-port", "7001", "--rdma-comm-ports", "7101,7102")
    assert config.kv_port == 7001
    assert "--rdma-comm-ports is not needed" in capsys.readouterr().err
    assert worker("--pd-comm-port", "7001,7002").kv_port == 7001
    assert "one port serves" in capsys.readouterr().err
    for words in (("--pd-comm-port", "x"), ("--rdma-comm-ports", "70000"), ("--cache-transfer-protocol", "ib")):
        with pytest.raises(SystemExit):
            worker(*words)


def test_routers_are_urls_or_host_and_port() -> None:
    assert worker("--router", "10.0.0.1:9000", "--router", "http://b:1/").routers == (
        "http://10.0.0.1:9000",
        "http://b:1",
    )


def test_the_scheduler_is_the_routers(capsys: pytest.CaptureFixture[str]) -> None:
    assert router().scheduler is None
    flags = [
        "--scheduler-name",
        "splitwise",
        "--scheduler-host",
        "r",
        "--scheduler-port",
        "1",
        "--scheduler-topic",
        "t",
    ]
    found = router(*flags, "--scheduler-ttl", "60").scheduler
    assert (found.host, found.port, found.topic, found.ttl, found.password) == ("r", 1, "t", 60, None)
    with pytest.raises(ConfigError, match="at least 10"):
        router(*flags, "--scheduler-ttl", "1")
    with pytest.raises(UsageError, match="give --router"):
        worker(*flags)
    worker(*flags, "--router", "h:1")
    assert "concerns routers" in capsys.readouterr().err


def test_the_choice_to_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    name = serve_fastdeploy._WAIT_VARIABLE
    assert router().wait_for_room
    monkeypatch.setenv(name, "0")
    assert not router().wait_for_room
    hasty: Any = Router(router("--queue", "9"), None, None)  # type: ignore[arg-type]
    assert hasty.admission._queue_size == 0
    monkeypatch.setenv(name, "yes")
    with pytest.raises(UsageError, match="give 0"):
        router()


def test_every_limit_can_be_set() -> None:
    def numbers(kind: type) -> tuple[str, ...]:
        return tuple(f"{field.name}={index + 2}" for index, field in enumerate(fields(kind)))

    timeouts = [word for text in numbers(Timeouts) for word in ("--timeout", text)]
    health = [word for text in numbers(HealthLimits) for word in ("--health", text)]
    config = router(*timeouts, *health, "--heartbeat", "0.5", "--retries", "0")
    assert [getattr(config.timeouts, field.name) for field in fields(Timeouts)] == list(range(2, 10))
    assert [getattr(config.health, field.name) for field in fields(HealthLimits)] == list(range(2, 10))
    assert isinstance(config.health.failures, int)
    assert (config.heartbeat, config.retries) == (0.5, 0)
    assert worker(*timeouts).timeouts == config.timeouts
    assert worker().timeouts == router().timeouts == Timeouts()
    # FastDeploy's name, and the last word.
    assert router("--timeout", "request=1", "--request-timeout-secs", "9").timeouts.request == 9
    limit = router("--scheduler-name", "splitwise", "--scheduler-limit", "7").scheduler
    assert limit.limit == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--timeout", "iddle=3"), "'iddle' is none of connect, prefill"),
        (("--timeout", "idle=0"), "the timeout idle is 0 s; give more than 0"),
        (("--health", "failures=0"), "failures of the health limits is 0; give at least 1"),
        (("--health", "drain=-1"), "drain of the health limits is -1 s; give at least 0"),
        (("--heartbeat", "0"), "the heartbeat is 0 s; give 0.05 to 1000"),
        (("--retries", "-1"), "retries is -1; give at least 0"),
        (("--migrate", "-1"), "migrate is -1; give at least 0"),
    ],
)
def test_limits_that_cannot_be_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        router(*words)


def test_one_command_hands_its_limits_and_keys_on(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame")
    words = ("pd", "--port", "0", "--timeout", "transfer=3", "--timeout", "lease=4", "--health", "failures=2")
    words += ("--heartbeat", "0.2", "--request-timeout-secs", "5", "--retries", "1")
    words += ("--api-key-file", str(tmp_path / "key"), "--cluster-key-file", str(tmp_path / "key"))
    asked = serve._cluster_options(parse(*words))
    taken, given = serve._router_config(parse("router", *asked[0])), serve._worker_config(parse("decode", *asked[1]))
    assert (taken.timeouts.transfer, taken.timeouts.request, taken.health.failures) == (3, 5, 2)
    assert (taken.heartbeat, taken.retries, given.timeouts.lease) == (0.2, 1, 4)
    for config in (taken, given):
        assert (config.api_key, config.cluster_key) == ("sesame", b"sesame")


def test_words_that_are_no_limits_and_keys_of_a_check_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        router("--timeout", "idle")
    assert "'idle' is not NAME=NUMBER" in capsys.readouterr().err
    with pytest.raises(UsageError, match="leave --api-key-file"):
        serve._cluster_options(parse("pd", "--check", "--api-key-file", "key"))


@pytest.mark.hang_limit(240)
async def test_workers_with_these_flags_serve() -> None:
    async with client() as http, inner_cluster({}) as cluster, contextlib.AsyncExitStack() as stack:
        address = cluster.url.removeprefix("http://")
        with reserved_address() as metrics:
            port = metrics.rsplit(":", 1)[1]
            for role, more in (("prefill", ("--metrics-port", port)), ("decode", ())):
                flags = ("--splitwise-role", role, "--router", address, "--cache-transfer-protocol", "ipc,tcp")
                config = worker(*flags, "--rdma-comm-ports", "1", *more)
                await stack.enter_async_context(serve._worker(config))
            await wait_for(http, cluster, prefill=1, decode=1)
            assert (await complete(http, cluster.url, False, prompt="Once upon a time"))["tokens"]
            async with http.get(f"http://{metrics}/metrics") as reply:
                assert "aiodatadist_free_blocks" in await reply.text()
