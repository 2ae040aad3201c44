"""Workers are killed at random moments of golden cases, and every step stays the contract's."""

from __future__ import annotations

import random
import signal
import threading
import time

import psutil
import pytest

from tests.core.test_golden import run_whole
from tests.golden_cases import GoldenCase

pytestmark = [pytest.mark.fault, pytest.mark.long, pytest.mark.timeout(180)]

CASES = [
    "all_defaults", "arrow_units", "best_fit_pad", "compressed_edges", "epochs_continue", "many_lanes", "rare_source",
    "slots_of_unequal_files", "ties", "wrap_two_sources",
]  # fmt: skip
MOST_KILLS = 3
LONGEST_S = 2.5
"""Between two kills: what a stream takes from its start to its last step, and some."""
GIVE_UP_S = 120.0


class Killer(threading.Thread):
    """Kills one worker or all, at times drawn from a seed; `ended` when it has killed as often as it meant to."""

    def __init__(self, seed: str) -> None:
        super().__init__(daemon=True)
        pick = random.Random(seed)
        self.plan = [(pick.uniform(0, LONGEST_S), pick.random() < 0.5, pick.random()) for _ in range(pick.randint(1, MOST_KILLS))]
        self.kills = 0
        self.ended, self.enough = threading.Event(), threading.Event()

    def run(self) -> None:
        for after, everyone, which in self.plan:
            self.enough.wait(after)
            while not self._kill(everyone, which) and not self.enough.wait(0.02):
                continue
        self.ended.set()

    def _kill(self, everyone: bool, which: float) -> bool:
        at_work = workers()
        victims = at_work if everyone else at_work[int(which * len(at_work)) :][:1]
        for process in victims:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
            self.kills += 1
        return bool(victims)


def workers() -> list[psutil.Process]:
    """Processes of this test's cluster that run a task of ours."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("ReadZephonUnits" in word for word in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda process: process.pid)


@pytest.mark.parametrize("name", CASES)
def test_workers_killed_at_random_moments_change_no_step(name: str, golden_cases: dict[str, GoldenCase]) -> None:
    """The case runs again and again until all kills have met it, whatever it was doing: starting, going on, or ending."""
    killer, began = Killer(name), time.monotonic()
    killer.start()
    runs = 0
    try:
        while not killer.ended.is_set():
            assert time.monotonic() - began < GIVE_UP_S, f"{killer.kills} kills in {runs} runs"
            run_whole(golden_cases[name], "ray")
            runs += 1
    finally:
        killer.enough.set()
        killer.join(10)
    assert killer.kills >= len(killer.plan)
