"""The runners of one machine keep the contract, and processes survive what happens to processes."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest

pytest.register_assert_rewrite("tests.core.runner_suite")

from tests.core.runner_suite import (  # noqa: E402  its assertions are to explain themselves
    ALL,
    WAIT_S,
    RunnerSuite,
    begin,
    eventually,
    job_of,
    lines,
    mixed_job,
    same,
    take_all,
    walk,
)
from tests.small import fields  # noqa: E402
from zephon_ray.errors import RecipeError, RunnerError  # noqa: E402
from zephon_ray.plan.windows import UnitTask  # noqa: E402
from zephon_ray.recipe import Recipe, recipe_from_dict  # noqa: E402
from zephon_ray.runners.base import Job, Runner  # noqa: E402
from zephon_ray.runners.local import InlineRunner, ProcessesRunner, ThreadsRunner  # noqa: E402
from zephon_ray.runners.registry import RUNNERS, default_workers, make_runner  # noqa: E402
from zephon_ray.stages.tokenise import UnitTokeniser  # noqa: E402
from zephon_ray.stages.unit import TokenisedUnit  # noqa: E402

pytestmark = pytest.mark.xdist_group("processes")  # it looks at all threads and children of this process: no cluster

__all__ = ["mixed_job"]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


class TestInline(RunnerSuite):
    def make(self) -> Runner:
        return InlineRunner()

    def test_a_call_that_was_interrupted_loses_no_unit(self, mixed_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenise, calls = UnitTokeniser.tokenise, iter(range(ALL))

        def interrupted(self: UnitTokeniser, task: UnitTask) -> TokenisedUnit:
            if next(calls) in (0, 3):
                raise KeyboardInterrupt
            return tokenise(self, task)

        want = [unit for _, units in walk(mixed_job, 1, 4)[0] for unit in units]
        monkeypatch.setattr(UnitTokeniser, "tokenise", interrupted)
        with self.started(self.make(), mixed_job) as runner:
            runner.allow(1, 4)
            got = []
            while len(got) < len(want):
                try:
                    got.append(runner.take(WAIT_S))
                except KeyboardInterrupt:
                    continue
        same(got, want)


class TestThreads(RunnerSuite):
    def make(self) -> Runner:
        return ThreadsRunner(3)

    def hold(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        return self._held(monkeypatch)

    @contextmanager
    def _held(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        tokenise, gate = UnitTokeniser.tokenise, threading.Event()

        def held(self: UnitTokeniser, task: UnitTask) -> TokenisedUnit:
            assert gate.wait(WAIT_S)
            return tokenise(self, task)

        with monkeypatch.context() as patch:
            patch.setattr(UnitTokeniser, "tokenise", held)
            try:
                yield
            finally:
                gate.set()


class _Lent(ThreadsRunner):
    reads_ahead = False  # not of itself: the one who takes is a worker

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        assert self.lend()


class TestThreadsAndTheOneWhoTakes(TestThreads):
    def make(self) -> Runner:
        return _Lent(2)


class TestTheOneWhoTakesAlone(TestThreads):
    def make(self) -> Runner:
        return _Lent(1)

    def test_he_needs_no_thread_and_makes_ahead_what_is_allowed(self, runner: Runner, mixed_job: Job) -> None:
        self.started(runner, mixed_job)
        assert not runner.make_ahead(), "nothing is allowed"
        runner.allow(1, 2)
        want = [unit for _, units in walk(mixed_job, 1, 2)[0] for unit in units]
        made = sum(iter(runner.make_ahead, False))
        assert (made, runner.stats().units) == (len(want), len(want))
        assert "zephon-thread-0" not in [thread.name for thread in threading.enumerate()]
        same(take_all(runner), want)
        assert runner.stats().units == len(want)

    def test_he_is_told_by_others_that_he_is_stuck(self, runner: Runner, mixed_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started(runner, mixed_job).allow(0, 1)
        assert runner.stuck(0) is None
        with self._held(monkeypatch):
            taking = threading.Thread(target=runner.take, args=(WAIT_S,))
            taking.start()
            eventually(lambda: runner.stuck(0.2) is not None, "the unit takes longer than 0.2 s")
            assert runner.stuck(WAIT_S) is None
            found = str(runner.stuck(0.2))
        taking.join(WAIT_S)
        assert re.search(r"no unit came within .* s.*source 'plain', shard .*jsonl", found)
        assert runner.stuck(0) is None

    def test_closing_waits_for_the_unit_in_his_hands(self, mixed_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        walk(mixed_job, 1, 1)
        before = self.holdings()
        runner, errors = self.started(self.make(), mixed_job), list[str]()
        runner.allow(1, 3)
        runner.take(WAIT_S)  # a file is open

        def take() -> None:
            try:
                runner.take(WAIT_S)
            except RunnerError as error:
                errors.append(str(error))

        with self._held(monkeypatch):
            taking, closing = threading.Thread(target=take), threading.Thread(target=runner.close)
            taking.start()
            eventually(lambda: runner.stuck(0) is not None, "it is in the making")
            closing.start()
            closing.join(0.2)
            assert closing.is_alive()
        for thread in (taking, closing):
            thread.join(WAIT_S)
        assert errors == ["the runner is closed and gives no further unit"]
        assert self.holdings() == before


class TestProcesses(RunnerSuite):
    positions_step = 25  # a process takes half a second to start
    opens = 3

    def make(self) -> Runner:
        return ProcessesRunner(2)

    def hold(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        return self._stopped()

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        stopped = children()
        for child in stopped:
            child.suspend()
        try:
            yield
        finally:
            for child in stopped:
                if child.is_running():
                    child.resume()

    @pytest.mark.fault
    def test_closing_waits_for_no_worker_that_is_stuck(self, mixed_job: Job) -> None:
        runner = self.started(self.make(), mixed_job)
        runner.allow(1, 1)
        take_all(runner)
        with self._stopped():
            runner.allow(1, 3)
            with pytest.raises(RunnerError, match="in the making"):
                runner.take(0.5)
            runner.close()
            assert children() == []


@pytest.mark.long
class TestProcessesThirtyTimes(TestProcesses):
    positions_step = 1
    opens = 30


# --- what happens to processes --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A unit takes long enough to be met in the making."""
    folder = tmp_path_factory.mktemp("slow")
    files = {f"s/{name}.jsonl": lines([seed], 150_000) for seed, name in enumerate("ab")}
    return job_of(folder, files, [{"name": "s", "uri": "s", "epochs": 2}], unit_bytes=1 << 24, shuffle={"groups": False})


