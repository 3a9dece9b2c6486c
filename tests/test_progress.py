"""`Transfer.progress` never goes back."""

from __future__ import annotations

import aiodatadist as adt


async def test_progress_does_not_go_back_before_the_end_is_told() -> None:
    """The engine forgets an operation when it has ended, and the loop hears of it later."""
    async with adt.DataDist(1, listen="127.0.0.1:0") as owner, adt.DataDist(2) as dd:
        desc = adt.CacheDesc(4, (512, 16, 4, 128), "float16")
        key = adt.BlocksCacheKey(1)
        source = owner.cache_manager.allocate_blocks_cache(desc, key=key)
        target = dd.cache_manager.allocate_blocks_cache(desc)
        await source.ready()
        await target.ready()
        await dd.link(adt.ClusterInfo(1, owner.listen_address))
        while True:  # until its progress was seen
            pull = dd.cache_manager.pull_blocks(key, target, range(512), range(512))
            seen = pull.progress.bytes_done
            while any(row.kind == "pull" for row in dd.dump()):  # the loop stands still
                done = pull.progress.bytes_done
                assert done >= seen
                seen = done
            assert not pull.done()
            assert pull.progress.bytes_done >= seen
            await pull
            assert pull.progress == (4 * desc.tensor_bytes, 4 * desc.tensor_bytes)
            if seen:
                return
