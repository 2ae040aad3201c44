"""Whether a feed that runs for long grows: memory, the object store, open files. Run: `make soak`, or `python -m tests.bench.soak`.

A small recipe that reads all the time, two ranks in processes of their own that take a step now and then and save states, and a look at
all processes of the cluster every so many steps. SOAK_SECONDS (1,200) shortens it; below a few minutes it only proves that it runs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

import zephon_ray
from tests.feed.feeds import ROOT, Served, serving
from tests.feed.stand_in import open_whole
from tests.ray.test_ray_store import store
from tests.small import documents, fields, write_lines
from zephon_ray.recipe import Recipe, recipe_from_dict

SECONDS = float(os.environ.get("SOAK_SECONDS", "1200"))
PACE_S = 0.05
"""Between two steps of a rank, so that 1,200 s are about 20,000 steps. The feed is ahead all the time."""
SAVE_EVERY = 100
LOOKS = 120
MOST_MB = 1.0
"""That memory, and the store, may grow in 1,000 steps."""
MOST_FILES = 2.0
"""That open files may grow in 1,000 steps."""
LEAST_STEPS = 1000
"""In the last half, to tell growth from chance."""
NAME = "soak"
STORE_BYTES = 128 << 20
KINDS = {
    "gcs_server": "gcs", "raylet/raylet": "raylet", "tests.bench.soak": "ranks", "ReadZephon": "reading", "ray::IDLE": "reading",
    "dashboard": "agents", "runtime_env": "agents", "log_monitor": "agents", "monitor.py": "agents",
}  # fmt: skip
"""What a process is by a part of its command line. One that reads units is idle between two waves; actors go by their class."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The cluster at one moment.

    Args:
        step: that the slower rank has.
        memory: MB of each kind of processes: anonymous PSS, which is what a leak makes grow. Pages of libraries are left out, since
            their share depends on who else runs on the machine, and so is the object store, which is looked at by itself.
        store: MB of objects.
        files: open, of all processes.
        processes: of each kind.
    """

    step: int
    memory: Counter[str] = field(default_factory=Counter)
    store: float = 0.0
    files: int = 0
    processes: Counter[str] = field(default_factory=Counter)


def a_corpus(folder: Path) -> Recipe:
    """Too large to be kept in memory after an epoch, so that it is read as long as the soak lasts."""
    write_lines(folder / "a" / "00.jsonl", documents(4000, words=60))
    for copy in range(1, 64):
        os.link(folder / "a" / "00.jsonl", folder / "a" / f"{copy:02}.jsonl")
    execution = {"runner": "ray", "prefetch_steps": 8, "lane_workers": 2, "hot_replay_bytes": 8 << 20, "workers": {"min": 1, "max": 2}}
    return recipe_from_dict(
        fields({"a": {}}, lanes=8, global_batch_size=16, sequence_length=512, unit_bytes=64 << 10, execution=execution), str(folder)
    )


def rank(number: int) -> None:
    """Reads until it is told to end, and says now and then how far it is."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with zephon_ray.connect(NAME, dp_rank=number, dp_world_size=2, incarnation="soak:0") as feed:
        while not ended.wait(PACE_S):
            batch = next(feed)
            if batch.step % SAVE_EVERY == 0:
                feed.state_dict()
            print(json.dumps({"step": batch.step, "chain": batch.chain.hex()}), flush=True)


class Ranks:
    """Two ranks; `steps` is where each is, and only the last line of each is kept."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        self.steps, self.chains = [0, 0], [{}, {}]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.bench.soak", str(number)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
            )
            for number in range(2)
        ]
        self._threads = [threading.Thread(target=self._read, args=(number,), daemon=True) for number in range(2)]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int) -> None:
        output = self._processes[number].stdout
        assert output is not None
        for line in output:
            said = json.loads(line)
            self.chains[number] = {said["step"]: said["chain"]}
            self.steps[number] = said["step"]

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def kind_of(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    actor = re.match(r"ray::(\w+)", words)
    return next((kind for part, kind in KINDS.items() if part in words), actor[1] if actor else "other")


def anonymous_mb(pid: int) -> float:
    (line,) = [line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss_Anon:")]
    return int(line.split()[1]) / 1024


def look(step: int) -> Look:
    seen = Look(step=step, store=store().object_store_bytes_used / 2**20)
    files = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError):
            kind = kind_of(process)
            seen.memory[kind] += anonymous_mb(process.pid)  # type: ignore[assignment]
            files += process.num_fds()
            seen.processes[kind] += 1
    return Look(step=step, memory=seen.memory, store=seen.store, files=files, processes=seen.processes)


def slope(looks: Sequence[Look], values: Sequence[float]) -> float:
    """Growth in 1,000 steps, by least squares."""
    steps = [seen.step for seen in looks]
    return 1000 * float(np.polyfit(steps, values, 1)[0]) if len(set(steps)) > 1 else 0.0


def watch(served: Served, seconds: float) -> list[Look]:
    looks, ranks = [], Ranks()
    try:
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            time.sleep(seconds / LOOKS)
            assert ranks.alive, "a rank ended"
            looks.append(look(min(ranks.steps)))
            print(row(looks[-1]), flush=True)
        status = served.status.streams["train"]
        assert (status.reopened, status.error) == (0, None), status
        assert status.units, "it read"
    finally:
        ranks.end()
    return looks


def row(seen: Look) -> str:
    kinds = " ".join(f"{kind}={seen.memory[kind]:.1f}/{seen.processes[kind]}" for kind in sorted(seen.memory))
    return f"{seen.step:7d} {sum(seen.memory.values()):8.1f} {seen.store:7.1f} {seen.files:5d}  {kinds}"


def table(looks: Sequence[Look]) -> dict[str, float]:
    """Growth in 1,000 steps over `looks`: MB of each kind of processes, of all, and of the store, and open files. It is printed too."""
    columns = {kind: [seen.memory[kind] for seen in looks] for kind in sorted({kind for seen in looks for kind in seen.memory})}
    columns["memory"] = [sum(seen.memory.values()) for seen in looks]
    columns["store"] = [seen.store for seen in looks]
    columns["files"] = [seen.files for seen in looks]
    found = {name: slope(looks, values) for name, values in columns.items()}
    print(f"steps {looks[0].step} to {looks[-1].step}:       first     last     most  in 1,000 steps")
    for name, values in columns.items():
        print(f"{name:28s} {values[0]:8.1f} {values[-1]:8.1f} {max(values):8.1f} {found[name]:+9.2f}")
    return found


def main(arguments: Sequence[str]) -> None:
    if arguments:
        rank(int(arguments[0]))
        return
    more: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    ray.init(address="local", num_cpus=2, object_store_memory=STORE_BYTES, **more)
    print("   step       MB   store files  of each kind: MB / processes")
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(NAME, a_corpus(Path(folder)), Path(folder) / "out", open_production=open_whole) as served,
    ):
        looks = watch(served, SECONDS)
    ray.shutdown()
    half = looks[len(looks) // 2 :]
    found = table(half)
    if half[-1].step - half[0].step < LEAST_STEPS:
        print(f"fewer than {LEAST_STEPS} steps in the last half: whether it grows cannot be told. The whole soak takes 1,200 s")
        return
    assert max(found["memory"], found["store"]) < MOST_MB, f"it grows by more than {MOST_MB} MB in 1,000 steps"
    assert found["files"] < MOST_FILES, "files are left open"


if __name__ == "__main__":
    main(sys.argv[1:])
