"""What a step costs when lanes are held by lane workers, beside what it costs in one process.

    python tests/bench/production.py [--rows 64] [--sequence 2048] [--lane-workers 1 2] [--steps 300] [--rounds 3]

The corpus is small enough to be kept after its first epoch, so that nothing is read or tokenised while it is measured: what is
left is dealing, mixing, packing and digests, and for a production the references, calls and puts. Prints milliseconds a step:
wall clock, CPU of this process, CPU of the lane workers; the median of some rounds. Each step is dropped at once.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import ray

from tests.corpora import tokenizer_json
from zephon_ray.collector import prepare
from zephon_ray.feed.production import Production
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.runners.base import Job
from zephon_ray.state import Identity
from zephon_ray.stream import Stream
from zephon_ray.testing import documents, write_lines

DOCUMENTS, WORDS = 3000, 600
WARM = 60
"""Steps before it is measured: more than the first epoch."""


def a_recipe(folder: Path, rows: int, sequence: int) -> Recipe:
    (folder / "tokenizer.json").write_text(tokenizer_json())
    for number in range(8):
        write_lines(folder / f"s/{number}.jsonl", documents(DOCUMENTS // 8, WORDS, seed=number))
    fields = {
        "schema": 1, "name": "bench", "seed": 1, "lanes": 8, "sequence_length": sequence, "global_batch_size": rows,
        "tokenizer": {"path": "tokenizer.json"}, "sources": [{"name": "s", "uri": "s"}], "execution": {"runner": "ray"},
    }  # fmt: skip
    return recipe_from_dict(fields, str(folder))


def lane_worker_cpu() -> float:
    """Seconds of all lane workers of this cluster."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        if any("LaneWorker" in word for word in process.cmdline()):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def measured(next_step: Callable[[], Any], warm: int, steps: int) -> tuple[float, float, float]:
    """Milliseconds a step: wall clock, CPU here, CPU of lane workers."""
    for _ in range(warm):
        next_step()
    before = time.monotonic(), time.process_time(), lane_worker_cpu()
    for _ in range(steps):
        next_step()
    after = time.monotonic(), time.process_time(), lane_worker_cpu()
    wall, here, there = (1000 * (b - a) / steps for a, b in zip(before, after, strict=True))
    return wall, here, there


def a_round(prepared: tuple[Job, Identity], lane_workers: int, steps: int) -> tuple[float, float, float]:
    """In one process where there are no lane workers."""
    if not lane_workers:
        with closing(Stream(prepared[0].recipe, runner="inline", prepared=prepared)) as stream:
            return measured(stream.next_batch, WARM, steps)
    with closing(Production(prepared[0], lane_workers=lane_workers)) as production:
        return measured(production.next_step, WARM, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--lane-workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rates: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(a_recipe(Path(folder), args.rows, args.sequence))
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        for _ in range(args.rounds):
            for n in [0, *args.lane_workers]:
                rates.setdefault(f"{n} lane workers" if n else "one process", []).append(a_round(prepared, n, args.steps))
        ray.shutdown()
    print("| | wall ms a step | CPU ms here | CPU ms of lane workers |\n|---|---|---|---|")
    for name, got in rates.items():
        wall, here, there = (statistics.median(column) for column in zip(*got, strict=True))
        print(f"| {name} | {wall:.2f} | {here:.2f} | {there:.2f} |")


if __name__ == "__main__":
    main()
