"""What a rank waits for a step of 32 MB, and what a rewind costs, hot and cold. Run: `python -m tests.bench.feed`."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

import zephon_ray
from tests.feed.feeds import serving
from tests.feed.stand_in import Produced, open_whole
from tests.ray.many_units import many_units
from tests.small import a_recipe
from zephon_ray.batches import GlobalStep, fold
from zephon_ray.collector import first_state
from zephon_ray.feed.blocks import RowBlock
from zephon_ray.feed.reader import Reader
from zephon_ray.hashing import digest128
from zephon_ray.ledger import Recorded
from zephon_ray.runners.base import Job, RunnerStats
from zephon_ray.state import Identity, StreamState

BLOCK_ROWS = 320
BACK = 300


class Same:
    """The same rows again and again, put anew for each step: nothing is measured but the way to the rank."""

    def __init__(self, job: Job, state: StreamState | None) -> None:
        self._recipe, self._state = job.recipe, state or first_state(job)
        recipe = job.recipe
        self._rows = np.arange(recipe.global_batch_size * 3 * recipe.sequence_length, dtype=np.int32).reshape(
            recipe.global_batch_size, 3, recipe.sequence_length
        )
        self._digests = tuple(digest128(row) for row in self._rows)

    def next_step(self) -> Produced:
        step = self._state.step + 1
        digest, chain = fold(step, self._state.chain, self._digests)
        self._state = StreamState(step=step, chain=chain, lanes=self._state.lanes)
        made = GlobalStep(
            step=step, row_digests=self._digests, digest=digest, chain=chain, pairs=(step,), padding=0, windows={}, left_out={},
            lanes=self._state.lanes,
        )  # fmt: skip
        rows = self._rows
        blocks = [
            RowBlock(first_row=at, rows=BLOCK_ROWS, ref=ray.put(rows[at : at + BLOCK_ROWS])) for at in range(0, len(rows), BLOCK_ROWS)
        ]
        return Produced(made, blocks)

    def close(self) -> None:
        pass

    def stats(self) -> RunnerStats:
        return RunnerStats(units=0, text_bytes=0, skipped_bytes=0, retries=0, workers=0)


def open_same(job: Job, identity: Identity, state: StreamState | None, recorded: Recorded) -> Same:
    return Same(job, state)


def latency(folder: Path, steps: int, train_s: float) -> dict[str, float]:
    """Milliseconds (medians) of `next`, and of fetching a step in the thread behind it, for one rank that takes the whole batch."""
    recipe = a_recipe(folder, global_batch_size=1280, sequence_length=2048, execution={"prefetch_steps": 4, "hot_replay_bytes": 1})
    fetched, waited = [], []
    fetch = Reader._fetch

    def timed(self: Reader, reply: Any) -> Any:
        began = time.perf_counter()
        try:
            return fetch(self, reply)
        finally:
            fetched.append(time.perf_counter() - began)

    Reader._fetch = timed  # type: ignore[method-assign]
    try:
        with serving("bench", recipe, folder / "out", open_production=open_same), zephon_ray.connect("bench") as loader:
            for _ in range(steps):
                time.sleep(train_s)  # the feed gets ahead
                began = time.perf_counter()
                batch = next(loader)
                waited.append(time.perf_counter() - began)
                del batch
    finally:
        Reader._fetch = fetch  # type: ignore[method-assign]
    return {"next_ms": 1e3 * statistics.median(waited[3:]), "fetch_ms": 1e3 * statistics.median(fetched[3:])}


def rewinds(folder: Path, back: int) -> dict[str, float]:
    """Seconds from a new incarnation's first call to its first batch, `back` steps before the last one."""
    found = {}
    for mode, budget in (("hot", 1 << 30), ("cold", 1)):
        recipe = many_units(
            folder / mode, files=8, units=100, words=60, execution={"prefetch_steps": 4, "hot_replay_bytes": budget}
        )  # fmt: skip
        with serving(f"rewind-{mode}", recipe, folder / mode / "out", open_production=open_whole) as served:
            with zephon_ray.connect(f"rewind-{mode}", incarnation="run:0") as loader:
                for _ in range(20):
                    next(loader)
                state = loader.state_dict()
                for _ in range(back):
                    next(loader)
            began = time.perf_counter()
            with zephon_ray.connect(f"rewind-{mode}", incarnation="run:1", state=state) as loader:
                next(loader)
                found[f"{mode}_s"] = time.perf_counter() - began
            assert served.status.streams["train"].replay == mode
    return found


def main() -> None:
    ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level="ERROR", configure_logging=False)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(latency(Path(folder) / "l", 60, 0.15) | rewinds(Path(folder) / "r", BACK)))
    ray.shutdown()


if __name__ == "__main__":
    main()
