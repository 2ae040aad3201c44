"""One rank is ten times slower than the others: nobody errs, and what is kept for it does not grow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zephon_ray
from tests.feed.feeds import joined, serving, steps_of
from tests.feed.stand_in import open_on_ray, open_whole
from tests.small import a_recipe
from zephon_ray.batches import Batch
from zephon_ray.feed.feed import KEEP_STEPS

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("ray_session"), pytest.mark.fault]

RANKS = 4
AHEAD = 4
FAST_S, SLOW_S = 0.01, 0.1
MARKS = 2


@pytest.mark.parametrize(
    ("production", "steps"), [(open_on_ray, 30), pytest.param(open_whole, 300, marks=pytest.mark.long)], ids=["short", "whole"]
)
def test_a_rank_ten_times_slower_costs_the_others_time_and_nothing_else(production: Callable[..., Any], steps: int, tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, execution={"runner": "threads", "prefetch_steps": AHEAD, "hot_replay_bytes": 1})
    got: list[list[Batch]] = [[] for _ in range(RANKS)]
    faults: list[BaseException] = []

    def train(rank: int, pace_s: float) -> None:
        try:
            with zephon_ray.connect("slow", dp_rank=rank, dp_world_size=RANKS, incarnation="run:0") as loader:
                while len(got[rank]) < steps:
                    got[rank].append(next(loader))
                    time.sleep(pace_s)  # as if it trained
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            faults.append(error)

    with serving("slow", recipe, tmp_path / "out", open_production=production) as served:
        threads = [threading.Thread(target=train, args=(rank, SLOW_S if rank == RANKS - 1 else FAST_S)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        most_kept = most_apart = 0
        while any(thread.is_alive() for thread in threads):
            threads[-1].join(0.1)
            most_kept = max(most_kept, served.status.streams["train"].kept_steps)
            taken = [len(rank) for rank in got]
            most_apart = max(most_apart, max(taken) - min(taken))
    assert not faults
    assert [joined(parts) for parts in zip(*got, strict=True)] == steps_of(recipe, steps)
    assert most_kept <= AHEAD + KEEP_STEPS + 1
    assert AHEAD // 2 <= most_apart <= AHEAD + 2, "the others are as far ahead as they may be, and what the slow one has fetched"
