"""The story: one recipe run four ways, and the digests of the rows that the ranks were given.

1. at dp 4 in one go: what all others are compared with;
2. at dp 4 again, with a worker process killed on the way, up to the step where it is stopped and its state saved;
3. and 4. from that state to the end, at dp 2 and at dp 8.

With the runner "ray" all of them run on one cluster of this process's own, which is started before and ended after them.

A stream is cut for all ranks of a step, as a feed would. No digest is taken on trust: the rows of every rank are copied, hashed and
folded again, and a variant is what that gave.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from zephon_ray.batches import GlobalBatch, fold, row_digests
from zephon_ray.collector import prepare
from zephon_ray.errors import SystemFault, UserError
from zephon_ray.recipe import Recipe
from zephon_ray.runners.base import Job
from zephon_ray.runners.hold import held
from zephon_ray.runners.ray_worker import TITLE
from zephon_ray.runners.registry import default_workers
from zephon_ray.state import Identity
from zephon_ray.stream import Stream, check_address
from zephon_ray.telemetry import CpuMeter, descendants

LEAST_STEPS = 6
"""So that there is a step to kill at, one to stop at, and one to go on with."""

_WORKERS = (b"zephon_ray.runners.worker", TITLE.encode())
"""What the command lines of workers hold: of "processes" always, of "ray" while they are at work (the name of its tasks)."""

_AT_WORK_S = 20.0
"""How long a worker is awaited that is at work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Killed:
    """A worker process that was killed with SIGKILL: its number, and the step that was taken last before."""

    pid: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to run some of the steps.

    Args:
        name: for tables.
        dp_size: ranks.
        runner: as recipes name it.
        first: the first step.
        digests, chains: 16 bytes a step, folded again from the rows of all ranks.
        pairs: of each source, those of all pieces begun up to the last step.
        padding: pairs of padding in these steps.
        seconds, cpu_seconds: wall clock, and CPU of this process and of those that it started, workers among them.
        units: units tokenised.
        retries: units made again because their worker died.
        killed: the worker that was killed, if one was.
    """

    name: str
    dp_size: int
    runner: str
    first: int
    digests: tuple[bytes, ...]
    chains: tuple[bytes, ...]
    pairs: tuple[int, ...]
    padding: int
    seconds: float
    cpu_seconds: float
    units: int
    retries: int
    killed: Killed | None

    @property
    def last(self) -> int:
        return self.first + len(self.digests) - 1

    def digest(self, step: int) -> bytes | None:
        """Of a step; None where the variant did not make it."""
        return self.digests[step - self.first] if self.first <= step <= self.last else None

    def chain(self, step: int) -> bytes | None:
        return self.chains[step - self.first] if self.first <= step <= self.last else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """All variants, the reference first.

    Args:
        recipe: what was run.
        steps: of the reference.
        stopped: the step after which the state was saved.
        state_bytes: size of that state.
        cpu_elsewhere: the workers were on a cluster that was joined, and their CPU is not in `cpu_seconds`.
        variants: in the order they were run.
    """

    recipe: Recipe
    steps: int
    stopped: int
    state_bytes: int
    cpu_elsewhere: bool
    variants: tuple[Variant, ...]

    @property
    def differing(self) -> list[tuple[int, str]]:
        """(step, name of the variant) wherever digest or chain is not that of the reference; empty if the promise holds."""
        reference = self.variants[0]
        return [
            (step, variant.name)
            for variant in self.variants[1:]
            for step in range(variant.first, variant.last + 1)
            if (variant.digest(step), variant.chain(step)) != (reference.digest(step), reference.chain(step))
        ]

    @property
    def compared(self) -> int:
        """How many steps were made a second or third time and compared."""
        return sum(len(variant.digests) for variant in self.variants[1:])


def tell(recipe: Recipe, *, steps: int, runner: str, address: str | None = None, say: Callable[[str], None] = lambda _: None) -> Story:
    """Run the four variants.

    Args:
        recipe: one whose batches 2, 4 and 8 ranks can share, and whose stream has `steps` steps.
        steps: at least `LEAST_STEPS`.
        runner: by name. Where its workers are no processes that we started, the variant with the kill has "processes".
        address: of a Ray cluster, for "ray"; None for one of its own.
        say: told in a sentence what is being done.

    Raises:
        UserError: too few steps, or an address for a runner that has none.
        SystemFault: the stream ended early, or there was no worker to kill.
        RecipeError, SourceError, StorageError, RunnerError: as `Stream`.
    """
    if steps < LEAST_STEPS:
        raise UserError(f"steps={steps}: the demo needs at least {LEAST_STEPS}, to kill, to stop and to go on. Use --steps {LEAST_STEPS}")
    for dp_size in (2, 4, 8):
        recipe.check_dp(0, dp_size)
    check_address(runner, address)
    telling = _Telling(recipe, runner, address, say)
    kill, stop = steps // 3, 2 * steps // 3
    if runner == "ray":
        say("starting Ray on this machine" if address is None else f"joining the Ray cluster at {address}")
    with held(runner, address=address):
        reference, _ = telling.variant("dp 4, in one go", 4, 1, steps)
        interrupted, state = telling.variant("dp 4, worker killed", 4, 1, stop, kill_after=kill)
        resumed = [telling.variant(f"resumed at dp {dp_size}", dp_size, stop + 1, steps, state=state)[0] for dp_size in (2, 8)]
    return Story(
        recipe=recipe, steps=steps, stopped=stop, state_bytes=len(state), cpu_elsewhere=address is not None,
        variants=(reference, interrupted, *resumed),
    )  # fmt: skip


class _Telling:
    """What the variants of a story share."""

    def __init__(self, recipe: Recipe, runner: str, address: str | None, say: Callable[[str], None]) -> None:
        self._recipe, self._runner, self._address, self._say = recipe, runner, address, say
        self._prepared: tuple[Job, Identity] = prepare(recipe)
        self._workers = default_workers(recipe) if address is None else None

    def _runner_for(self, *, kill: bool) -> tuple[str, str | None]:
        """Name and address. Only a process that we started is ours to be killed."""
        ours = self._runner == "processes" or (self._runner == "ray" and self._address is None)
        return ("processes", None) if kill and not ours else (self._runner, self._address)

    def variant(
        self, name: str, dp_size: int, first: int, last: int, *, state: bytes | None = None, kill_after: int | None = None
    ) -> tuple[Variant, bytes]:
        """Run steps first..last for some ranks. Returns the variant, and the state after it."""
        runner, address = self._runner_for(kill=kill_after is not None)
        self._say(f"{name}: steps {first} to {last} (runner {runner})")
        began, cpu = time.monotonic(), CpuMeter()
        ranks = _Ranks(dp_size)
        killed: Killed | None = None
        pairs, padding = (0,) * len(self._recipe.sources), 0
        stream = Stream(self._recipe, runner=runner, workers=self._workers, address=address, state=state, prepared=self._prepared)
        with closing(stream):
            ranks.chain = stream.state.chain
            for step in range(first, last + 1):
                batch = stream.next_batch()
                if batch is None:
                    raise SystemFault(f"{name}: the stream ended before step {step}. Tell a story of at most {step - 1} steps")
                ranks.take(batch)
                pairs, padding = batch.pairs, padding + batch.padding
                cpu.look()
                if step == kill_after:
                    killed = Killed(pid=_kill_a_worker(), step=step)
                    self._say(f"{name}: worker process {killed.pid} killed with SIGKILL after step {step}")
            after, stats = stream.state_bytes(), stream.stats()
            cpu.look(now=True)
        variant = Variant(
            name=name, dp_size=dp_size, runner=runner, first=first, digests=tuple(ranks.digests), chains=tuple(ranks.chains), pairs=pairs,
            padding=padding, seconds=time.monotonic() - began, cpu_seconds=cpu.seconds(), units=stats.units, retries=stats.retries,
            killed=killed,
        )  # fmt: skip
        return variant, after


class _Ranks:
    """All ranks of a variant: each gets its rows, and what they got is hashed and folded again."""

    def __init__(self, dp_size: int) -> None:
        self._dp_size = dp_size
        self.chain = bytes(16)
        self.digests: list[bytes] = []
        self.chains: list[bytes] = []

    def take(self, batch: GlobalBatch) -> None:
        rows = [digest for rank in range(self._dp_size) for digest in row_digests(batch.of_rank(rank, self._dp_size))]
        digest, self.chain = fold(batch.step, self.chain, rows)
        self.digests.append(digest)
        self.chains.append(self.chain)


def _kill_a_worker() -> int:
    """Kill one of this process's worker processes, as the kernel does when memory runs out. Returns its number.

    Raises:
        SystemFault: there is none, or none comes to work in time.
    """
    deadline, pause = time.monotonic() + _AT_WORK_S, threading.Event()
    while time.monotonic() < deadline:
        for process in descendants():
            with suppress(OSError):  # it ended in the meantime
                command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                if any(worker in command for worker in _WORKERS):
                    os.kill(process.pid, signal.SIGKILL)
                    return process.pid
        pause.wait(0.02)
    raise SystemFault(
        f"no worker process was at work for {_AT_WORK_S:g} s, so none could be killed. The demo looks for one in /proc, which Linux has"
    )
