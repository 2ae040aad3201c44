"""A stream of the feed around real productions whose lane workers are killed: every step is what the contract says, and kept ones stay."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import ray

from tests.feed.stand_in import open_whole
from tests.feed.test_feed_streams import serving
from tests.feed.test_production import KILLED, lane_workers_of_ours
from tests.golden_cases import GoldenCase, GoldenStep
from tests.ray.many_units import many_units, with_execution
from zephon_ray.batches import fold
from zephon_ray.feed.protocol import StepReply
from zephon_ray.hashing import digest128
from zephon_ray.recipe import load_recipe

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(400), pytest.mark.fault, pytest.mark.long]

BACK_S = 20.0
OPENS_S = 120.0
"""Within which a production opens on a busy machine."""


def kill_one(pick: random.Random) -> None:
    os.kill(pick.choice(lane_workers_of_ours()).pid, signal.SIGKILL)


def check(step: StepReply | None, golden: GoldenStep) -> StepReply:
    """What is said of a step, and its rows, are the contract's."""
    assert step is not None
    rows = [row for block in step.blocks for row in ray.get(block.ref, timeout=60)]
    assert fold(golden.step, bytes(16), [digest128(row) for row in rows])[0].hex() == golden.digest
    assert (step.step, step.digest.hex(), step.chain.hex(), step.pairs) == (golden.step, golden.digest, golden.chain, golden.pairs)
    return step


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", KILLED)
def test_random_kills_of_lane_workers_and_rewinds_leave_every_step_as_in_the_contract(
    name: str, seed: int, golden_cases: dict[str, GoldenCase], tmp_path: Path
) -> None:
    """However late a kill is noticed: no step is missing, none is another, and no rewind reads what is kept."""
    case, pick = golden_cases[name], random.Random(f"{name} {seed}")
    print(f"{name}, seed {seed}")
    recipe = with_execution(load_recipe(case.recipe), lane_workers=pick.choice([1, 2, 4]), prefetch_steps=pick.choice([1, 4, 8]))
    last = len(case.steps)
    kills = set(pick.sample(range(1, last), min(last - 1, 2)))
    back = pick.randrange(1, last)
    with serving(recipe, tmp_path / "out", open_whole) as served:
        served.limit_s = OPENS_S
        rank = served.rank()
        states = []
        for golden in case.steps:
            states.append(rank.state(check(rank.take(), golden)))
            if golden.step in kills:
                kill_one(pick)
        again = served.rank(incarnation="run:1", state=states[back - 1])
        for golden in case.steps[back:]:
            check(again.take(), golden)
        if case.ends:
            assert again.take() is None
        if back < last:
            assert (served.status().replay, served.status().replays_cold) == ("hot", 0)


def test_kept_steps_are_given_at_once_while_another_production_opens(tmp_path: Path) -> None:
    recipe = many_units(tmp_path, files=8, units=40, words=12, execution={"prefetch_steps": 8, "lane_workers": 2})
    pick = random.Random(0)
    with serving(recipe, tmp_path / "out", open_whole) as served:
        served.limit_s = OPENS_S
        rank = served.rank()
        rank.steps(10)
        served.until(lambda: served.status().step == 18)
        kill_one(pick)
        killed = time.monotonic()
        for _ in range(8):
            reply = rank.ask()
            assert reply is not None, "a kept step needs no waiting"
            rank.taken = reply.steps[0].step
        assert time.monotonic() - killed < 1
        rank.steps(19)
        assert time.monotonic() - killed < BACK_S
        assert served.status().reopened == 1
        rank.steps(60)