def reading() -> list[psutil.Process]:
    """The worker processes that are inside a unit of `slow_job`."""
    found = []
    for child in children():
        try:
            if any(file.path.endswith(".jsonl") for file in child.open_files()):
                found.append(child)
        except psutil.Error:
            continue
    return found


def all_units(job: Job) -> list[TokenisedUnit]:
    return [unit for _, units in walk(job, 0, ALL)[0] for unit in units]


@pytest.mark.fault
def test_a_worker_that_is_killed_inside_a_unit_changes_nothing(slow_job: Job) -> None:
    with ProcessesRunner(2) as runner:
        runner.start(slow_job, begin(slow_job))
        runner.allow(0, ALL)
        eventually(lambda: len(reading()) == 2, "both workers are inside a unit")
        for child in reading():
            child.kill()
        same(take_all(runner), all_units(slow_job))
        assert runner.stats().retries == 2


@pytest.mark.fault
def test_a_worker_that_is_killed_between_two_units_changes_nothing(mixed_job: Job) -> None:
    want = walk(mixed_job, 1, 3)[0]
    with ProcessesRunner(2) as runner:
        runner.start(mixed_job, begin(mixed_job))
        for allowed, (_, units) in enumerate(want, 1):
            runner.allow(1, allowed)
            same(take_all(runner), units)
            for child in children():
                child.kill()
                child.wait(WAIT_S)
        assert runner.stats().retries == 0


@pytest.mark.fault
def test_a_unit_that_kills_every_worker_is_named(slow_job: Job) -> None:
    with ProcessesRunner(1) as runner:
        runner.start(slow_job, begin(slow_job))
        runner.allow(0, 1)
        killed = []
        for _ in range(3):
            eventually(lambda: any(child.pid not in killed for child in reading()), "a worker is inside the unit")
            (child,) = reading()
            killed.append(child.pid)
            child.kill()
        message = r"source 's', shard a\.jsonl, byte range 0, unit 0 .*: 3 worker processes died of it, the last one of signal 9"
        for _ in range(2):
            with pytest.raises(RunnerError, match=message):
                runner.take(WAIT_S)
    assert children() == []


