"""A schedule hands out what a cursor walks through, whatever the workers do."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import tokenizer_json
from zephon_ray.errors import StateError
from zephon_ray.manifest import Shard, SourceManifest
from zephon_ray.plan.windows import Position, SourceCursor, UnitKey, UnitTask
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.runners.schedule import Schedule, Work

UNIT_BYTES = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "tokenizer.json").write_text(tokenizer_json())
    return folder


def recipe_of(epochs: list[int | None], width: int, folder: Path) -> Recipe:
    data: dict[str, Any] = {
        "schema": 1,
        "name": "schedule",
        "seed": 7,
        "lanes": 1,
        "sequence_length": 8,
        "global_batch_size": 1,
        "tokenizer": {"path": "tokenizer.json"},
        "sources": [{"name": f"s{i}", "uri": f"s{i}", "epochs": n} for i, n in enumerate(epochs)],
        "shuffle": {"window_groups": width},
        "unit_bytes": UNIT_BYTES,
    }
    return recipe_from_dict(data, folder)


def shard(number: int, kind: str, size: int) -> Shard:
    """A shard of `size` units: so many groups of a unit each, or one group of so many units."""
    path = f"{number:03}"
    if kind == "plain":
        return Shard(path=path, url=path, size=size * UNIT_BYTES, format="jsonl")
    if kind == "parquet":
        return Shard(path=path, url=path, size=1, format="parquet", row_groups=((size, size * UNIT_BYTES),))
    return Shard(path=path, url=path, size=1, format="jsonl", compression="zst")


shards = st.lists(st.tuples(st.sampled_from(["plain", "parquet", "compressed"]), st.integers(1, 5)), max_size=6)


class Source:
    """A made-up source that knows how many units its groups have."""

    def __init__(self, source: int, parts: list[tuple[str, int]]) -> None:
        self.manifest = SourceManifest.of(
            source=source,
            name=f"s{source}",
            text_field="text",
            unit_bytes=UNIT_BYTES,
            shards=[shard(number, *part) for number, part in enumerate(parts)],
        )
        self._sizes = {f"{number:03}": size for number, (_, size) in enumerate(parts)}

    def is_last(self, task: UnitTask) -> bool:
        return task.unit + 1 == (task.group.units or self._sizes[task.group.shard.path])

    def windows(self, recipe: Recipe, start: Position | None, count: int) -> list[list[UnitKey]]:
        """The units of the first `count` windows from a position on, by the cursor alone."""
        cursor = SourceCursor(recipe, self.manifest, start)
        walked = []
        while len(walked) < count and not cursor.done:
            tasks = cursor.tasks()
            walked.append([task.key for task in tasks])
            cursor.advance([self.is_last(task) for task in tasks])
        return walked


def position_after(recipe: Recipe, source: Source, windows: int) -> Position:
    cursor = SourceCursor(recipe, source.manifest)
    for _ in range(windows):
        if not cursor.done:
            cursor.advance([source.is_last(task) for task in cursor.tasks()])
    return cursor.position


@given(data=st.data())
def test_any_workers_make_the_allowed_windows_and_nothing_else(data: st.DataObject, folder: Path) -> None:
    parts = data.draw(st.lists(shards, min_size=1, max_size=3))
    epochs = data.draw(st.lists(st.sampled_from([1, 2, None]), min_size=len(parts), max_size=len(parts)))
    recipe = recipe_of(epochs, data.draw(st.integers(1, 4)), folder)
    sources = [Source(number, part) for number, part in enumerate(parts)]
    starts = [position_after(recipe, source, data.draw(st.integers(0, 9))) for source in sources]
    workers = data.draw(st.integers(1, 4))
    schedule = Schedule(recipe, [source.manifest for source in sources], starts, workers)
    allowed = [0] * len(sources)
    busy: dict[int, Work] = {}
    given_out: list[dict[int, list[UnitKey]]] = [defaultdict(list) for _ in sources]
    owners: dict[tuple[int, int, int], int] = {}

    def finish(worker: int) -> None:
        work = busy.pop(worker)
        schedule.made(work, sources[work.task.group.source].is_last(work.task))

    def begin(worker: int) -> bool:
        work = schedule.next(worker)
        if work is None:
            return False
        busy[worker] = work
        source = work.task.group.source
        assert work.window < allowed[source]
        given_out[source][work.window].append(work.task.key)
        if work.task.group.streamed:
            assert owners.setdefault(work.task.key[:3], worker) == worker
        return True

    def begin_all() -> int:
        return sum(begin(worker) for worker in range(workers) if worker not in busy)

    for _ in range(data.draw(st.integers(1, 25))):
        action, number = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 11))
        if action == 0:
            allowed[number % len(sources)] += 1
            schedule.allow(number % len(sources), allowed[number % len(sources)])
        elif number % workers in busy:
            finish(number % workers)
        else:
            begin(number % workers)
    while begin_all() or busy:
        for worker in list(busy):
            finish(worker)
    assert schedule.unmade == 0
    for source, start, count, got in zip(sources, starts, allowed, given_out, strict=True):
        want = source.windows(recipe, start, count)
        assert [sorted(got[window]) for window in range(len(got))] == [sorted(window) for window in want]


def only(parts: list[tuple[str, int]], folder: Path, *, width: int, workers: int, epochs: int | None = 1) -> Schedule:
    return Schedule(recipe_of([epochs], width, folder), [Source(0, parts).manifest], [position_of(parts, width)], workers)


def position_of(parts: list[tuple[str, int]], width: int) -> Position:
    groups = sum(size if kind == "plain" else 1 for kind, size in parts)
    return Position(epoch=0, window=0, places=((0, 0),) * min(width, groups))


def test_a_slow_stream_does_not_hold_up_the_windows_of_the_others(folder: Path) -> None:
    schedule = only([("compressed", 9), ("compressed", 9)], folder, width=2, workers=2)
    schedule.allow(0, 5)
    slow = schedule.next(0)
    windows = []
    while (work := schedule.next(1)) is not None:
        windows.append(work.window)
        schedule.made(work, last=False)
    assert slow is not None
    assert windows == [0, 1, 2, 3, 4]


def test_streams_are_shared_out_evenly(folder: Path) -> None:
    schedule = only([("compressed", 9)] * 4, folder, width=4, workers=2)
    schedule.allow(0, 1)
    assert sum(schedule.next(0) is not None for _ in range(3)) == 2
    assert sum(schedule.next(1) is not None for _ in range(3)) == 2


def test_the_source_that_waited_longest_comes_first(folder: Path) -> None:
    sources = [Source(0, [("plain", 9)]), Source(1, [("plain", 9)])]
    recipe = recipe_of([1, 1], 1, folder)
    schedule = Schedule(recipe, [s.manifest for s in sources], [position_of([("plain", 9)], 1)] * 2, 1)
    schedule.allow(0, 2)
    schedule.allow(1, 4)
    order = [(work.task.group.source, work.window) for _ in range(6) if (work := schedule.next(0)) is not None]
    assert order == [(1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (1, 3)]


def test_a_failed_unit_ends_its_slot_and_no_other(folder: Path) -> None:
    schedule = only([("compressed", 3), ("parquet", 3)], folder, width=2, workers=1)
    schedule.allow(0, 100)
    made = 0
    while (work := schedule.next(0)) is not None:
        made += 1
        schedule.made(work, None if work.task.group.shard.compression else work.task.unit == 2)
    assert made == 4
    assert schedule.unmade == 0


def test_a_position_that_does_not_fit_is_refused(folder: Path) -> None:
    recipe = recipe_of([1], 2, folder)
    with pytest.raises(StateError, match="does not fit"):
        Schedule(recipe, [Source(0, [("plain", 2)]).manifest], [Position(epoch=0, window=0, places=((0, 0),) * 3)], 1)
