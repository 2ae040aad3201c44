"""The Ray runner keeps the contract of runners, and gives the contract's digests."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.register_assert_rewrite("tests.core.runner_suite")

from tests.core.runner_suite import ALL, WAIT_S, RunnerSuite, begin, job_of, lines, mixed_job, same, take_all, walk  # noqa: E402
from tests.core.test_golden import check, run_whole  # noqa: E402
from tests.golden_cases import GoldenCase  # noqa: E402
from tests.ray_session import living  # noqa: E402
from zephon_ray.collector import prepare  # noqa: E402
from zephon_ray.recipe import WorkersSpec, load_recipe  # noqa: E402
from zephon_ray.runners.base import Job, Runner  # noqa: E402
from zephon_ray.runners.ray_data import Given, Wave, fetch  # noqa: E402
from zephon_ray.runners.ray_runner import RayRunner, _Core  # noqa: E402
from zephon_ray.stream import Stream  # noqa: E402

__all__ = ["mixed_job"]

pytestmark = pytest.mark.timeout(300)


def workers() -> list[psutil.Process]:
    """Processes that run tasks of Ray Data."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("ReadZephonUnits" in part for part in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


class TestRay(RunnerSuite):
    positions_step = 17
    opens = 3

    def make(self) -> Runner:
        return RayRunner(WorkersSpec(min=1, max=2), stall_s=60.0)

    def holdings(self) -> tuple[set[str], list[int], int]:
        """Our threads and actors; the cluster's processes come and go as it likes."""
        threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("zephon")}
        return threads, [len(living("Mailbox"))], 0

    @contextmanager
    def hold(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        held = workers()
        for process in held:
            os.kill(process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in held:
                os.kill(process.pid, signal.SIGCONT)


def test_units_come_many_to_a_block(mixed_job: Job) -> None:
    """What an object costs on its way hardly depends on its size."""
    sizes: list[int] = []

    def read(block: Any) -> Sequence[Given]:
        given = fetch(block)
        sizes.append(len(given))
        return given

    with RayRunner(WorkersSpec(min=1, max=1), stall_s=60.0, read=read) as runner:
        runner.start(mixed_job, begin(mixed_job))
        for source in range(len(mixed_job.manifests)):
            runner.allow(source, 3)
        units = take_all(runner)
    assert sum(sizes) == len(units) > 3 * len(sizes)


def test_a_wave_that_is_cut_loses_nothing_where_one_of_its_tasks_made_nothing(tmp_path: Path) -> None:
    files = {"a/x.jsonl": lines(range(5)), "a/y.jsonl": lines(range(5, 10)), "b/z.jsonl": lines(range(300), 600)}
    sources = [{"name": "a", "uri": "a", "epochs": 1, "window_groups": 2}, {"name": "b", "uri": "b", "window_groups": 1}]
    job = job_of(tmp_path, files, sources, unit_bytes=30_000)
    with RayRunner(WorkersSpec(min=1, max=2), stall_s=60.0) as runner:
        runner.start(job, begin(job))
        core = runner._core
        assert core is not None
        cut = []
        for source, windows in ((0, ALL), (1, 25)):
            runner.allow(source, windows)
            units = [runner.take(WAIT_S)]
            with core._lock:
                cut += core._waves[-1:]
                core._cut(2)
            units += take_all(runner)
            assert cut[-1].join(WAIT_S)
        assert len(units) > 20
        assert [(wave.tasks, wave.error) for wave in cut] == [(2, None)] * 2


def test_a_wave_that_dies_after_it_was_cut_is_made_up_for_at_once(mixed_job: Job) -> None:
    """And not when the watchdog finds that nothing comes."""
    dying = [True]

    def read(block: Any) -> Sequence[Given]:
        if dying and cut and cut[0].cut:
            dying.clear()
            raise RuntimeError("it dies")
        return fetch(block)

    cut: list[Any] = []
    with RayRunner(WorkersSpec(min=1, max=1), stall_s=300.0, read=read) as runner:
        runner.start(mixed_job, begin(mixed_job))
        core = runner._core
        assert core is not None
        with core._lock:
            cut += core._waves
            for source in range(len(mixed_job.manifests)):
                runner.allow(source, 3)
            core._cut(1)
        same(take_all(runner), [unit for source in range(3) for _, units in walk(mixed_job, source, 3)[0] for unit in units])
        assert not dying
        assert runner.stats().retries > 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each wave how many others had not ended when it was launched."""
    found: list[int] = []
    launch = _Core._launch

    def launched(core: _Core, tasks: int) -> None:
        found.append(sum(not wave.ended for wave in core._waves))
        launch(core, tasks)

    monkeypatch.setattr(_Core, "_launch", launched)
    return found


def within(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("limit", ["WAVE_BLOCKS", "TURN_BYTES"])
def test_a_wave_that_made_enough_hands_over_to_the_next(
    mixed_job: Job, monkeypatch: pytest.MonkeyPatch, launches: list[int], limit: str
) -> None:
    monkeypatch.setattr(f"zephon_ray.runners.ray_runner.{limit}", 1)
    monkeypatch.setattr("zephon_ray.runners.ray_runner.TURN_S", 0.0)
    monkeypatch.setattr("zephon_ray.runners.ray_runner.HAND_OVER_S", WAIT_S)
    with RayRunner(WorkersSpec(min=1, max=1), stall_s=60.0) as runner:
        runner.start(mixed_job, begin(mixed_job))
        units = []
        for windows in (1, 2, 3):
            for source in range(len(mixed_job.manifests)):
                runner.allow(source, windows)
            units += take_all(runner)
            assert within(lambda windows=windows: len(launches) > windows)  # type: ignore[misc]
            assert runner.stats().workers == 1
    same(units, [unit for source in range(3) for _, units in walk(mixed_job, source, 3)[0] for unit in units])
    assert launches == [0] * len(launches)


def test_a_wave_that_is_long_in_ending_is_not_waited_for(mixed_job: Job, monkeypatch: pytest.MonkeyPatch, launches: list[int]) -> None:
    """When it made enough, and one of its tasks takes longer than the others."""
    monkeypatch.setattr("zephon_ray.runners.ray_runner.WAVE_BLOCKS", 1)
    monkeypatch.setattr("zephon_ray.runners.ray_runner.HAND_OVER_S", 0.1)
    blocks: list[bool] = []

    def read(block: Any) -> Sequence[Given]:
        blocks.append(len(blocks) != 1 or within(lambda: len(launches) > 1))
        return fetch(block)

    with RayRunner(WorkersSpec(min=1, max=1), stall_s=60.0, read=read) as runner:
        runner.start(mixed_job, begin(mixed_job))
        for source in range(len(mixed_job.manifests)):
            runner.allow(source, 3)
        same(take_all(runner), [unit for source in range(3) for _, units in walk(mixed_job, source, 3)[0] for unit in units])
        assert runner.stats().retries == 0
    assert all(blocks)
    assert launches[1] == 1


def test_a_wave_that_gave_all_and_does_not_end_is_not_waited_for(
    mixed_job: Job, monkeypatch: pytest.MonkeyPatch, launches: list[int]
) -> None:
    """It owes nothing, so that no watchdog would see it."""
    monkeypatch.setattr("zephon_ray.runners.ray_runner.WAVE_BLOCKS", 1)
    monkeypatch.setattr("zephon_ray.runners.ray_runner.HAND_OVER_S", 0.5)
    over = dict[int, bool]()
    ended = property(lambda wave: wave.number > 0 and over[id(wave)], lambda wave, value: over.update({id(wave): value}))
    monkeypatch.setattr(Wave, "ended", ended, raising=False)
    with RayRunner(WorkersSpec(min=1, max=1), stall_s=60.0) as runner:
        runner.start(mixed_job, begin(mixed_job))
        units = []
        for windows in (1, 2):
            for source in range(len(mixed_job.manifests)):
                runner.allow(source, windows)
            units += take_all(runner)
            assert within(lambda windows=windows: len(launches) > windows)  # type: ignore[misc]
        assert runner.stats().retries == 0
    same(units, [unit for source in range(3) for _, units in walk(mixed_job, source, 2)[0] for unit in units])
    assert launches[1] == 1


GOLDEN_IN_SHORT = ["best_fit_pad", "compressed_edges"]


@pytest.mark.parametrize("name", GOLDEN_IN_SHORT)
def test_ray_gives_the_contracts_digests(name: str, golden_cases: dict[str, GoldenCase]) -> None:
    run_whole(golden_cases[name], "ray")


@pytest.mark.long
def test_ray_gives_the_contracts_digests_in_every_case(golden_case: GoldenCase) -> None:
    run_whole(golden_case, "ray")


@pytest.mark.parametrize(
    "name", ["compressed_edges", *(pytest.param(name, marks=pytest.mark.long) for name in ("rare_source", "best_fit"))]
)
def test_ray_resumes_at_the_first_the_middle_and_the_last_step(name: str, golden_cases: dict[str, GoldenCase]) -> None:
    case = golden_cases[name]
    recipe = load_recipe(case.recipe)
    prepared = prepare(recipe)
    last = len(case.steps)
    with closing(Stream(recipe, runner="inline", prepared=prepared)) as stream:
        states = [stream.state_bytes(), *(stream.state_bytes() for _ in case.steps if stream.next_batch())]
    for start in (1, last // 2, last - 1):
        with closing(Stream(recipe, runner="ray", state=states[start], prepared=prepared)) as stream:
            for step in range(start + 1, min(start + 3, last) + 1):
                check(stream.next_batch(), case, step)
                assert stream.state_bytes() == states[step]
