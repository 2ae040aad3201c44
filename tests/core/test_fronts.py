"""Fronts take every unit once, and workers that know nothing but entries make them all, whatever is made or delivered again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.runner_suite import ALL, begin, job_of, lines, walk
from zephon_ray.plan.windows import UnitKey
from zephon_ray.runners.base import Job
from zephon_ray.runners.fronts import Grant, SlotWalk, SourceFront
from zephon_ray.runners.ray_worker import BLOCK_BYTES, Entry, blocks, units_of
from zephon_ray.stages.tokenise import UnitTokeniser

EPOCHS = 2
Unit = tuple[int, int, int, bool]
"""(epoch, group, unit, whether it is its group's last)."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Seven files of one to nine units, in three slots, twice."""
    files = {f"s/{i}.jsonl": lines(range(i * 100, i * 100 + 1 + (i * 5) % 11)) for i in range(7)}
    source = {"name": "s", "uri": "s", "epochs": EPOCHS, "window_groups": 3}
    return job_of(tmp_path_factory.mktemp("fronts"), files, [source], unit_bytes=90)


@pytest.fixture(scope="module")
def lasts(job: Job) -> dict[UnitKey, bool]:
    """Every unit of all epochs, and whether it is its group's last."""
    return {unit.key: unit.last for _, units in walk(job, 0, ALL)[0] for unit in units}


class _Workers:
    """The workers of one wave, without their texts: what each has made, in its own order, waits to be delivered."""

    def __init__(self, job: Job, lasts: dict[UnitKey, bool], tasks: int) -> None:
        self._job, self._lasts, self._tasks = job, lasts, tasks
        self._walks: list[SlotWalk] = []
        self.made: list[list[Unit]] = [[] for _ in range(tasks)]

    def grant(self, front: SourceFront, grant: Grant, windows: dict[UnitKey, int]) -> None:
        if not self._walks:
            starts = front.starts()
            shares = [range(task, len(starts), self._tasks) for task in range(self._tasks)]
            self._walks = [SlotWalk(self._job.recipe, self._job.manifests[0], share, grant.epoch, starts) for share in shares]
        for slots, made in zip(self._walks, self.made, strict=True):
            slots.go_to(grant.epoch)
            while (found := slots.next(grant.end)) is not None:
                window, task = found
                assert window < grant.end
                assert window == windows[task.key]
                last = self._lasts[task.key]
                slots.made(last)
                made.append((task.epoch, task.group.group, task.unit, last))


@given(data=st.data(), seed=st.integers(0, 10**6))
def test_every_unit_is_taken_once_whatever_comes_again_or_late(
    job: Job, lasts: dict[UnitKey, bool], data: st.DataObject, seed: int
) -> None:
    pick = random.Random(seed)
    windows = {unit.key: position.window for position, units in walk(job, 0, ALL)[0] for unit in units}
    counted = {unit.key: n for n, (_, units) in enumerate(walk(job, 0, ALL)[0]) for unit in units}
    front = SourceFront(job.recipe, job.manifests[0], begin(job)[0])
    taken: list[UnitKey] = []
    allowed = 0
    waves = [_Workers(job, lasts, data.draw(st.integers(1, 4)))]
    while not front.done:
        action = pick.choice(["allow", "deliver", "deliver", "deliver", "again", "reopen"])
        if action == "allow" or front.owes(allowed) is None:
            allowed += pick.randint(1, 5)
        elif action == "reopen" and len(waves) < 6:
            waves.append(_Workers(job, lasts, pick.randint(1, 4)))  # what older ones made still comes, late
            front.grant_again()
        grant = front.grant(allowed)
        if grant is not None:
            waves[-1].grant(front, grant, windows)
        queues = [queue for wave in waves for queue in wave.made if queue]
        if not queues:
            assert not front.waiting
            continue
        queue = pick.choice(queues)
        unit = queue[0]
        if action == "again":
            again = [unit, *[(e, g, u, lasts[0, e, g, u]) for _, e, g, u in taken[-3:]]]
            queue[:0] = again  # and once more
        queue.remove(unit)
        key = (0, *unit[:3])
        fresh = front.take(*unit)
        assert not (fresh and key in taken), f"{key} was taken twice"
        if fresh:
            taken.append(key)
            assert counted[key] < allowed
    assert sorted(taken) == sorted(lasts)
    assert front.grant(ALL) is None
    assert front.owes(ALL) is None


def test_a_unit_that_failed_ends_its_slot_and_no_other(job: Job, lasts: dict[UnitKey, bool]) -> None:
    front = SourceFront(job.recipe, job.manifests[0], begin(job)[0])
    owed = front.owes(1)
    assert owed is not None
    assert front.grant(ALL) is not None
    assert front.take(owed.epoch, owed.group.group, owed.unit, None)
    assert not front.take(owed.epoch, owed.group.group, owed.unit, lasts[owed.key]), "what failed once stays so"
    assert front.waiting
    while (task := front.owes(ALL)) is not None:
        assert front.take(task.epoch, task.group.group, task.unit, lasts[task.key])
    assert not front.done, "an epoch with a hole never ends"
    assert not front.waiting


def _entries(job: Job) -> list[Entry]:
    """Three, as the runner would give them, across an epoch."""
    front = SourceFront(job.recipe, job.manifests[0], begin(job)[0])
    ends = [end + 1 for end in (position.window for position, _ in walk(job, 0, ALL)[0])]
    longest = max(ends)
    grants = [Grant(source=0, epoch=0, end=2), Grant(source=0, epoch=0, end=longest), Grant(source=0, epoch=1, end=3)]
    return [Entry(starts={0: (0, front.starts())} if n == 0 else {}, grants=(grant,)) for n, grant in enumerate(grants)]


@pytest.mark.parametrize("block_bytes", [300, BLOCK_BYTES])
@pytest.mark.parametrize("broken", [False, True])
def test_a_task_that_runs_again_gives_the_same_blocks(
    block_bytes: int, broken: bool, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gives what a task it ran again yields only from where it had come to: by number, so the blocks must be the same."""
    monkeypatch.setattr("zephon_ray.runners.ray_worker.BLOCK_BYTES", block_bytes)
    if broken:
        files = {f"s/{i}.jsonl": lines(range(i * 100, i * 100 + 1 + (i * 5) % 11)) for i in range(7)}
        job = job_of(tmp_path, files, [{"name": "s", "uri": "s", "epochs": EPOCHS, "window_groups": 3}], unit_bytes=90)
    entries = _entries(job)
    if broken:
        (tmp_path / "s/3.jsonl").unlink()

    def run(tokeniser: UnitTokeniser, task: int) -> Iterator[bytes]:
        for table in blocks(job, tokeniser, task, 2, lambda number: entries[number] if number < len(entries) else None):
            sink = table.to_batches()
            assert len(sink) == 1, "one block, one piece"
            yield sink[0].serialize().to_pybytes()
            assert list(units_of(table))

    used = UnitTokeniser(job.options)
    for task in range(2):
        first = list(run(used, task))
        assert first
        assert list(run(UnitTokeniser(job.options), task)) == first, "in a new process"
        assert list(run(used, task)) == first, "in one that made them before"


def test_a_block_of_a_task_that_made_nothing_holds_nothing() -> None:
    """Ray Data gives one for such a task, without a row and a column."""
    assert list(units_of(pa.table({}))) == []
