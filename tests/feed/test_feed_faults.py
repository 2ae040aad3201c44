"""Whatever dies under, around or above a feed: golden cases keep their digests. Kills come at random moments, drawn from the test's name.

The feed is started by the command, and read by ranks in processes of their own.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import ray

from tests.feed.feeds import ROOT, Rank, Served, Step, eventually, folded, ranks
from tests.feed.test_production import lane_workers_of_ours
from tests.golden_cases import GoldenCase, load_golden_cases
from zephon_ray.feed.protocol import NAMESPACE, actor_name
from zephon_ray.runs import verify

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300), pytest.mark.usefixtures("ray_session")]

START_S = 90.0
END_S = 150.0
TRAINING_S = 5.0
"""What a run takes at least, so that it is under way when something is killed."""
AHEAD = 2
"""Steps made ahead: few, so that there are some to be made still when something is killed."""
LEFT = 8
"""Steps that are left then, at least, where a case has so many: what feed and lane workers are ahead, what a rank has fetched, and more."""
DELAY_S = 0.4
"""Between a step and the kill after it, at most."""
BACK_S = 20.0
"""In which a feed that was killed, or whose lane worker was, must give steps again."""
SAVE_EVERY = 4
NAME = "matrix"


class Run:
    """A feed of a golden case and its job.

    Args:
        case: that is fed.
        served: the feed.
        driver: the command that has started it.
    """

    def __init__(self, case: GoldenCase, served: Served, driver: subprocess.Popen[str]) -> None:
        self.case, self.served, self.driver = case, served, driver
        self.expected = [Step(step.step, step.digest, step.chain) for step in case.steps]
        self.job: list[Rank] = []
        self.killed: list[float] = []
        """When something was, in seconds since 1970."""
        self._readers: list[threading.Thread] = []

    def start_job(self, count: int, state: str | None = None) -> None:
        """Ranks that go on from a state; what they say is read in threads."""
        steps = len(self.expected)
        more = {} if state is None else {"state": state}
        self.job = [
            Rank(
                NAME, r, 2, steps + 1 if self.case.ends else steps, incarnation=f"run:{count}", pace_s=TRAINING_S / steps,
                save_every=SAVE_EVERY, reconnect_s=END_S, **more,
            )
            for r in range(2)
        ]  # fmt: skip
        for rank in self.job:
            self._readers.append(threading.Thread(target=rank.read, daemon=True))
            self._readers[-1].start()

    @property
    def step(self) -> int:
        """That a rank of the job has."""
        steps = self.job[0].steps
        return int(steps[-1]["step"]) if steps else 0

    def join(self) -> None:
        deadline = time.monotonic() + END_S
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
            assert not reader.is_alive(), f"a rank is silent: {[rank.lines[-1:] for rank in self.job]}, {self.served.status}"


@contextmanager
def running(case: GoldenCase, out: Path, lane_workers: int) -> Iterator[Run]:
    """A case's feed, as the command serves it in the foreground."""
    address = ray.get_runtime_context().gcs_address
    command = ["serve", str(case.recipe), "--name", NAME, "--out", str(out), "--address", address, "--json"]
    command += ["--set", f"execution.lane_workers={lane_workers}", "--set", f"execution.prefetch_steps={AHEAD}"]
    driver = subprocess.Popen(
        [sys.executable, "-m", "zephon_ray", *command], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout
        assert json.loads(driver.stdout.readline())["event"] == "serving"
        actor = ray.get_actor(actor_name(NAME), namespace=NAMESPACE)
        try:
            yield Run(case, Served(NAME, actor), driver)
        finally:
            ray.kill(actor, no_restart=True)
            eventually(lambda: actor_name(NAME) not in {named["name"] for named in ray.util.list_named_actors(all_namespaces=True)})
    finally:
        driver.kill()
        driver.communicate()


def workers_of_ray() -> list[psutil.Process]:
    """Processes of the cluster that read, that may, and that tell those what to read."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, IndexError):
            if any(part in process.cmdline()[0] for part in ("ReadZephonUnits", "ray::Mailbox")):
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


# ---- what is killed


def kill_feed(run: Run, pick: random.Random) -> None:
    run.served.kill()


def kill_lane_worker(run: Run, pick: random.Random) -> None:
    os.kill(pick.choice(eventually(lane_workers_of_ours, START_S)).pid, signal.SIGKILL)


def kill_workers(run: Run, pick: random.Random) -> None:
    there = eventually(workers_of_ray, START_S)
    for process in there if pick.random() < 0.5 else [pick.choice(there)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def kill_driver(run: Run, pick: random.Random) -> None:
    run.driver.kill()
    run.driver.wait(START_S)


FAULTS: dict[str, Callable[[Run, random.Random], None]] = {
    "feed": kill_feed, "lane_worker": kill_lane_worker, "workers": kill_workers, "driver": kill_driver,
}  # fmt: skip


def drawn(fault: str, cases: int) -> list[tuple[str, str, int]]:
    """Golden cases and numbers of lane workers for a fault: others for each, always the same."""
    pick = random.Random(fault)
    return [(fault, name, pick.choice([1, 2])) for name in sorted(pick.sample(sorted(load_golden_cases()), cases))]


def suffer(run: Run, pick: random.Random, fault: Callable[[Run, random.Random], None], times: int) -> None:
    """Let something happen `times` times, each some moments after a step that is drawn."""
    steps = len(run.expected)
    last = max(1, steps - math.ceil(steps * DELAY_S / TRAINING_S) - LEFT)
    plan = sorted((pick.randrange(last), pick.uniform(0, DELAY_S)) for _ in range(times))
    print(f"{run.case.name}: after steps {plan}")
    for at, delay in plan:
        eventually(lambda at=at: run.step >= at, END_S)
        time.sleep(delay)  # not to wait for anything: the moment is drawn
        fault(run, pick)
        run.killed.append(time.time())


def back_after(given: Sequence[float], killed: Sequence[float]) -> list[float]:
    """Seconds from each kill to the end of the longest pause behind it: by then steps come again.

    Args:
        given: when a rank got its steps. A kill before the first, behind the last, or while it is waited for another, is left out.
        killed: when something was.
    """
    found = []
    for since, until in pairwise([*killed, math.inf]):
        times = [at for at in given if since < at <= until]
        if times and given[0] < since:
            _, end = max((after - before, after) for before, after in pairwise([since, *times]))
            found.append(end - since)
    return found


def test_the_time_until_steps_come_again_ends_with_the_longest_pause_behind_each_kill() -> None:
    assert back_after([1.0, 2.0, 2.5, 9.0, 9.5, 12.0, 12.5], [0.5, 2.25, 9.75, 13.0]) == [6.75, 2.25]


@pytest.mark.long
@pytest.mark.parametrize(("fault", "name", "lane_workers"), [chosen for fault in FAULTS for chosen in drawn(fault, 4)])
def test_what_dies_under_a_feed_changes_no_step(fault: str, name: str, lane_workers: int, tmp_path: Path) -> None:
    pick = random.Random(f"{fault} {name}")
    with running(load_golden_cases()[name], tmp_path / "run", lane_workers) as run:
        run.start_job(0)
        with ranks(*run.job):
            suffer(run, pick, FAULTS[fault], 1 if fault == "driver" else pick.randint(1, 2))
            run.join()
            assert folded(run.job) == run.expected, [rank.lines[-1] for rank in run.job]
            assert len({rank.lines[-1]["state"] for rank in run.job}) == 1
        assert fault != "lane_worker" or run.served.status.streams["train"].reopened, "nobody has missed it"
        back = [back_after([line["at"] for line in rank.steps], run.killed) for rank in run.job]
        print(f"{fault} {name}: steps came again after {[[round(s, 1) for s in rank] for rank in back]} s")
        assert fault not in ("feed", "lane_worker") or max((seconds for rank in back for seconds in rank), default=0.0) < BACK_S
    assert verify(str(tmp_path / "run"), runner="inline").steps >= len(run.expected)


@pytest.mark.long
@pytest.mark.parametrize(("fault", "name", "lane_workers"), drawn("rank", 4))
def test_a_job_whose_rank_dies_goes_on_from_its_last_state(fault: str, name: str, lane_workers: int, tmp_path: Path) -> None:
    pick = random.Random(f"{fault} {name}")
    with running(load_golden_cases()[name], tmp_path / "run", lane_workers) as run:
        run.start_job(0)
        with ranks(*run.job) as old:
            dies = pick.randrange(2)
            suffer(run, pick, lambda run, _: run.job[dies].process.kill(), 1)
            saved = [{line["saved"]: line["state"] for line in rank.lines if "saved" in line} for rank in old]
            at = max(set(saved[0]) & set(saved[1]), default=0)
            assert len({found.get(at) for found in saved}) == 1
            run.start_job(1, saved[0].get(at))
            with ranks(*run.job):
                run.join()
                assert folded(run.job) == run.expected[at:], [rank.lines[-1] for rank in run.job]
            left = old[1 - dies].lines[-1]
            assert left.get("error") == "FencedError" or "state" in left
            for rank in old:
                chains = [line["chain"] for line in rank.steps]
                assert chains == [step.chain for step in run.expected[: len(chains)]]
    assert verify(str(tmp_path / "run"), runner="inline").steps >= len(run.expected)
