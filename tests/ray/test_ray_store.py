"""A consumer that sleeps bounds what lies in the object store, by the credit and not by pressure."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from tests.core.runner_suite import eventually
from tests.ray.many_units import chains_of, many_units
from zephon_ray.collector import prepare
from zephon_ray.plan.windows import UnitTask
from zephon_ray.recipe import Recipe
from zephon_ray.runners.ray_worker import BLOCK_BYTES
from zephon_ray.stages.tokenise import UnitTokeniser
from zephon_ray.stream import Stream
from zephon_ray.supplies import LEAD_WINDOWS

FILES, UNITS, WORKERS = 8, 20, 2
SHORT_S = 4.0
SLEEP_S = float(os.environ.get("ZEPHON_TEST_SLEEP_S", "300"))
BEFORE, AFTER = 3, 9
"""Steps before and after the sleep."""
IN_LANES = 1
"""Windows that lanes go on from, besides those they were not given yet."""


def store() -> Any:
    """Of all nodes together: bytes used, bytes spilled, objects."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats


def window_bytes(recipe: Recipe) -> int:
    """Ids of a window; all units here are of one size."""
    job, _ = prepare(recipe)
    tokeniser = UnitTokeniser(job.options)
    made = tokeniser.tokenise(UnitTask(group=job.manifests[0].group(0), epoch=0, unit=0))
    tokeniser.close()
    return FILES * int(made.ids.nbytes)


def sleep_bounded(folder: Path, sleep_s: float) -> None:
    shape = {"sequence_length": 8192, "global_batch_size": 8}
    recipe = many_units(folder, files=FILES, units=UNITS, words=20_000, execution={"stall_seconds": 60}, **shape)
    window = window_bytes(recipe)
    bound = (LEAD_WINDOWS + IN_LANES) * window + WORKERS * BLOCK_BYTES
    assert bound < UNITS * window / 2, "most of the corpus has no place in it"
    before = store()
    stream = Stream(recipe, runner="ray", workers=WORKERS)
    try:
        got = [batch.chain.hex() for _ in range(BEFORE) if (batch := stream.next_batch())]
        pause, end, most, units = threading.Event(), time.monotonic() + sleep_s, 0, 0
        while time.monotonic() < end:
            now = store()
            most = max(most, now.object_store_bytes_used - before.object_store_bytes_used)
            units = stream.stats().units
            assert most <= bound, f"{most} of {bound} bytes after {units} units"
            assert now.spilled_bytes_total == before.spilled_bytes_total
            pause.wait(0.2)  # a look now and then; nothing waits for it
        assert most >= window, "something was read ahead"
        assert units < FILES * UNITS / 2
        assert stream.stats().units == units, "nothing more is made"
        got += [batch.chain.hex() for _ in range(AFTER) if (batch := stream.next_batch())]
        assert got == chains_of(recipe, BEFORE + AFTER)
    finally:
        stream.close()
    del stream
    eventually(lambda: store().object_store_bytes_used <= before.object_store_bytes_used + (1 << 20), "the store is given back")


@pytest.mark.timeout(120)
def test_the_store_is_bounded_while_the_consumer_sleeps(tmp_path: Path) -> None:
    sleep_bounded(tmp_path, SHORT_S)


@pytest.mark.long
@pytest.mark.timeout(SLEEP_S + 120)
def test_the_store_is_bounded_while_the_consumer_sleeps_for_minutes(tmp_path: Path) -> None:
    sleep_bounded(tmp_path, SLEEP_S)
