"""Feeds on clusters of their own: a node dies under a lane worker, and object stores are full of what others hold.

The script is `fault_script.py`; the seeds of its random moments are here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.feed.fault_script import LANE_WORKERS, STEPS
from tests.feed.feeds import ROOT

pytestmark = [pytest.mark.fault, pytest.mark.long, pytest.mark.timeout(700)]

LIMIT_S = 660.0
ERROR_S = 300.0
"""In which ranks are told that a store is full: what four productions take that fail one after the other, or three fetches."""


def scenario(name: str, folder: Path, seed: int) -> dict[str, Any]:
    ray_files = tempfile.mkdtemp(prefix="zr")  # short, for its sockets; and its own, lest others find it by Ray's files
    notes = folder / "stderr"
    try:
        with notes.open("wb") as log:
            done = subprocess.run(
                [sys.executable, "-m", "tests.feed.fault_script", name, str(folder), str(seed)],
                cwd=ROOT, env={**os.environ, "RAY_TMPDIR": ray_files}, stdout=subprocess.PIPE, stderr=log, timeout=LIMIT_S, check=False,
            )  # fmt: skip
        assert not done.returncode, notes.read_text(errors="replace")[-3000:]
        found: dict[str, Any] = json.loads(done.stdout)
        print(name, seed, found)
        return found
    finally:
        shutil.rmtree(ray_files, ignore_errors=True)


@pytest.mark.parametrize("seed", range(2))
def test_a_node_killed_under_a_lane_worker_costs_no_row(seed: int, tmp_path: Path) -> None:
    found = scenario("node", tmp_path, seed)
    assert (found["on_head"], found["nodes"]) == (1, LANE_WORKERS), "the feed is on the head, and each lane worker on a node of its own"
    assert (found["same"], found["ended"], found["errors"]) == (True, True, [None, None]), found
    assert (found["steps"], found["replaced"]) == (STEPS, LANE_WORKERS), found


def test_a_store_full_of_what_others_hold_is_gone_around(tmp_path: Path) -> None:
    """Ray spills rows to its disk, and reads them from there."""
    found = scenario("store_full", tmp_path, 0)
    assert (found["same"], found["ended"], found["errors"]) == (True, True, [None, None]), found
    assert (found["steps"], found["spilled_mb"] > 0) == (STEPS, True), found


@pytest.mark.parametrize("where", ["store_and_disk_full", "rank_store_full"])
def test_no_room_at_all_is_one_error_on_every_rank_and_a_job_that_starts_anew_goes_on(where: str, tmp_path: Path) -> None:
    found = scenario(where, tmp_path, 0)
    assert (found["same"], found["ended"]) == (True, True), found
    assert all(error and "full" in error and "\n" not in error for error in found["errors"]), found
    assert found["end_s"] < ERROR_S, found
    later = found["later"]
    assert (later["same"], later["ended"], later["errors"], later["steps"]) == (True, True, [None, None], STEPS), found
