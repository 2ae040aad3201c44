"""Feeds for tests: actors around the stand-in production, and ranks in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from tests.feed.stand_in import open_on_ray
from zephon_ray.batches import Batch, fold, row_digests
from zephon_ray.feed.feed import Feed, FeedOptions
from zephon_ray.feed.protocol import NAMESPACE, Caller, FeedStatus, actor_name
from zephon_ray.recipe import Recipe
from zephon_ray.stream import Stream

ROOT = Path(__file__).parents[2]
CALLER = Caller(client="test:0")
LIMIT_S = 60.0


@dataclass
class Served:
    """A feed that runs."""

    name: str
    actor: Any

    @property
    def status(self) -> FeedStatus:
        status: FeedStatus = ray.get(self.actor.status.remote(CALLER), timeout=LIMIT_S)
        return status

    def kill(self) -> None:
        """As the kernel does when memory runs out: no goodbye."""
        os.kill(self.status.pid, signal.SIGKILL)


@contextmanager
def serving(
    name: str, recipe: Recipe, out: Path | str, validation: Recipe | None = None, environment: dict[str, str] | None = None, **more: Any
) -> Iterator[Served]:
    """A feed as an actor. Its streams have the folders `train` and `validation` in `out`; its process also has what `environment` says."""
    streams = {"train": recipe} | ({"validation": validation} if validation else {})
    more.setdefault("open_production", open_on_ray)
    options = FeedOptions(name=name, recipes=streams, directories={stream: f"{out}/{stream}" for stream in streams}, **more)
    body = ray.remote(Feed).options(
        name=actor_name(name), namespace=NAMESPACE, lifetime="detached", max_restarts=-1, num_cpus=0, max_concurrency=1000,
        enable_task_events=False, runtime_env={"env_vars": environment or {}},
    )  # fmt: skip
    actor = body.remote(options)
    try:
        yield Served(name, actor)
    finally:
        ray.kill(actor, no_restart=True)


@dataclass(frozen=True)
class Step:
    """What a step must be for all ranks together."""

    step: int
    digest: str
    chain: str


def steps_of(recipe: Recipe, last: int) -> list[Step]:
    """The first steps, made without a feed."""
    stream = Stream(recipe)
    found = []
    while len(found) < last and (batch := stream.next_batch()):
        found.append(Step(batch.step, batch.digest.hex(), batch.chain.hex()))
    stream.close()
    return found


def joined(parts: Sequence[Batch]) -> Step:
    """A step from the arrays of all ranks; what they say of it must be what the rows give."""
    digests = [digest for part in parts for digest in row_digests(part)]
    digest, _ = fold(parts[0].step, bytes(16), digests)
    assert {(part.step, part.digest, part.chain) for part in parts} == {(parts[0].step, digest, parts[0].chain)}
    return Step(parts[0].step, digest.hex(), parts[0].chain.hex())


class Rank:
    """A rank in a process of its own."""

    def __init__(self, name: str, rank: int, of: int, last: int, incarnation: str = "run:0", **more: Any) -> None:
        order = {"name": name, "rank": rank, "of": of, "last": last, "incarnation": incarnation, **more}
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        self.lines: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.feed.rank_script", json.dumps(order)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self, until: Callable[[dict[str, Any]], bool] = lambda _: False) -> list[dict[str, Any]]:
        """What it says, to its end or to a line."""
        assert self.process.stdout
        for text in self.process.stdout:
            self.lines.append(json.loads(text))
            if until(self.lines[-1]):
                return self.lines
        return self.lines

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
        if self.process.stdout:
            self.process.stdout.close()

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "step" in line]


@contextmanager
def ranks(*started: Rank) -> Iterator[tuple[Rank, ...]]:
    try:
        yield started
    finally:
        for rank in started:
            rank.end()


def folded(started: Sequence[Rank]) -> list[Step]:
    """The steps of all ranks, joined by their rows' digests. Each rank has each step once, in order."""
    found = []
    for parts in zip(*(rank.steps for rank in started), strict=True):
        assert len({(part["step"], part["digest"], part["chain"]) for part in parts}) == 1
        rows = [bytes.fromhex(row) for part in parts for row in part["rows"]]
        digest, _ = fold(parts[0]["step"], bytes(16), rows)
        assert digest.hex() == parts[0]["digest"]
        found.append(Step(parts[0]["step"], parts[0]["digest"], parts[0]["chain"]))
    return found


def eventually(what: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """What it gives once it is true."""
    deadline = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.05)
    return found
