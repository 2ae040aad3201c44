"""Ranks of one host that are in no cluster share one feed. Each is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.feed.feeds import eventually
from zephon_ray import runs
from zephon_ray.batches import fold
from zephon_ray.errors import UserError
from zephon_ray.feed.host import HostFeed
from zephon_ray.feed.service import Order
from zephon_ray.loader import Loader
from zephon_ray.recipe import load_recipe
from zephon_ray.testing import tiny_corpus

ROOT = Path(__file__).parents[2]
RANKS = 4
STEPS = 5
GONE_S = 30.0
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Of Ray; they outlive a killed raylet, and do nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """A rank's process, and what it said."""

    process: subprocess.Popen[str]

    def steps(self, count: int) -> list[dict[str, Any]]:
        assert self.process.stdout
        return [json.loads(self.process.stdout.readline()) for _ in range(count)]

    def more(self) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.steps(1)[0]

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()


@contextmanager
def torchrun(folder: Path, restart: int = 0, state: str = "") -> Iterator[list[Rank]]:
    """All ranks of a host, with the environment that torchrun gives them."""
    with ExitStack() as stack:
        ranks = []
        for number in range(RANKS):
            environment = {
                **os.environ, "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
                "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": str(restart), "XDG_RUNTIME_DIR": str(folder),
            }  # fmt: skip
            command = [
                sys.executable,
                "-m",
                "tests.feed.host_rank_script",
                str(folder / "recipe.yaml"),
                str(folder / "run"),
                str(STEPS),
                state,
            ]
            process = stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            ranks.append(Rank(process=process))
        yield ranks


def check(answers: Sequence[Sequence[dict[str, Any]]], expected: Sequence[str]) -> None:
    """Each step's rows, joined, give its digest; and it is that of a loader of its own."""
    for steps in zip(*answers, strict=True):
        (number,) = {step["step"] for step in steps}
        rows = [bytes.fromhex(row) for step in steps for row in step["rows"]]
        assert fold(number, bytes(16), rows)[0].hex() == expected[number - 1] == steps[0]["digest"]


@pytest.mark.long
@pytest.mark.fault
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ray")
def test_exactly_one_feed_is_shared_continued_after_a_kill_and_stopped_by_who_started_it(tmp_path: Path) -> None:
    recipe = tiny_corpus(tmp_path, texts=2000)
    with Loader(recipe, runner="inline") as loader:
        expected = [next(loader).digest.hex() for _ in range(2 * STEPS + 1)]
    with torchrun(tmp_path) as ranks:
        check([rank.steps(STEPS) for rank in ranks], expected)
        ends = [rank.steps(1)[0] for rank in ranks]
        assert sum(end["started"] for end in ends) == 1
        assert len({end["address"] for end in ends}) == 1
        assert len({end["state"] for end in ends}) == 1
        starter = next(rank for rank, end in zip(ranks, ends, strict=True) if end["started"])
        below = psutil.Process(starter.process.pid).children(recursive=True)
        agents = [process for process in below if process.name() in AGENTS]
        starter.process.kill()
        starter.process.wait()
        left = psutil.wait_procs([process for process in below if process not in agents], timeout=GONE_S)[1]
        for agent in agents:
            with suppress(psutil.NoSuchProcess):
                agent.kill()
        assert left == [], "its cluster ends with it"
    with torchrun(tmp_path, restart=1, state=ends[0]["state"]) as ranks:
        check([rank.steps(STEPS) for rank in ranks], expected)
        again = [rank.steps(1)[0] for rank in ranks]
        (starter,) = [rank for rank, end in zip(ranks, again, strict=True) if end["started"]]
        below = psutil.Process(starter.process.pid).children(recursive=True)
        starter.end()
        others = [rank for rank in ranks if rank is not starter]
        eventually(lambda: not list((tmp_path / "zephon-ray").glob("*.json")), GONE_S)  # it waits for the others, and lets nobody in
        assert [rank.more()["digest"] for rank in others] == [expected[2 * STEPS]] * len(others), "nor does it stop what they use"
        assert starter.process.poll() is None
        for rank in others:
            rank.end()
        assert [rank.process.wait(GONE_S) for rank in ranks] == [0] * RANKS
        assert psutil.wait_procs(below, timeout=GONE_S)[1] == []
    assert runs.verify(str(tmp_path / "run"), runner="threads").last_step >= 2 * STEPS


def test_ranks_on_several_hosts_are_told_that_they_need_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(UserError, match="8 of 16 ranks are on this host"):
        HostFeed(Order(name="", recipe=load_recipe(tiny_corpus(tmp_path)), out=str(tmp_path / "run")))
