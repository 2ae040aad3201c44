"""What grows with what: lanes, sources, shards, steps, workers, ranks. One table each.

    python -m tests.bench.growth [lanes sources shards steps workers ranks] [--most N]

Costs are CPU seconds, of fresh processes where a whole recipe is measured, and of this one else. `--most` leaves out sizes above it.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

import zephon_ray
from tests.bench.feed import open_same
from tests.bench.startup import write
from tests.feed.feeds import serving
from tests.golden_cases import GOLDEN
from tests.small import a_recipe
from zephon_ray.benchmark.processes import measure
from zephon_ray.collector import prepare
from zephon_ray.plan.windows import epoch_order
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.stream import Stream
from zephon_ray.telemetry import CpuMeter
from zephon_ray.testing import documents, write_lines

LANES = (1, 8, 64, 256, 1024)
SOURCES = (1, 5, 20, 50)
SHARDS = (10, 1_000, 100_000)
STEPS = (10, 1_000, 100_000, 1_000_000)
WORKERS = (1, 2, 4, 8)
RANKS = (1, 2, 4, 8, 16)
MEASURE_S = 4.0
"""CPU seconds for which a recipe is measured."""
LIMIT_S = 600.0
STORE_BYTES = 200 << 20

Row = dict[str, float | int]


def corpus(folder: Path) -> None:
    """Parquet files of one row group a unit, about 10 MB."""
    write(folder / "text", "groups", files=16)


def over(folder: Path, sources: int = 1, **fields: Any) -> Recipe:
    """A recipe whose sources all read the corpus."""
    named = [{"name": f"s{number}", "uri": str(folder / "text"), "weight": 1 / sources} for number in range(sources)]
    recipe = {
        "schema": 1, "name": "growth", "seed": 3, "sequence_length": 512, "global_batch_size": 1024, "unit_bytes": 65_536,
        "tokenizer": {"path": str(GOLDEN / "tokenizer.json"), "eos": "<|eos|>"}, "sources": named, **fields,
    }  # fmt: skip
    return recipe_from_dict(recipe, str(folder))


def parts(folder: Path, recipe: Recipe) -> Row:
    """CPU seconds a million tokens of making units, and of the ordered part."""
    path = folder / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    found = measure("parts", {"recipe": str(path), "overrides": [], "seconds": MEASURE_S}, LIMIT_S).result
    make, collect = found["make_cpu_s_per_mtok"], found["collect_cpu_s_per_mtok"]
    return {"make": make, "ordered part": collect, "both": make + collect}


def lanes(folder: Path, sizes: Iterable[int]) -> Iterator[Row]:
    """A batch of 1,024 rows of 512 from so many lanes."""
    corpus(folder)
    for size in sizes:
        yield {"lanes": size, **parts(folder, over(folder, lanes=size))}


def sources(folder: Path, sizes: Iterable[int]) -> Iterator[Row]:
    """As many sources of equal weight, 8 lanes."""
    corpus(folder)
    for size in sizes:
        yield {"sources": size, **parts(folder, over(folder, size, lanes=8))}


def shards(folder: Path, sizes: Iterable[int]) -> Iterator[Row]:
    """A source of so many small files: its manifest, the order of an epoch, the first batch, a state."""
    process = psutil.Process()
    for size in sizes:
        for number in range(size):
            write_lines(folder / str(size) / f"{number // 1000:04}" / f"{number:06}.jsonl", documents(1, words=40, seed=number % 50))
        recipe = a_recipe(folder, {"a": {"uri": str(folder / str(size)), "epochs": 1}}, execution={"runner": "threads"})
        before, began = process.memory_info().rss, time.process_time()
        job, identity = prepare(recipe)
        row: Row = {"shards": size, "manifest CPU s": time.process_time() - began}
        row["manifest MB"] = (process.memory_info().rss - before) / 1e6
        row["job kB"] = len(ray.cloudpickle.dumps(job)) / 1e3
        began = time.process_time()
        epoch_order(seed=1, source=0, epoch=0, groups=100 * size, shuffled=True)
        row["order of 100 times as many groups CPU s"] = time.process_time() - began
        began = time.process_time()
        with closing(Stream(recipe, prepared=(job, identity))) as stream:
            stream.next_batch()
            row["first batch CPU s"] = time.process_time() - began
            row["state B"] = len(stream.state_bytes())
        yield row


def steps(folder: Path, sizes: Iterable[int]) -> Iterator[Row]:
    """One stream, to its so-manieth step: its state, and what a stream takes from there to its first batch."""
    recipe = a_recipe(folder, {"a": {}}, sequence_length=16, global_batch_size=2)
    with closing(Stream(recipe)) as stream:
        for size in sizes:
            began, first = time.process_time(), stream.state.step
            while stream.state.step < size:
                stream.next_batch()
            row: Row = {"step": size, "us a step": 1e6 * (time.process_time() - began) / max(1, size - first)}
            state = stream.state_bytes()
            row["state B"] = len(state)
            began = time.process_time()
            with closing(Stream(recipe, state=state)) as resumed:
                resumed.next_batch()
            row["resume CPU ms"] = 1e3 * (time.process_time() - began)
            row["RSS MB"] = psutil.Process().memory_info().rss / 1e6
            yield row


def workers(folder: Path, sizes: Iterable[int]) -> Iterator[Row]:
    """A Ray cluster of so many nodes of one CPU each, all on this machine: what a token costs, not how fast they are."""
    corpus(folder)
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False, "dashboard_port": None}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    try:
        nodes = 0
        for size in sizes:
            while nodes < size:
                cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
                nodes += 1
            yield {"workers": size, **_streamed(over(folder, lanes=8, global_batch_size=64), size)}
    finally:
        ray.shutdown()
        cluster.shutdown()


def _streamed(recipe: Recipe, size: int) -> Row:
    with closing(Stream(recipe, runner="ray", workers=size)) as stream:
        for _ in range(20):
            stream.next_batch()
        meter, made, tokens, began = CpuMeter(), stream.stats().units, 0, time.monotonic()
        while time.monotonic() - began < 3 * MEASURE_S:
            batch = stream.next_batch()
            assert batch is not None
            tokens += batch.rows[:, 0].size
            meter.look()
        spent, took = meter.seconds(), time.monotonic() - began
        return {"CPU s a million": spent / tokens * 1e6, "tokens/s": tokens / took, "units": stream.stats().units - made}


def ranks(folder: Path, sizes: Iterable[int]) -> Iterator[Row]:
    """Ranks of one feed, in threads of one process, that take the same rows again and again: CPU of the feed alone."""
    ray.init(
        address="local", num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR, configure_logging=False
    )
    recipe = a_recipe(folder, {"a": {}}, global_batch_size=64, sequence_length=512, execution={"prefetch_steps": 4, "hot_replay_bytes": 1})
    try:
        with serving("growth", recipe, folder / "out", open_production=open_same) as served:
            feed = psutil.Process(served.status.pid)
            for size in sizes:
                for prefetch in (2, 8):
                    yield {"ranks": size, "prefetch": prefetch, **_fed(feed, size, prefetch)}
    finally:
        ray.shutdown()


def _fed(feed: psutil.Process, size: int, prefetch: int, count: int = 200) -> Row:
    with ExitStack() as stack:
        open_rank = partial(zephon_ray.connect, "growth", dp_world_size=size, incarnation=f"{size}-{prefetch}:0", takeover=True)
        loaders = [stack.enter_context(open_rank(dp_rank=rank, prefetch=prefetch)) for rank in range(size)]
        for loader in loaders:
            next(loader)
        before, began = feed.cpu_times(), time.monotonic()
        for _ in range(count):
            for loader in loaders:
                next(loader)
        after = feed.cpu_times()
        spent = after.user + after.system - before.user - before.system
    return {"CPU ms a step": 1e3 * spent / count, "a rank": 1e3 * spent / count / size, "steps/s": count / (time.monotonic() - began)}


TABLES: dict[str, tuple[Callable[[Path, Iterable[int]], Iterator[Row]], tuple[int, ...]]] = {
    "lanes": (lanes, LANES),
    "sources": (sources, SOURCES),
    "shards": (shards, SHARDS),
    "steps": (steps, STEPS),
    "workers": (workers, WORKERS),
    "ranks": (ranks, RANKS),
}


def table(name: str, most: float) -> list[Row]:
    """Measure one, and print its lines as they come."""
    grows, sizes = TABLES[name]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="zephon-growth-") as folder:
        for row in grows(Path(folder), [size for size in sizes if size <= most]):
            if not rows:
                print(f"\n{(grows.__doc__ or '').strip()}\n\n| {' | '.join(row)} |\n|{'---|' * len(row)}")
            print(
                "| " + " | ".join(f"{value:,}" if isinstance(value, int) else f"{value:.4g}" for value in row.values()) + " |", flush=True
            )
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", default=list(TABLES), choices=[*TABLES, []], metavar="table")
    parser.add_argument("--most", type=float, default=float("inf"))
    args = parser.parse_args()
    for name in args.tables or TABLES:
        table(name, args.most)


if __name__ == "__main__":
    main()