@pytest.mark.fault
def test_workers_that_cannot_start_are_an_error_and_no_hang(mixed_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with ProcessesRunner(1) as runner:
        runner.start(mixed_job, begin(mixed_job))
        monkeypatch.setenv("PYTHONHOME", "/nowhere")  # no Python starts with that
        runner.allow(0, 1)
        with pytest.raises(RunnerError, match="3 worker processes died while they started, the last one with exit code 1"):
            runner.take(WAIT_S)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with ProcessesRunner(1) as runner:
        runner.start(mixed_job, begin(mixed_job))
        runner.allow(0, 1)
        with pytest.raises(RunnerError, match="cannot be started with '/nowhere/python'"):
            runner.take(WAIT_S)


@pytest.mark.fault
def test_signals_to_the_whole_job_do_not_stop_the_workers(slow_job: Job) -> None:
    with ProcessesRunner(2) as runner:
        runner.start(slow_job, begin(slow_job))
        runner.allow(0, ALL)
        eventually(lambda: len(children()) == 2, "both workers are there")

        def signalled() -> list[psutil.Process]:
            for child, number in itertools.product(children(), SIGNALS):
                child.send_signal(number)
            return reading()

        # From their first moment on, while Python itself still starts, until they are inside a unit.
        eventually(lambda: len(signalled()) == 2, "both workers are inside a unit")
        same(take_all(runner), all_units(slow_job))
        assert runner.stats().retries == 0


# No `if __name__ == "__main__"`: users' scripts and notebooks have none.
PARENT = """
import atexit
import sys
import threading
from zephon_ray.collector import prepare
from zephon_ray.plan.windows import SourceCursor
from zephon_ray.recipe import load_recipe
from zephon_ray.runners.registry import make_runner

atexit.register(lambda: print("threads left:", threading.active_count() - 1))
recipe = load_recipe(sys.argv[1])
job, _ = prepare(recipe)
runner = make_runner(sys.argv[3], recipe, workers=2)
runner.start(job, [SourceCursor(recipe, manifest).position for manifest in job.manifests])
runner.allow(len(job.manifests) - 1, 10**6)
print("started", flush=True)
how = sys.argv[2]
if how == "wait":
    sys.stdin.read()
units = runner.take(60)
if how == "raise":
    raise RuntimeError("out of the script")
print("end", flush=True)
"""


def script(job: Job, how: str, runner: str = "processes") -> subprocess.Popen[str]:
    """A user's script, started, whose workers are about to work."""
    recipe = Path(job.recipe.folder) / "recipe.yaml"
    recipe.write_text(job.recipe.to_yaml(), encoding="utf-8")
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", PARENT, str(recipe), how, runner], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.fault
def test_a_killed_parent_leaves_no_orphan(slow_job: Job) -> None:
    with script(slow_job, "wait") as parent:
        eventually(lambda: len(reading()) == 2, "both workers are inside a unit")
        workers = reading()
        parent.kill()
        parent.wait(WAIT_S)
        eventually(lambda: all(map(gone, workers)), "the workers are gone", 10)


@pytest.mark.fault
def test_workers_end_with_their_parent_even_if_a_forked_child_of_it_lives(mixed_job: Job) -> None:
    """Such a child holds the other end of the workers' sockets."""
    ready, go = os.pipe(), os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            runner = ProcessesRunner(1)
            runner.start(mixed_job, begin(mixed_job))
            runner.allow(0, 1)
            runner.take(WAIT_S)
            if os.fork() == 0:
                os.close(go[1])
                os.read(go[0], 1)  # until the test ends
                os._exit(0)
            os.write(ready[1], b".")
            os.read(go[0], 1)
        finally:
            os._exit(1)
    assert os.read(ready[0], 1) == b"."
    family = psutil.Process(parent).children()
    workers = [child for child in family if "zephon_ray.runners.worker" in " ".join(child.cmdline())]
    assert (len(family), len(workers)) == (2, 1)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    eventually(lambda: all(map(gone, workers)), "the worker is gone", 10)
    for end in (*ready, *go):
        os.close(end)


@pytest.mark.parametrize("runner", ["threads", "processes"])
@pytest.mark.parametrize(("how", "code"), [("end", 0), ("raise", 1)])
def test_a_script_that_ends_without_closing_ends_cleanly(mixed_job: Job, how: str, code: int, runner: str) -> None:
    """Its last source goes on for ever, so the workers are met at work."""
    parent = script(mixed_job, how, runner)
    out, err = parent.communicate(timeout=WAIT_S)
    assert parent.returncode == code, err
    assert (out, err.count("Traceback")) == ("end\n" * (code == 0) + "threads left: 0\n", code)
    assert "RuntimeError: out of the script" in err or err == ""


# --- names ----------------------------------------------------------------------------------------------------------


def a_recipe_for_names() -> Recipe:
    return recipe_from_dict(fields(), "/nowhere")


def test_every_runner_is_made_by_its_name() -> None:
    recipe = a_recipe_for_names()
    made = [make_runner(name, recipe, workers=2) for name in RUNNERS if name != "ray"]
    assert [type(runner) for runner in made] == [InlineRunner, ThreadsRunner, ProcessesRunner]
    assert [runner.reads_ahead for runner in made] == [False, True, True]
    assert [runner.stats().workers for runner in made] == [1, 2, 2]


def test_a_runner_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(RecipeError, match=r"'rays' is no runner. Use one of inline, threads, processes, ray"):
        make_runner("rays", a_recipe_for_names())


def test_there_are_no_more_workers_than_the_recipe_and_the_machine_allow(mixed_job: Job) -> None:
    data = mixed_job.recipe.model_dump(by_alias=True)
    few = recipe_from_dict({**data, "execution": {"workers": {"max": 1}}}, mixed_job.recipe.folder)
    many = recipe_from_dict({**data, "execution": {"workers": {"max": 10**6}}}, mixed_job.recipe.folder)
    assert default_workers(few) == 1
    assert 1 <= default_workers(many) <= (os.cpu_count() or 1)
