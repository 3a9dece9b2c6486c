"""Many clients at once on one router, while workers are killed, clients leave and requests are aborted."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")

from .conftest import Scale
from .serve_rounds import GOOD, bench

CLIENTS = 200


@pytest.mark.hang_limit(600)
async def test_nothing_hangs_leaks_or_is_wrong_under_kills_disconnects_and_aborts(scale: Scale) -> None:
    for number in range(scale(1)):
        async with bench(("shm", "tcp")[number % 2]) as cluster:
            ends = await cluster.round(7 + number, CLIENTS)
            assert ends[GOOD] > CLIENTS // 2, ends
            assert ends["aborted"] > 0, ends
