"""Ray workers read from a bucket what they read from a disk; their credentials are their environment's, and are told to nobody."""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.buckets import a_corpus, stored
from tests.fault_proxy import SLOW_DOWN, Asked, Fault, FaultProxy
from tests.s3_server import KEY, SECRET, Bucket
from zephon_ray.recipe import Recipe
from zephon_ray.runs import produce, verify

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
STEPS = 12
ANSWER_S = 60.0
BURST = 7
"""Requests of a burst; as many are answered after it."""


class Driver:
    """A process in a cluster of its own, with the credentials of the test that starts it."""

    def __init__(self, process: subprocess.Popen[bytes], notes: Path, ray_files: Path) -> None:
        self._process, self._notes, self._ray_files = process, notes, ray_files

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        until, said = time.monotonic() + ANSWER_S, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not said.endswith(b"\n"):
                part = os.read(self._process.stdout.fileno(), 65536) if selector.select(max(0.0, until - time.monotonic())) else b""
                assert part, f"nothing within {ANSWER_S} s: {said!r} {self._notes.read_text(errors='replace')[-2000:]}"
                said += part
        found: dict[str, Any] = json.loads(said)
        return found

    def run(self, recipe: Recipe, out: str | None = None) -> dict[str, Any]:
        task = {"recipe": yaml.safe_load(recipe.to_yaml()), "folder": str(ROOT), "steps": STEPS, "out": out}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task).encode() + b"\n")
        self._process.stdin.flush()
        return self.answer()

    def told(self) -> list[str]:
        """Files in which Ray or the driver wrote a key or a secret."""
        files = [self._notes, *(path for path in self._ray_files.rglob("*") if path.is_file() and not path.is_symlink())]
        return [path.name for path in files if any(word.encode() in path.read_bytes() for word in (KEY, SECRET))]


@pytest.fixture
def driver(bucket: Bucket, tmp_path: Path) -> Iterator[Driver]:
    notes, ray_files = tmp_path / "stderr", Path(tempfile.mkdtemp(prefix="zr"))  # names of Ray's sockets have little room
    command = [sys.executable, "-m", "tests.ray.bucket_script"]
    environment = {**os.environ, "RAY_TMPDIR": str(ray_files)}
    with (
        notes.open("wb") as log,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        made = Driver(process, notes, ray_files)
        try:
            assert made.answer() == {"ready": True}
            yield made
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(30) == 0
        finally:
            process.kill()
            shutil.rmtree(ray_files, ignore_errors=True)


def bursts() -> Callable[[Asked], Fault]:
    """Refusals in bursts, though no request is refused for ever."""
    return lambda asked: SLOW_DOWN if asked.number // BURST % 2 and asked.before < 2 else None


def test_ray_reads_a_bucket_as_a_disk_through_refusals_and_tells_nobody_its_credentials(
    bucket: Bucket, proxy: FaultProxy, driver: Driver
) -> None:
    """In one test, since a cluster takes seconds to start."""
    local = a_corpus(bucket.folder)
    remote = stored(local, bucket.url, endpoint_url=proxy.endpoint, max_tries=8, retry_seconds=4)
    expected = produce(local, steps=STEPS, runner="inline").chain

    assert driver.run(remote) == {"chain": expected, "told": []}
    assert proxy.faults == 0
    assert {asked.access_key for asked in proxy.asked} == {KEY}

    proxy.fault = bursts()
    out = f"{bucket.url}/run"
    assert driver.run(remote, out) == {"chain": expected, "told": []}
    assert proxy.faults >= BURST

    proxy.fault = lambda asked: SLOW_DOWN if asked.name == "b/1.jsonl" and asked.method in ("GET", "HEAD") else None
    refused = driver.run(remote)
    assert refused.get("error") == "StorageError", refused
    assert f"{bucket.url}/b/1.jsonl: " in refused["text"]
    assert re.search(r"after \d of 8 tries, [\d.]+ of 4 s", refused["text"]), refused
    assert "\n" not in refused["text"]
    assert refused["took_s"] < 4 + 20
    assert KEY not in refused["text"]

    proxy.fault = lambda asked: None
    assert verify(out, recipe=remote).steps == STEPS
    assert driver.told() == []
