"""A run's directory that takes nothing, for a minute and for good: a full disk, a limit of the system, a store that refuses.

What ranks read meanwhile is right, and they go on by themselves, or all of them get one error in the time that is stated.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fault_proxy import SLOW_DOWN, FaultProxy
from tests.feed.feeds import Rank, Served, Step, eventually, folded, ranks, serving, steps_of
from tests.feed.stand_in import open_whole
from tests.s3_server import Bucket
from tests.small import a_recipe
from zephon_ray.feed.feed import PATIENCE_S
from zephon_ray.recipe import Recipe
from zephon_ray.runs import verify

pytestmark = [pytest.mark.fault, pytest.mark.long, pytest.mark.timeout(420), pytest.mark.usefixtures("ray_session")]

STEPS = 80
AT = 10
MINUTE_S = 60.0
SAVE_EVERY = 5
START_S = 200.0
"""For a feed, its lane workers and its first units, on a machine that does other things too."""
SLACK_S = 60.0
"""For a store's own retries, the 10 s in which lines wait to be written to one, and a machine that does other things too."""
DISK_BYTES = 512 << 10


@dataclass
class Place:
    """Where a run is written to, and how it comes to refuse.

    Args:
        out: path or URL.
        recipe: with what is needed to write there.
        refuse, allow: switch; they are given the feed.
        environment: of the feed's process.
    """

    out: str
    recipe: Recipe
    refuse: Callable[[Served], None]
    allow: Callable[[Served], None]
    environment: dict[str, str]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return a_recipe(tmp_path, execution={"runner": "ray", "prefetch_steps": 4})


@pytest.fixture
def expected(recipe: Recipe) -> list[Step]:
    return steps_of(recipe.model_copy(update={"execution": recipe.execution.model_copy(update={"runner": "inline"})}), STEPS)


@contextmanager
def full_disk(recipe: Recipe, folder: Path) -> Iterator[Place]:
    """A small file system of its own, filled to its last byte."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")

    def refuse(served: Served) -> None:
        with suppress(OSError), (disk / "others").open("wb", buffering=0) as file:
            while file.write(bytes(512)):
                pass

    try:
        yield Place(str(disk), recipe, refuse, lambda served: (disk / "others").unlink(), {})
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@contextmanager
def limited(recipe: Recipe, folder: Path) -> Iterator[Place]:
    """The system lets the feed's process write no byte to a file, as a quota that is used up."""

    def limit(served: Served, most: int) -> None:
        resource.prlimit(served.status.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    yield Place(str(folder), recipe, lambda served: limit(served, 0), lambda served: limit(served, resource.RLIM_INFINITY), {})


@contextmanager
def refusing_store(recipe: Recipe, bucket: Bucket, proxy: FaultProxy) -> Iterator[Place]:
    """Object storage that answers each write with "slow down"."""
    refuses = threading.Event()
    proxy.fault = lambda asked: SLOW_DOWN if asked.method in ("PUT", "POST") and refuses.is_set() else None
    storage = bucket.spec(endpoint_url=proxy.endpoint, max_tries=2, retry_seconds=1)
    recipe = recipe.model_copy(update={"execution": recipe.execution.model_copy(update={"storage": storage})})
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    yield Place(f"{bucket.url}/runs", recipe, lambda served: refuses.set(), lambda served: refuses.clear(), environment)


@pytest.fixture(params=["full_disk", "limited", "refusing_store"])
def place(request: pytest.FixtureRequest, recipe: Recipe, tmp_path: Path) -> Iterator[Place]:
    if request.param == "refusing_store":
        made = refusing_store(recipe, request.getfixturevalue("bucket"), request.getfixturevalue("proxy"))
    else:
        made = {"full_disk": full_disk, "limited": limited}[request.param](recipe, tmp_path)
    with made as found:
        yield found


def a_job(incarnation: str = "run:0", **more: object) -> list[Rank]:
    job = [Rank("dir", r, 2, STEPS, incarnation, pace_s=0.05, save_every=SAVE_EVERY, reconnect_s=START_S, **more) for r in range(2)]
    for rank in job:
        threading.Thread(target=rank.read, daemon=True).start()
    return job


def taken(job: list[Rank]) -> int:
    return min(int(rank.steps[-1]["step"]) if rank.steps else 0 for rank in job)


def ended(job: list[Rank], limit_s: float) -> None:
    for rank in job:
        rank.process.wait(limit_s)
    eventually(lambda: all(rank.lines and ({"state", "error"} & rank.lines[-1].keys()) for rank in job), 10)


def refused(served: Served, place: Place, job: list[Rank]) -> float:
    """Let the directory refuse; when `status` says so, give the time since."""
    deadline = time.monotonic() + START_S
    while taken(job) < AT:
        assert time.monotonic() < deadline, (served.status, [rank.lines[-1:] for rank in job])
        assert not any("error" in line for rank in job for line in rank.lines[-1:]), [rank.lines[-1] for rank in job]
        time.sleep(0.1)
    place.refuse(served)
    began = time.monotonic()
    said = eventually(lambda: served.status.streams["train"].waiting, SLACK_S)
    assert f"the run's directory {place.out}/train refuses since" in said
    return began


def test_a_minute_is_waited_for_and_nothing_is_lost(place: Place, expected: list[Step]) -> None:
    with serving("dir", place.recipe, place.out, environment=place.environment, open_production=open_whole) as served:
        with ranks(*a_job()) as started:
            job = list(started)
            began = refused(served, place, job)
            threading.Event().wait(MINUTE_S - (time.monotonic() - began))  # the minute itself
            assert served.status.streams["train"].waiting
            assert taken(job) < STEPS
            place.allow(served)
            ended(job, 120)
            assert folded(job) == expected
            assert len({rank.lines[-1]["state"] for rank in job}) == 1
        assert served.status.streams["train"].waiting is None
    assert verify(f"{place.out}/train", runner="inline", recipe=place.recipe).steps >= STEPS


def test_for_good_is_one_error_on_every_rank_and_a_job_that_starts_anew_goes_on(place: Place, expected: list[Step]) -> None:
    with serving("dir", place.recipe, place.out, environment=place.environment, open_production=open_whole) as served:
        with ranks(*a_job()) as started:
            job = list(started)
            began = refused(served, place, job)
            ended(job, PATIENCE_S + SLACK_S)
            print(json.dumps({"error_after_s": time.monotonic() - began, "said": job[0].lines[-1]}))
            assert {rank.lines[-1].get("error") for rank in job} == {"StorageError"}, [rank.lines[-1] for rank in job]
            assert all("refuses since" in rank.lines[-1]["said"] and "Mend it" in rank.lines[-1]["said"] for rank in job)
            assert all([line["chain"] for line in rank.steps] == [s.chain for s in expected[: len(rank.steps)]] for rank in job)
            saved = [{line["saved"]: line["state"] for line in rank.lines if "saved" in line} for rank in job]
        place.allow(served)
        at = max(set(saved[0]) & set(saved[1]))
        with ranks(*a_job("run:1", state=saved[0][at])) as anew:
            ended(list(anew), 120)
            assert folded(list(anew)) == expected[at:]
    assert verify(f"{place.out}/train", runner="inline", recipe=place.recipe).steps >= STEPS
