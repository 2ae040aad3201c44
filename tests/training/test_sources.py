"""Where a rank's batches come from: what contradicts itself or costs much is refused, and what repeats work says how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.loops import corpus, digests_of, row_digests
from zephon_ray.errors import RecipeError, UserError
from zephon_ray.recipe import Recipe
from zephon_ray.training import sources
from zephon_ray.training.sources import SourceOptions


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return corpus(tmp_path)


def _ranks(monkeypatch: pytest.MonkeyPatch, world: int, local: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"recipe": None}, "neither recipe nor feed"),
        ({"feed": "first", "runner": "threads"}, r"runner='threads': feed='first' is read"),
        ({"feed": "first", "out": "runs/a"}, r"out='runs/a': feed='first' is read"),
        ({"address": "head:6379", "takeover": True}, r"address='head:6379', takeover=True: there is no feed"),
        ({"runner": "threads", "out": "runs/a"}, r"out='runs/a': runner='threads' shares nothing"),
        ({"allow_duplicate_work": True}, "there is no runner in every rank"),
        ({"runner": "ray", "workers": 2}, "workers=2: there is no runner in every rank"),
        ({"runner": "thread"}, "runner='thread': expected one of threads, processes, inline, ray"),
        ({"stream": "valid"}, "stream='valid': expected one of train, validation"),
    ],
)
def test_options_that_contradict_each_other_or_do_not_exist_are_refused(recipe: Recipe, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        sources.check(SourceOptions(**{"recipe": recipe} | options))


def test_a_single_rank_has_threads_of_its_own_and_no_warning(recipe: Recipe, caplog: pytest.LogCaptureFixture) -> None:
    loader = sources.open_loader(SourceOptions(recipe=recipe), 0, 1, None)
    batch = next(loader)
    assert batch.digest.hex() == digests_of(recipe, 1)[0]
    assert loader._runner == "threads"  # type: ignore[attr-defined]
    loader.close()
    assert caplog.text == ""


def test_a_runner_in_every_rank_gives_the_right_rows_and_says_what_it_costs(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _ranks(monkeypatch, 4, 4)
    options = SourceOptions(recipe=recipe, runner="inline")
    rows = []
    for rank in range(4):
        batch = next(sources.open_loader(options, rank, 4, None))
        rows += row_digests(batch.inputs, batch.labels, batch.positions)
    assert "each of 4 ranks reads and tokenises the whole stream for itself: 4 times the work" in caplog.text
    one = next(sources.open_loader(options, 0, 1, None))
    assert rows == row_digests(one.inputs, one.labels, one.positions)


def test_a_runner_in_every_rank_of_several_hosts_is_refused_unless_it_is_asked_for(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    _ranks(monkeypatch, 4, 2)
    with pytest.raises(UserError, match=r"on 2 hosts.*4 times the work.*allow_duplicate_work"):
        sources.open_loader(SourceOptions(recipe=recipe, runner="inline"), 0, 4, None)
    assert sources.open_loader(SourceOptions(recipe=recipe, runner="inline", allow_duplicate_work=True), 0, 4, None)


def test_several_hosts_without_a_feed_are_told_to_serve_one(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    _ranks(monkeypatch, 16, 8)
    with pytest.raises(UserError, match=r"16 ranks are on 2 hosts.*zephon-ray serve"):
        sources.open_loader(SourceOptions(recipe=recipe), 0, 16, None)


def test_ranks_that_no_torchrun_started_cannot_find_a_feed_of_their_host(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(UserError, match="Start them with torchrun"):
        sources.open_loader(SourceOptions(recipe=recipe), 0, 2, None)


def test_hosts_are_those_of_torchrun_else_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    assert sources.hosts() == (1, 1)
    monkeypatch.setenv("SLURM_NTASKS", "16")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert sources.hosts() == (16, 2)
    _ranks(monkeypatch, 8, 8)
    assert sources.hosts() == (8, 1)


def test_other_recipes_of_one_name_have_other_run_directories(tmp_path: Path) -> None:
    one, other = corpus(tmp_path / "a"), corpus(tmp_path / "b", seed=8)
    assert sources.default_out(one) != sources.default_out(other)
    assert sources.default_out(one) == sources.default_out(corpus(tmp_path / "c", execution={"runner": "threads"}))


def test_a_feed_of_another_recipe_is_refused_with_both_values(tmp_path: Path) -> None:
    ours, served = corpus(tmp_path / "a"), corpus(tmp_path / "b", seed=8)
    sources.check_same_recipe(ours, corpus(tmp_path / "c"), "first")
    with pytest.raises(RecipeError, match=r"feed 'first' serves another recipe: seed=7 here, 8 there"):
        sources.check_same_recipe(ours, served, "first")
