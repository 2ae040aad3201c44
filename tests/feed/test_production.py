"""Productions: the contract's bytes from any number of lane workers, and no token in the process that orders them."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import ray

from tests.golden_cases import GoldenCase
from zephon_ray.batches import GlobalBatch
from zephon_ray.collector import prepare
from zephon_ray.feed.production import ProducedStep, Production
from zephon_ray.recipe import load_recipe
from zephon_ray.runners.base import Job
from zephon_ray.state import Identity, to_bytes
from zephon_ray.stream import Stream

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(300)]


def unbroken(job: Job, identity: Identity, steps: int) -> list[GlobalBatch]:
    """The first steps of a stream without Ray."""
    with closing(Stream(job.recipe, runner="inline", prepared=(job, identity))) as stream:
        return [batch for _ in range(steps) if (batch := stream.next_batch()) is not None]


def rows_of(produced: ProducedStep) -> np.ndarray:
    """The rows of a step, from its blocks, which must cover them in order."""
    at, parts = 0, []
    for block in produced.blocks:
        rows = ray.get(block.ref)
        assert (block.first_row, block.rows) == (at, len(rows))
        parts.append(rows)
        at += block.rows
    return np.concatenate(parts)


def check_same(produced: ProducedStep | None, expected: GlobalBatch, identity: Identity) -> ProducedStep:
    assert produced is not None, f"the stream ended before step {expected.step}"
    step = produced.step
    assert (step.step, step.digest.hex(), step.chain.hex()) == (expected.step, expected.digest.hex(), expected.chain.hex())
    assert step.ledger_line == expected.ledger_line
    assert step.row_digests == expected.row_digests
    assert to_bytes(step.state, identity) == to_bytes(expected.state, identity)
    return produced


def check_whole(case: GoldenCase, lane_workers: int) -> None:
    job, identity = prepare(load_recipe(case.recipe))
    steps = len(case.steps)
    expected = unbroken(job, identity, steps)
    assert [(b.digest.hex(), b.chain.hex(), b.pairs) for b in expected] == [(s.digest, s.chain, s.pairs) for s in case.steps]
    with closing(Production(job, lane_workers=lane_workers, block_bytes=1 << 12)) as production:
        for batch in expected:
            produced = check_same(production.next_step(), batch, identity)
            if batch.step in (1, steps):
                np.testing.assert_array_equal(rows_of(produced), batch.rows)
        if case.ends:
            assert production.next_step() is None
            assert production.next_step() is None


IN_SHORT = ["best_fit_pad", "rare_source", "compressed_edges"]


@pytest.mark.parametrize("lane_workers", [1, 2, 4])
@pytest.mark.parametrize("name", IN_SHORT)
def test_any_number_of_lane_workers_gives_the_contracts_bytes(name: str, lane_workers: int, golden_cases: dict[str, GoldenCase]) -> None:
    check_whole(golden_cases[name], lane_workers)


@pytest.mark.long
@pytest.mark.parametrize("lane_workers", [1, 2, 4])
def test_any_number_of_lane_workers_gives_the_contracts_bytes_in_every_case(golden_case: GoldenCase, lane_workers: int) -> None:
    check_whole(golden_case, lane_workers)
