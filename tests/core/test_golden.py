"""The promise on the golden cases: the contract's bytes, whole or resumed at every step, at every data-parallel size."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden_cases import GoldenCase
from zephon_ray.batches import GlobalBatch, fold
from zephon_ray.collector import prepare
from zephon_ray.hashing import digest128
from zephon_ray.recipe import load_recipe
from zephon_ray.state import from_bytes, to_bytes
from zephon_ray.stream import Stream


def check(batch: GlobalBatch | None, case: GoldenCase, step: int) -> GlobalBatch:
    expected = case.steps[step - 1]
    assert batch is not None, f"{case.name}: the stream ended before step {step}"
    assert (batch.step, batch.digest.hex(), batch.chain.hex(), batch.pairs) == (step, expected.digest, expected.chain, expected.pairs)
    return batch


def fold_ranks(batch: GlobalBatch, size: int) -> bytes:
    """The digest of the global batch from what `size` ranks are given."""
    digests = []
    for rank in range(size):
        part = batch.of_rank(rank, size)
        assert part.inputs.shape == part.labels.shape == part.positions.shape == (len(batch.rows) // size, batch.rows.shape[2])
        assert (part.inputs.dtype, part.labels.dtype, part.positions.dtype) == (np.uint32, np.int32, np.int32)
        for x, y, p in zip(part.inputs, part.labels, part.positions, strict=True):
            digests.append(digest128(x.tobytes() + y.tobytes() + p.tobytes()))
    return fold(batch.step, bytes(16), digests)[0]


def run_whole(case: GoldenCase, runner: str) -> None:
    recipe = load_recipe(case.recipe)
    stream = Stream(recipe, runner=runner, workers=2)
    try:
        for step in range(1, len(case.steps) + 1):
            batch = check(stream.next_batch(), case, step)
            if step in (1, len(case.steps)):
                assert {fold_ranks(batch, size) for size in recipe.legal_dp_sizes()} == {batch.digest}
        if case.ends:
            assert stream.next_batch() is None
            assert stream.next_batch() is None
    finally:
        stream.close()


def test_whole_runs_give_the_contracts_digests_at_every_dp_size(golden_case: GoldenCase) -> None:
    run_whole(golden_case, "inline")


def test_threads_give_the_contracts_digests(golden_case: GoldenCase) -> None:
    run_whole(golden_case, "threads")


PROCESSES = ["best_fit_pad", "compressed_edges"]


@pytest.mark.parametrize("name", PROCESSES)
def test_processes_give_the_contracts_digests(name: str, golden_cases: dict[str, GoldenCase]) -> None:
    run_whole(golden_cases[name], "processes")


@pytest.mark.long
def test_processes_give_the_contracts_digests_in_every_case(golden_case: GoldenCase) -> None:
    run_whole(golden_case, "processes")


@pytest.mark.timeout(600)
def test_every_step_can_be_resumed_and_saves_the_state_of_the_unbroken_run(golden_case: GoldenCase) -> None:
    """Each resume makes two steps; as the states after them equal the unbroken run's, so does all that follows."""
    recipe = load_recipe(golden_case.recipe)
    prepared = prepare(recipe)
    stream = Stream(recipe, runner="inline", prepared=prepared)
    batches = [check(stream.next_batch(), golden_case, step) for step in range(1, len(golden_case.steps) + 1)]
    ended = stream.next_batch() is None if golden_case.ends else False
    identity = stream.identity
    states = [to_bytes(Stream(recipe, runner="inline", prepared=prepared).state, identity), *(to_bytes(b.state, identity) for b in batches)]
    for start, state in enumerate(states):
        assert to_bytes(from_bytes(state, identity), identity) == state
        resumed = Stream(recipe, runner="inline", state=state, prepared=prepared)
        assert resumed.state_bytes() == state
        for step in range(start + 1, min(start + 3, len(states))):
            batch = check(resumed.next_batch(), golden_case, step)
            assert to_bytes(batch.state, identity) == states[step]
            assert batch.ledger_line == batches[step - 1].ledger_line
        if ended and start >= len(states) - 2:
            assert resumed.next_batch() is None


def test_states_are_small(golden_case: GoldenCase) -> None:
    recipe = load_recipe(golden_case.recipe)
    stream = Stream(recipe, runner="inline")
    bound = 2048 + 64 * recipe.lanes * len(recipe.sources)
    for _ in golden_case.steps:
        stream.next_batch()
        assert len(stream.state_bytes()) <= bound
