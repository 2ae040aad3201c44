"""`run`: global batches made, with their ledger."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType

from rich.progress import Progress, TaskID

from zephon_ray import runs
from zephon_ray.batches import GlobalBatch
from zephon_ray.cli import faults
from zephon_ray.cli.render import emit, mixture, number, pairs_of, progress, say, show, size
from zephon_ray.recipe import Recipe, load_recipe
from zephon_ray.runs import RunSummary


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The command line of `run`."""

    recipe: str
    overrides: tuple[str, ...]
    steps: int
    out: str | None
    runner: str | None
    workers: int | None
    address: str | None
    dp_size: int
    print_digests: bool
    quiet: bool
    as_json: bool


class Stop:
    """Whether a signal asked to stop. The first one lets the step in hand be finished; a second one interrupts."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        # Not through sys.stderr: a handler may come in the middle of a write to it.
        os.write(2, b"zephon-ray: stopping after the step in hand; once more stops at once\n")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for TERM and Ctrl-C. Only a main thread can."""
        before = {number: signal.signal(number, self.handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def make(wanted: Wanted) -> int:
    """Make the steps, and show what they were. Returns the exit code."""
    recipe = load_recipe(wanted.recipe, wanted.overrides)
    stop = Stop()
    on_terminal = wanted.print_digests and sys.stdout.isatty()
    with stop.listening(), progress(wanted=not (wanted.quiet or on_terminal), columns=["steps", "{task.fields[speed]}"]) as bar:
        summary = runs.produce(
            recipe,
            steps=wanted.steps,
            out=wanted.out,
            runner=wanted.runner,
            workers=wanted.workers,
            address=wanted.address,
            dp_size=wanted.dp_size,
            on_step=_Watcher(recipe, wanted, bar).step,
            stop=stop,
        )
    stopped = stop.signal if summary.last_step < wanted.steps and not summary.ended else None
    _summarise(recipe, wanted, summary, stopped)
    return faults.INTERRUPTED if stopped == signal.SIGINT else 0


class _Watcher:
    """Shows each step as it is made."""

    def __init__(self, recipe: Recipe, wanted: Wanted, bar: Progress | None) -> None:
        self._batch_pairs = recipe.global_batch_size * recipe.sequence_length
        self._wanted, self._bar = wanted, bar
        self._task: TaskID | None = bar.add_task("starting", total=wanted.steps, speed="") if bar else None
        self._first, self._began = 0, time.monotonic()

    def step(self, batch: GlobalBatch) -> None:
        if self._wanted.print_digests:
            digest, chain = batch.digest.hex(), batch.chain.hex()
            if self._wanted.as_json:
                emit({"step": batch.step, "digest": digest, "chain": chain, "pairs": list(batch.pairs)})
            else:
                sys.stdout.write(f"{batch.step} {digest} {chain}\n")
                sys.stdout.flush()
        if self._bar is None or self._task is None:
            return
        self._first = self._first or batch.step
        steps = (batch.step - self._first + 1) / max(1e-9, time.monotonic() - self._began)
        speed = f"{steps:.1f} steps/s, {number(steps * self._batch_pairs)} tokens/s"
        self._bar.update(self._task, description="running", completed=batch.step, speed=speed)


def _summarise(recipe: Recipe, wanted: Wanted, summary: RunSummary, stopped: signal.Signals | None) -> None:
    """The end of the run, on stdout; on stderr where stdout is for digests."""
    steps = max(0, summary.last_step - summary.first_step + 1)
    tokens = steps * recipe.global_batch_size * recipe.sequence_length - summary.padding
    targets = [share / sum(recipe.shares()) for share in recipe.shares()]
    names = [source.name for source in recipe.sources]
    if wanted.as_json and not wanted.print_digests and not wanted.quiet:
        total = max(1, sum(summary.pairs))
        emit(
            {
                **asdict(summary),
                "out": wanted.out,
                "stopped": stopped and stopped.name,
                "tokens": tokens,
                "tokens_per_second": tokens / summary.seconds if summary.seconds else None,
                "cpu_seconds_per_mtok": summary.cpu_seconds / tokens * 1e6 if tokens and not summary.cpu_elsewhere else None,
                "mixture": {n: {"realised": p / total, "target": t} for n, p, t in zip(names, summary.pairs, targets, strict=True)},
            }
        )
    elif not wanted.quiet:
        made = f"{summary.first_step} to {summary.last_step} ({steps} new)" if steps else f"none to make: {summary.last_step} are there"
        facts = [("steps", made), ("chain", summary.chain), ("mixture", mixture(names, summary.pairs, targets))]
        if steps:
            facts += [("padding", f"{summary.padding:,} of {tokens + summary.padding:,} pairs"), ("speed", _speed(tokens, summary))]
        if summary.stats:
            again = f", {summary.stats.retries} made again because their worker died" if summary.stats.retries else ""
            cached = f", {summary.stats.cached:,} of them from the token cache" if summary.stats.cached else ""
            damaged = f", {summary.stats.corrupt} made again because their entry was damaged" if summary.stats.corrupt else ""
            facts.append(("units read", f"{summary.stats.units:,} ({size(summary.stats.text_bytes)} of text){cached}{damaged}{again}"))
        show(pairs_of(facts), file=sys.stderr if wanted.print_digests else sys.stdout)
    if summary.ended and summary.last_step < wanted.steps and not wanted.quiet:
        say(f"the stream ended after step {summary.last_step}: the recipe's epochs are over")
    if stopped:
        way_on = "continue with the same command" if wanted.out else "nothing was kept, for there was no --out"
        say(f"zephon-ray: stopped at step {summary.last_step}; {way_on}")


def _speed(tokens: int, summary: RunSummary) -> str:
    if summary.cpu_elsewhere:
        cpu = f"{summary.cpu_seconds:.1f} CPU s here; the cluster's are not counted"
    else:
        cpu = f"{summary.cpu_seconds / tokens * 1e6:.2f} CPU s a million tokens" if tokens else "no tokens"
    return f"{number(tokens / max(1e-9, summary.seconds))} tokens/s, {cpu}, {summary.seconds:.1f} s in all"
