"""The contract of runners as tests, inherited by the tests of every runner.

A subclass says how its runner is made. Everything here is real: files are read, units are made, workers are held and killed.
"""

from __future__ import annotations

import gc
import gzip
import io
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from tests.corpora import tokenizer_json
from zephon_ray.errors import RunnerError, SourceError, StateError
from zephon_ray.manifest import build_manifests
from zephon_ray.plan.windows import Position, SourceCursor
from zephon_ray.recipe import recipe_from_dict
from zephon_ray.runners.base import FailedUnit, Job, Runner
from zephon_ray.stages.tokenise import UnitTokeniser, make_options
from zephon_ray.stages.unit import TokenisedUnit
from zephon_ray.storage import Storage

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

WAIT_S = 60.0
ALL = 10**6
"""More windows than any source here has that comes to an end."""


# --- what there is to make ------------------------------------------------------------------------------------------


def text(number: int, words: int) -> str:
    return " ".join(f"w{(number * 7919 + i * i) % 997}" for i in range(words))


def lines(numbers: Sequence[int], words: int = 12) -> bytes:
    return b"".join(json.dumps({"text": text(number, words)}).encode() + b"\n" for number in numbers)


def parquet(numbers: Sequence[int], rows: int) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": [text(n, 12) for n in numbers]}), sink, row_group_size=rows, use_dictionary=False)
    return sink.getvalue()


def arrow(numbers: Sequence[int], rows: int) -> bytes:
    table, sink = pa.table({"text": [text(n, 12) for n in numbers]}), io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


FILES = {
    "plain/a.jsonl": lines(range(40)),
    "plain/b.jsonl": b"",
    "plain/c.jsonl": lines(range(40, 50)) + b"\n \n" + lines([50, 51]),
    "packed/a.jsonl.gz": gzip.compress(lines(range(100, 130)), mtime=0),
    "packed/b.jsonl.zst": zstd.compress(lines(range(130, 150)) + lines([150], 400) + lines([151, 152])),
    "packed/c.jsonl.zst": zstd.compress(b""),
    "packed/d.jsonl.gz": b"",
    "packed/e.jsonl.zst": zstd.compress(lines([160])),
    "rows/a.parquet": parquet(range(200, 260), 20),
    "rows/b.arrow": arrow(range(260, 290), 10),
}
"""Files of every format, of one unit and of many, and empty ones."""


def job_of(folder: Path, files: dict[str, bytes], sources: list[dict[str, Any]], **fields: Any) -> Job:
    """A job that reads the given files, written into `folder`."""
    for path, data in {**files, "tokenizer.json": tokenizer_json().encode()}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    recipe = recipe_from_dict(
        {
            "schema": 1,
            "name": "runner",
            "seed": 3,
            "lanes": 1,
            "sequence_length": 64,
            "global_batch_size": 1,
            "tokenizer": {"path": "tokenizer.json", "eos": "<|eos|>"},
            "sources": sources,
            "unit_bytes": 500,
            **fields,
        },
        folder,
    )
    return Job(recipe=recipe, manifests=build_manifests(recipe, Storage(recipe.execution.storage)), options=make_options(recipe))


