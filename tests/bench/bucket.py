"""What a bucket costs beside a disk: listing, and reading through the runner `threads`.

    python -m tests.bench.bucket

The store is `rclone serve s3` on the loopback address, on the same CPUs, and its bucket lies on the same disk: what is seen is the cost
of the client and the server, not of a network.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.buckets import stored
from tests.s3_server import KEY, SECRET, s3_server
from tests.small import a_recipe, documents, write_lines
from zephon_ray.recipe import Recipe
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.runners.base import RunnerStats
from zephon_ray.runs import produce
from zephon_ray.storage import Storage

OBJECTS = 1000
LARGE_MB = 64
SHARDS, DOCUMENTS, WORDS = 16, 100, 400
STEPS, TIMES = 40, 3


def main() -> None:
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
    with tempfile.TemporaryDirectory() as folder, s3_server(Path(folder)) as endpoint:
        many = Path(folder) / "many"
        many.mkdir()
        for number in range(OBJECTS):
            (many / f"{number:05d}.jsonl").touch()
        storage = Storage(StorageSpec(endpoint_url=endpoint))
        for url in (str(many), "s3://many", "s3a://many"):
            storage.list_files(url)  # connect
            best = min(_seconds(storage, url) for _ in range(TIMES))
            print(f"list {OBJECTS} objects, {_scheme(url):5} {best * 1e3:8.1f} ms")
        (many / "large").write_bytes(os.urandom(1 << 20) * LARGE_MB)
        for url in (str(many), "s3://many", "s3a://many"):
            best = min(_read(storage, f"{url}/large") for _ in range(TIMES))
            print(f"read in parts of 1 MiB, 2 threads, {_scheme(url):5} {LARGE_MB / best:8.1f} MiB/s")
        corpus = Path(folder) / "corpus"
        for shard in range(SHARDS):
            write_lines(corpus / "a" / f"{shard:02d}.jsonl", documents(DOCUMENTS, words=WORDS, seed=shard))
        local = a_recipe(corpus, {"a": {"window_groups": 8}}, sequence_length=512, global_batch_size=64, unit_bytes=1 << 18)
        for name, recipe in (("disk", local), *((s, stored(local, f"{s}://corpus", endpoint_url=endpoint)) for s in ("s3", "s3a"))):
            best = min((_run(recipe) for _ in range(TIMES)), key=lambda result: result[0])
            seconds, stats = best
            print(f"read and tokenise, 2 threads, {name:5} {stats.text_bytes / seconds / 1e6:6.1f} MB/s of text ({stats.units} units)")


def _scheme(url: str) -> str:
    return url.split("://")[0] if "://" in url else "disk"


def _read(storage: Storage, url: str) -> float:
    """Seconds for every byte of a file, its halves side by side."""

    def half(start: int) -> None:
        with storage.open_input(url) as file:
            for at in range(start, start + LARGE_MB // 2):
                assert len(file.read_at(1 << 20, at << 20)) == 1 << 20

    began = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(half, (0, LARGE_MB // 2)))
    return time.perf_counter() - began


def _seconds(storage: Storage, url: str) -> float:
    began = time.perf_counter()
    assert len(storage.list_files(url)) == OBJECTS
    return time.perf_counter() - began


def _run(recipe: Recipe) -> tuple[float, RunnerStats]:
    summary = produce(recipe, steps=STEPS, runner="threads", workers=2)
    assert summary.stats is not None
    return summary.seconds, summary.stats


if __name__ == "__main__":
    main()
