"""Random recipes: the product and the slow reference of the contract give the same bytes, states and ends."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

import zephon_ray
from tests.corpora import Corpus, corpora, steps_worth
from tests.reference import Batch, Run
from tests.reference.product import state_as_plain
from zephon_ray.errors import SourceError
from zephon_ray.stream import Stream

RANDOM = settings(
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],  # to explain a failure would trace every line of both sides
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
pytestmark = pytest.mark.timeout(600)  # to shrink a failure takes minutes; to pass does not


@contextmanager
def written(corpus: Corpus) -> Iterator[tuple[zephon_ray.Recipe, list[Batch], bool]]:
    """(the recipe as the product reads it, what the reference gives for it, whether its stream ends there)."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = zephon_ray.load_recipe(corpus.write(Path(folder)))
        steps = steps_worth(corpus.recipe)
        batches = list(islice(Run(corpus.recipe, Path(folder)), steps + 1))
        yield recipe, batches[:steps], len(batches) <= steps


def rows_of(batch: Batch, rank: int, ranks: int) -> list[np.ndarray]:
    """Inputs, labels and positions of a rank's rows."""
    size = len(batch.rows) // ranks
    columns = zip(*batch.rows[rank * size : (rank + 1) * size], strict=True)
    return [np.array(column, dtype) for column, dtype in zip(columns, (np.uint32, np.int32, np.int32), strict=True)]


def check_batch(got: Any, expected: Batch, rank: int, ranks: int) -> None:
    assert (got.step, got.digest.hex(), got.chain.hex()) == (expected.step, expected.digest.hex(), expected.chain.hex())
    assert tuple(int(pairs) for pairs in got.pairs) == expected.pairs
    for array, reference in zip((got.inputs, got.labels, got.positions), rows_of(expected, rank, ranks), strict=True):
        assert array.dtype == reference.dtype
        np.testing.assert_array_equal(array, reference)


def check_run(corpus: Corpus, data: st.DataObject) -> None:
    """A rank takes the whole stream; before and after every batch its state is the contract's."""
    best_fit = corpus.recipe["packing"]["algorithm"] == "best_fit"
    ranks, rank = data.draw(ranks_of(corpus.recipe), label="ranks")
    with written(corpus) as (recipe, expected, ends):
        event(f"packing {corpus.recipe['packing']['algorithm']}, {'ends' if ends else 'goes on'}")
        with zephon_ray.Loader(recipe, runner="inline", dp_rank=rank, dp_world_size=ranks) as loader:
            before = Run(corpus.recipe, Path(recipe.folder)).state
            assert state_as_plain(loader.state_dict(), best_fit=best_fit) == before
            stream = iter(loader)
            for batch in expected:
                check_batch(next(stream), batch, rank, ranks)
                assert state_as_plain(loader.state_dict(), best_fit=best_fit) == batch.state
            if ends and not expected:
                with pytest.raises(SourceError, match="ends before the first global batch"):
                    next(stream)
            elif ends:
                assert next(stream, None) is None
            if ends:
                after = expected[-1].state if expected else before
                assert state_as_plain(loader.state_dict(), best_fit=best_fit) == after


def check_resumed(corpus: Corpus, data: st.DataObject) -> None:
    """A run is stopped after any step and goes on at another number of ranks, and once more after that."""
    best_fit = corpus.recipe["packing"]["algorithm"] == "best_fit"
    with written(corpus) as (recipe, expected, ends):
        stops = sorted(data.draw(st.lists(st.integers(0, len(expected)), min_size=1, max_size=3), label="stops"))
        state, at = None, 0
        for stop in [*stops, len(expected)]:
            ranks, rank = data.draw(ranks_of(corpus.recipe), label="ranks")
            with zephon_ray.Loader(recipe, runner="inline", dp_rank=rank, dp_world_size=ranks, state=state) as loader:
                if state is not None:
                    assert loader.state_dict() == state
                for got, batch in zip(islice(loader, stop - at), expected[at:stop], strict=True):
                    check_batch(got, batch, rank, ranks)
                state, at = loader.state_dict(), stop
                assert stop == 0 or state_as_plain(state, best_fit=best_fit) == expected[stop - 1].state
                if ends and expected and stop == len(expected):
                    assert next(iter(loader), None) is None