@pytest.fixture(scope="session")
def mixed_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Three sources that differ in slots, epochs and formats; the last one goes on for ever."""
    sources: list[dict[str, Any]] = [
        {"name": "plain", "uri": "plain", "epochs": 2, "window_groups": 4},
        {"name": "packed", "uri": "packed", "epochs": 3, "window_groups": 2},
        {"name": "rows", "uri": "rows", "window_groups": 3},
    ]
    return job_of(tmp_path_factory.mktemp("mixed"), FILES, sources)


# --- what must come of it -------------------------------------------------------------------------------------------

Window = tuple[Position, list[TokenisedUnit]]


_walked: dict[tuple[int, int, int], tuple[Job, list[Window], Position]] = {}


def walk(job: Job, source: int, windows: int) -> tuple[list[Window], Position]:
    """The first windows of a source, each with its position and units, by a cursor and a lone tokeniser; and the position after."""
    key = id(job), source, windows  # the job is kept with it, so its id stays its own
    if key not in _walked:
        _walked[key] = job, *_walk(job, source, windows)
    return _walked[key][1:]


def _walk(job: Job, source: int, windows: int) -> tuple[list[Window], Position]:
    cursor, tokeniser = SourceCursor(job.recipe, job.manifests[source]), UnitTokeniser(job.options)
    walked: list[Window] = []
    while len(walked) < windows and not cursor.done:
        units = [tokeniser.tokenise(task) for task in cursor.tasks()]
        walked.append((cursor.position, units))
        cursor.advance([unit.last for unit in units])
    tokeniser.close()
    return walked, cursor.position


def begin(job: Job) -> list[Position]:
    return [SourceCursor(job.recipe, manifest).position for manifest in job.manifests]


def plain(unit: TokenisedUnit | FailedUnit) -> tuple[Any, ...]:
    """All that a unit says, to be compared."""
    assert isinstance(unit, TokenisedUnit), f"{unit.key} failed: {unit.error!r}"
    assert (str(unit.ids.dtype), str(unit.offsets.dtype)) == ("uint32", "int64")
    values = (unit.key, unit.last, unit.ids.tolist(), unit.offsets.tolist(), unit.digest, unit.text_bytes)
    return (*values, unit.bad, unit.empty, unit.short, unit.bad_examples, unit.error)


def take_all(runner: Runner) -> list[TokenisedUnit | FailedUnit]:
    """Every unit that is allowed."""
    units = []
    while True:
        try:
            units.append(runner.take(WAIT_S))
        except RunnerError as error:
            if "was given" not in str(error):
                raise
            return units


def same(got: Sequence[TokenisedUnit | FailedUnit], want: Sequence[TokenisedUnit]) -> None:
    by_key = sorted(map(plain, got)), sorted(map(plain, want))
    assert [unit[0] for unit in by_key[0]] == [unit[0] for unit in by_key[1]]
    assert by_key[0] == by_key[1]


# --- what a process holds -------------------------------------------------------------------------------------------


def holdings() -> tuple[set[str], list[int], int]:
    """Names of threads, children, and the number of open files."""
    gc.collect()  # what an earlier test left in a cycle is not to vanish in the middle of this one
    process = psutil.Process()
    return {thread.name for thread in threading.enumerate()}, [child.pid for child in process.children(recursive=True)], process.num_fds()


def eventually(condition: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
    """Poll for something that another process does."""
    end, pause = time.monotonic() + limit_s, threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s: {what}"
        pause.wait(0.005)


# --- the contract ---------------------------------------------------------------------------------------------------


class RunnerSuite:
    """Inherit it, and say how the runner is made and how its workers can be held still."""

    positions_step = 1
    """Every so-manieth position is tried."""
    opens = 30
    """How often it is opened and closed in a row."""

    def make(self) -> Runner:
        """A runner that is not started."""
        raise NotImplementedError

    def hold(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        """Keeps a started runner that has made a unit from making any other. Only for those that read ahead."""
        raise NotImplementedError

    def holdings(self) -> tuple[set[str], list[int], int]:
        """What of the runner's is there: threads, processes, open files."""
        return holdings()

    @pytest.fixture
    def runner(self) -> Iterator[Runner]:
        with self.make() as runner:
            yield runner

    def started(self, runner: Runner, job: Job, positions: Sequence[Position] | None = None) -> Runner:
        runner.start(job, begin(job) if positions is None else positions)
        return runner

    # Units

    def test_every_unit_of_several_epochs_comes_once_and_is_that_of_a_lone_tokeniser(self, runner: Runner, mixed_job: Job) -> None:
        want = [walk(mixed_job, source, windows)[0] for source, windows in enumerate((ALL, ALL, 40))]
        assert {unit.epoch for _, units in want[1] for unit in units} == {0, 1, 2}
        assert {unit.epoch for _, units in want[2] for unit in units} > {0, 1}
        self.started(runner, mixed_job)
        for source, windows in enumerate((ALL, ALL, 40)):
            runner.allow(source, windows)
        same(take_all(runner), [unit for windows in want for _, units in windows for unit in units])

    def test_nothing_beyond_the_allowance_is_made(self, runner: Runner, mixed_job: Job) -> None:
        want = [walk(mixed_job, source, 12)[0] for source in range(3)]
        self.started(runner, mixed_job)
        assert take_all(runner) == []
        made = 0
        for allowed in (1, 2, 3, 12):
            for source in (2, 0, 1):
                before = max((a for a in (0, 1, 2, 3) if a < allowed), default=0)
                runner.allow(source, allowed)
                runner.allow(source, 1)  # fewer than before: changes nothing
                units = [unit for _, units in want[source][before:allowed] for unit in units]
                same(take_all(runner), units)
                made += len(units)
                assert runner.stats().units == made

    def test_it_starts_at_any_position(self, mixed_job: Job) -> None:
        want = [walk(mixed_job, source, 60) for source in range(3)]
        longest = max(len(windows) for windows, _ in want)
        for start in range(0, longest, self.positions_step):
            positions = [windows[start][0] if start < len(windows) else end for windows, end in want]
            expected = [unit for windows, _ in want for _, units in windows[start : start + 3] for unit in units]
            with self.make() as runner:
                self.started(runner, mixed_job, positions)
                for source, (windows, _) in enumerate(want):
                    runner.allow(source, min(3, max(0, len(windows) - start)))
                same(take_all(runner), expected)

    def test_a_source_at_its_end_gives_nothing(self, runner: Runner, mixed_job: Job) -> None:
        ends = [walk(mixed_job, source, ALL)[1] for source in (0, 1)]
        self.started(runner, mixed_job, [*ends, begin(mixed_job)[2]])
        runner.allow(0, ALL)
        runner.allow(1, ALL)
        assert take_all(runner) == []
        runner.allow(2, 1)
        same(take_all(runner), walk(mixed_job, 2, 1)[0][0][1])

    def test_units_are_counted(self, runner: Runner, mixed_job: Job) -> None:
        assert runner.stats().units == 0
        self.started(runner, mixed_job)
        runner.allow(1, ALL)
        units = [unit for unit in take_all(runner) if isinstance(unit, TokenisedUnit)]
        stats = runner.stats()
        assert (stats.units, stats.text_bytes, stats.retries) == (len(units), sum(unit.text_bytes for unit in units), 0)
        # Each stream was read once from front to back.
        assert stats.skipped_bytes == 0

    def test_a_start_inside_a_stream_decodes_what_lies_before(self, runner: Runner, mixed_job: Job) -> None:
        windows, _ = walk(mixed_job, 1, 4)
        self.started(runner, mixed_job, [begin(mixed_job)[0], windows[3][0], begin(mixed_job)[2]])
        runner.allow(1, 1)
        same(take_all(runner), windows[3][1])
        assert runner.stats().units == len(windows[3][1])
        assert runner.stats().skipped_bytes > 0

    # Faults in the data

    def test_a_broken_shard_fails_its_units_and_no_others(self, runner: Runner, tmp_path: Path) -> None:
        packed = zstd.compress(lines(range(60)))
        files = {
            "s/a.jsonl.zst": packed[: len(packed) // 2],
            "s/b.jsonl.zst": zstd.compress(lines(range(8))),
            "t/gone.jsonl": lines(range(3)),
            "t/here.jsonl": lines(range(3)),
        }
        job = job_of(tmp_path, files, [{"name": "s", "uri": "s", "epochs": 1}, {"name": "t", "uri": "t", "epochs": 1}], unit_bytes=200)
        (tmp_path / "t/gone.jsonl").unlink()
        self.started(runner, job)
        runner.allow(0, ALL)
        runner.allow(1, ALL)
        units = take_all(runner)
        failed = [unit for unit in units if isinstance(unit, FailedUnit)]
        assert {(unit.source, unit.group) for unit in failed} >= {(0, 0), (1, 0)}
        assert all(isinstance(unit.error, SourceError) for unit in failed)
        assert {str(unit.error).partition(":")[0] for unit in failed} == {"source 's', shard a.jsonl.zst", "source 't', shard gone.jsonl"}
        good = {(unit.source, unit.group) for unit in units if isinstance(unit, TokenisedUnit)}
        assert good >= {(0, 1), (1, job.manifests[1].num_groups - 1)}
        assert sum(unit.key[:3] == (0, 0, 0) for unit in failed) == 1, "nothing is tried after the first fault of a stream"

    def test_a_bad_record_is_in_its_unit(self, runner: Runner, tmp_path: Path) -> None:
        files = {"s/a.jsonl": lines(range(3)) + b"no json\n", "s/b.jsonl": lines(range(3))}
        job = job_of(tmp_path, files, [{"name": "s", "uri": "s", "epochs": 1}], unit_bytes=10**6)
        self.started(runner, job)
        runner.allow(0, ALL)
        bad, good = sorted(take_all(runner), key=lambda unit: unit.key)
        assert isinstance(bad, TokenisedUnit)
        assert isinstance(good, TokenisedUnit)
        assert bad.error is not None
        assert "a.jsonl" in bad.error
        assert (good.error, good.documents) == (None, 3)

    def test_options_that_cannot_be_used_are_an_error_and_no_hang(self, runner: Runner, mixed_job: Job) -> None:
        self.started(runner, replace(mixed_job, options=replace(mixed_job.options, tokenizer_json=b"{}", tokenizer_sha256="0" * 64)))
        runner.allow(0, 1)
        with pytest.raises(Exception, match="tokenizer"):
            runner.take(WAIT_S)

    # Misuse

    def test_it_is_started_once_and_before_use(self, runner: Runner, mixed_job: Job) -> None:
        with pytest.raises(RunnerError, match="not started"):
            runner.take(1)
        with pytest.raises(RunnerError, match="not started"):
            runner.allow(0, 1)
        self.started(runner, mixed_job)
        with pytest.raises(RunnerError, match="started before"):
            self.started(runner, mixed_job)
        runner.close()
        with pytest.raises(RunnerError, match="closed"):
            self.started(runner, mixed_job)

    def test_a_position_that_does_not_fit_is_refused(self, runner: Runner, mixed_job: Job) -> None:
        first, *others = begin(mixed_job)
        with pytest.raises(StateError, match="does not fit"):
            self.started(runner, mixed_job, [replace(first, places=(*first.places, (0, 0))), *others])

    def test_a_forked_child_is_refused_and_cannot_harm_its_parent(self, runner: Runner, mixed_job: Job) -> None:
        self.started(runner, mixed_job)
        runner.allow(0, 1)
        first = take_all(runner)
        workers = self.holdings()[1]
        child = os.fork()
        if child == 0:
            refused = 0
            for use in (lambda: runner.take(1), lambda: runner.allow(0, 3), runner.stats):
                try:
                    use()
                except RunnerError as error:
                    refused += "fork" in str(error)
            runner.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        runner.allow(0, 2)
        same(first + take_all(runner), [unit for _, units in walk(mixed_job, 0, 2)[0] for unit in units])
        assert set(workers) <= set(self.holdings()[1])

    # Waiting

    def test_nothing_to_wait_for_is_an_error_at_once(self, runner: Runner, mixed_job: Job) -> None:
        self.started(runner, mixed_job)
        began = time.monotonic()
        with pytest.raises(RunnerError, match="was given"):
            runner.take(WAIT_S)
        assert time.monotonic() - began < WAIT_S / 2

    def test_a_wait_has_a_limit_and_says_what_for(self, runner: Runner, mixed_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        if not runner.reads_ahead:
            pytest.skip("it makes the unit while it is asked for it")
        self.started(runner, mixed_job)
        runner.allow(0, 1)
        take_all(runner)
        with self.hold(runner, monkeypatch):
            runner.allow(0, 2)
            with pytest.raises(RunnerError, match=r"no unit came within 0\.5 s.*source 'plain', shard .*jsonl"):
                runner.take(0.5)
        same(take_all(runner), walk(mixed_job, 0, 2)[0][1][1])

    # Leaving

    @pytest.mark.parametrize("moment", ["new", "started", "allowed", "full", "taking", "over", "failed"])
    def test_closing_at_any_moment_leaves_nothing_behind(self, moment: str, mixed_job: Job) -> None:
        walk(mixed_job, 1, 1)  # whatever is opened once and for all is open then
        before = self.holdings()
        runner = self.make()
        if moment != "new":
            self.started(runner, mixed_job)
        if moment in ("allowed", "full", "taking"):
            runner.allow(1, ALL)
        if moment == "over":
            runner.allow(0, 3)
            take_all(runner)
        if moment in ("full", "taking"):
            runner.take(WAIT_S)
        if moment == "full" and runner.reads_ahead:
            eventually(lambda: runner.stats().units == sum(len(units) for _, units in walk(mixed_job, 1, ALL)[0]), "all is made")
        if moment == "failed":
            with pytest.raises(RunnerError):
                runner.take(WAIT_S)
        runner.close()
        assert self.holdings() == before
        runner.close()
        runner.stats()
        with pytest.raises(RunnerError, match="closed" if moment != "new" else "not started"):
            runner.take(1)

    def test_closing_from_another_thread_ends_a_wait(self, mixed_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        before = self.holdings()
        runner = self.make()
        if not runner.reads_ahead:
            pytest.skip("it never waits for others")
        self.started(runner, mixed_job)
        runner.allow(0, 1)
        take_all(runner)
        errors: list[str] = []

        def wait() -> None:
            try:
                runner.take(WAIT_S)
            except RunnerError as error:
                errors.append(str(error))

        with self.hold(runner, monkeypatch):
            runner.allow(0, 2)
            waiter = threading.Thread(target=wait)
            waiter.start()
            closers = [threading.Thread(target=runner.close) for _ in range(2)]
            for closer in closers:
                closer.start()
            waiter.join(WAIT_S)
            assert errors == ["the runner is closed and gives no further unit"]
        for closer in closers:
            closer.join(WAIT_S)
        assert self.holdings() == before

    def test_a_runner_that_is_forgotten_ends_by_itself(self, mixed_job: Job) -> None:
        walk(mixed_job, 1, 1)
        before = self.holdings()
        runner = self.started(self.make(), mixed_job)
        runner.allow(1, ALL)
        runner.take(WAIT_S)
        del runner
        gc.collect()
        eventually(lambda: self.holdings() == before, "threads, children and files are as before")

    def test_opening_and_closing_over_and_over_adds_nothing_up(self, mixed_job: Job) -> None:
        walk(mixed_job, 1, 1)
        before = self.holdings()
        for count in itertools.repeat(3, self.opens):
            with self.started(self.make(), mixed_job) as runner:
                runner.allow(1, ALL)
                for _ in range(count):
                    runner.take(WAIT_S)
            assert self.holdings() == before
