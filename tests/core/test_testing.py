"""What the public assertions promise: a sound recipe passes, and each kind of broken loader is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zephon_ray.testing as testing
from zephon_ray.batches import Batch
from zephon_ray.errors import RecipeError
from zephon_ray.loader import Loader
from zephon_ray.recipe import load_recipe
from zephon_ray.testing import assert_elastic, assert_resumable, tiny_corpus


def test_a_tiny_corpus_is_resumable_and_elastic(tmp_path: Path) -> None:
    path = tiny_corpus(tmp_path)
    assert_resumable(path, 6)
    assert_elastic(path, 4)


def test_a_recipe_of_other_packing_and_lanes_too(tmp_path: Path) -> None:
    recipe = load_recipe(tiny_corpus(tmp_path, sources=["only"], lanes=4, global_batch_size=12, packing={"algorithm": "best_fit"}))
    assert_resumable(recipe, 5, at=[0, 3], runner="threads")
    assert_elastic(recipe, 3, dp_sizes=[3, 12])


def test_a_tiny_corpus_has_the_same_bytes_everywhere(tmp_path: Path) -> None:
    one, other = tiny_corpus(tmp_path / "one"), tiny_corpus(tmp_path / "other")
    files = sorted(path.relative_to(one.parent) for path in one.parent.rglob("*") if path.is_file())
    assert len(files) == 8
    assert all((one.parent / file).read_bytes() == (other.parent / file).read_bytes() for file in files)
    assert sum((one.parent / file).stat().st_size for file in files) < 100_000
    with pytest.raises(RecipeError, match="lanes=3"):
        tiny_corpus(tmp_path / "wrong", lanes=3)


def test_what_would_compare_nothing_is_refused(tmp_path: Path) -> None:
    recipe = load_recipe(tiny_corpus(tmp_path, sources=["a"], texts=3))
    with pytest.raises(ValueError, match="steps=0: at least 1"):
        assert_resumable(recipe, 0)
    for at in ([], [3], [-1, 2]):
        with pytest.raises(ValueError, match="name at least one step, each of 0 to 2"):
            assert_resumable(recipe, 3, at=at)
    with pytest.raises(ValueError, match="dp_sizes is empty"):
        assert_elastic(recipe, 1, dp_sizes=[])
    with pytest.raises(RecipeError, match="dp_world_size=3"):
        assert_elastic(recipe, 1, dp_sizes=[3])
    short = load_recipe(tiny_corpus(tmp_path, texts=3), ["sources[0].epochs=1", "sources[1].epochs=1"])
    with pytest.raises(AssertionError, match="the stream ends before step"):
        assert_resumable(short, 500, at=[0])


class Forgetful(Loader):
    """Begins anew whatever state it is given."""

    def __init__(self, *args: Any, state: Any = None, **more: Any) -> None:
        super().__init__(*args, **more)


class Stale(Loader):
    """Its state is always that of the beginning."""

    def state_dict(self) -> dict[str, bytes]:
        with Loader(self.recipe) as fresh:
            return fresh.state_dict()


class Altering(Loader):
    """Gives other batches once it was resumed, or to all but one rank alone."""

    alter: Callable[[Batch], Batch]

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.altered = more.get("state") is not None or more.get("dp_world_size", 1) > 1

    def __next__(self) -> Batch:
        batch = super().__next__()
        return type(self).alter(batch) if self.altered and batch.step == 3 else batch


def altering(alter: Callable[[Batch], Batch]) -> type[Loader]:
    return type("Altered", (Altering,), {"alter": staticmethod(alter)})


WRONG_LABEL = altering(lambda batch: replace(batch, labels=batch.labels + (batch.labels == batch.labels.max())))
WRONG_TYPE = altering(lambda batch: replace(batch, inputs=batch.inputs.astype("<i8")))
WRONG_CHAIN = altering(lambda batch: replace(batch, chain=bytes(16)))
FEWER_ROWS = altering(lambda batch: replace(batch, positions=batch.positions[:-1]))


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (Forgetful, "resumed after step 2: its state is not the one that was loaded"),
        (Stale, "resumed after step 2: .* step 1 where step 3 was due"),
        (WRONG_LABEL, "resumed after step 2: labels of step 3"),
        (WRONG_TYPE, "resumed after step 2: inputs of step 3"),
        (WRONG_CHAIN, "resumed after step 2: chain of step 3"),
        (FEWER_ROWS, "resumed after step 2: positions of step 3"),
    ],
)
def test_a_loader_that_resumes_wrongly_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: type[Loader], said: str) -> None:
    path = tiny_corpus(tmp_path)
    monkeypatch.setattr(testing, "Loader", loader)
    with pytest.raises(AssertionError, match=said):
        assert_resumable(path, 4, at=[2])


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (WRONG_LABEL, "rank 0 of 2: labels of step 3"),
        (WRONG_CHAIN, "rank 0 of 2: chain of step 3"),
        (FEWER_ROWS, "rank 0 of 2: positions of step 3"),
    ],
)
def test_a_loader_that_gives_ranks_other_rows_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: type[Loader], said: str
) -> None:
    path = tiny_corpus(tmp_path)
    monkeypatch.setattr(testing, "Loader", loader)
    with pytest.raises(AssertionError, match=said):
        assert_elastic(path, 4, dp_sizes=[2])


def test_a_digest_that_is_not_that_of_the_rows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lying(Loader):
        def __next__(self) -> Batch:
            return replace(super().__next__(), digest=bytes(16))

    monkeypatch.setattr(testing, "Loader", Lying)
    with pytest.raises(AssertionError, match="step 1: digest or chain is not that of its rows"):
        assert_elastic(tiny_corpus(tmp_path), 1)