def check_first_used(corpus: Corpus, data: st.DataObject) -> None:
    """What the ledger keeps of a step beyond its batch: the windows that it is the first to use, and the records left out of them."""
    with written(corpus) as (recipe, expected, _):
        stop = data.draw(st.integers(0, len(expected)), label="stop")
        state = None
        for batches in (expected[:stop], expected[stop:]):
            stream = Stream(recipe, runner="inline", state=state)
            try:
                for batch in batches:
                    got = stream.next_batch()
                    assert got is not None
                    assert plain_windows(got) == [
                        (s, epoch, window, [(group, unit, digest) for group, unit, digest, _ in units])
                        for s, epoch, window, units in batch.first_used
                    ]
                    assert dict(got.left_out) == left_out(batch)
                state = stream.state_bytes()
            finally:
                stream.close()


def left_out(batch: Batch) -> dict[int, tuple[int, ...]]:
    """The sums of (bad, empty, short) a source, of those that left anything out."""
    counts: dict[int, list[tuple[int, ...]]] = {}
    for source, _, _, units in batch.first_used:
        counts.setdefault(source, []).extend(records for *_, records in units)
    totals = {source: tuple(map(sum, zip(*of_units, strict=True))) for source, of_units in counts.items()}
    return {source: total for source, total in totals.items() if any(total)}


def plain_windows(batch: zephon_ray.GlobalBatch) -> list[tuple[int, int, int, list[tuple[int, int, int]]]]:
    return [(s, w.epoch, w.window, list(w.units)) for s, windows in sorted(batch.windows.items()) for w in windows]


@st.composite
def ranks_of(draw: st.DrawFn, recipe: dict[str, Any]) -> tuple[int, int]:
    """(dp size, one of its ranks)."""
    rows = recipe["global_batch_size"]
    ranks = draw(st.sampled_from([n for n in range(1, rows + 1) if rows % n == 0]))
    return ranks, draw(st.integers(0, ranks - 1))


@settings(RANDOM, max_examples=30)
@given(corpora(), st.data())
def test_batches_states_and_end_are_those_of_the_contract(corpus: Corpus, data: st.DataObject) -> None:
    check_run(corpus, data)


@settings(RANDOM, max_examples=20)
@given(corpora(), st.data())
def test_a_run_resumed_at_other_sizes_goes_on_as_if_it_had_not_stopped(corpus: Corpus, data: st.DataObject) -> None:
    check_resumed(corpus, data)


@settings(RANDOM, max_examples=20)
@given(corpora(), st.data())
def test_windows_are_first_used_at_the_step_that_the_contract_says(corpus: Corpus, data: st.DataObject) -> None:
    check_first_used(corpus, data)


@pytest.mark.long
@settings(RANDOM, max_examples=2000)
@given(corpora(), st.data())
def test_many_runs_are_those_of_the_contract(corpus: Corpus, data: st.DataObject) -> None:
    check_run(corpus, data)


@pytest.mark.long
@settings(RANDOM, max_examples=1000)
@given(corpora(), st.data())
def test_many_runs_resumed_at_other_sizes_go_on_as_if_they_had_not_stopped(corpus: Corpus, data: st.DataObject) -> None:
    check_resumed(corpus, data)


@pytest.mark.long
@settings(RANDOM, max_examples=1000)
@given(corpora(), st.data())
def test_many_windows_are_first_used_at_the_step_that_the_contract_says(corpus: Corpus, data: st.DataObject) -> None:
    check_first_used(corpus, data)
