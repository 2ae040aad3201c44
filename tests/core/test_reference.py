"""The slow reference itself: it agrees with the golden cases, and the state that it keeps is enough to go on from."""

from __future__ import annotations

import tempfile
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.corpora import Corpus, corpora, steps_worth
from tests.golden_cases import GoldenCase
from tests.reference import Batch, Run, reference_batches

SLOW_DATA = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def plain(batches: Any) -> list[tuple[Any, ...]]:
    return [(batch.step, batch.rows, batch.digest, batch.chain, batch.pairs, batch.state, batch.first_used) for batch in batches]


def test_the_reference_agrees_with_the_golden_case(golden_case: GoldenCase) -> None:
    recipe = yaml.safe_load(golden_case.recipe.read_text(encoding="utf-8"))
    stream = reference_batches(recipe, golden_case.recipe.parent)
    for expected in golden_case.steps:
        step, _, digest, chain, pairs = next(stream)
        assert (step, digest, chain, pairs) == (expected.step, expected.digest, expected.chain, expected.pairs)
    assert (next(stream, None) is None) == golden_case.ends


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW_DATA)
@given(corpora(), st.data())
def test_a_run_goes_on_from_any_state_as_if_it_had_not_stopped(corpus: Corpus, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus.write(Path(folder))
        whole = list(islice(Run(corpus.recipe, Path(folder)), steps_worth(corpus.recipe, 4000)))
        step = data.draw(st.integers(0, len(whole)), label="step")
        state = Run(corpus.recipe, Path(folder)).state if step == 0 else whole[step - 1].state
        resumed = Run(corpus.recipe, Path(folder), state)
        assert resumed.state == state
        assert plain(islice(resumed, len(whole) - step)) == plain(whole[step:])


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW_DATA)
@given(corpora())
def test_one_epoch_with_nothing_dropped_gives_every_pair_once(corpus: Corpus) -> None:
    recipe = corpus.recipe | {"on_exhausted": "continue", "final_batch": "pad"}
    recipe["sources"] = [source | {"epochs": 1} for source in recipe["sources"]]
    with tempfile.TemporaryDirectory() as folder:
        corpus.write(Path(folder))
        run = Run(recipe, Path(folder))
        batches: list[Batch] = list(run)
    given_pairs = sorted((x, y) for batch in batches for row in batch.rows for x, y, _ in zip(*row, strict=True) if y != -100)
    documents = [ids for source in run.sources for units in source.groups for unit in units for ids in unit.documents]
    assert given_pairs == sorted(pair for ids in documents for pair in pairwise(ids))
    used = [(s, epoch, window) for batch in batches for s, epoch, window, _ in batch.first_used]
    assert len(used) == len(set(used))
