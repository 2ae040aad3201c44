"""Nodes die, leave and join under a running stream, and it stays the contract's. On a cluster of several nodes on this machine."""

from __future__ import annotations

import json
import os
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

from tests.ray.nodes_script import STALL_S

pytestmark = [pytest.mark.fault, pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
READY_S = 60.0
ANSWER_S = 240.0
Scenario = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenario]:
    """Runs a scenario of the script by its name. The cluster is one for all."""
    folder, notes = tmp_path_factory.mktemp("nodes"), tmp_path_factory.mktemp("notes") / "stderr"
    ray_files = tempfile.mkdtemp(prefix="zr")  # short, for its sockets; and its own, lest others find it by Ray's files
    command = [sys.executable, "-m", "tests.ray.nodes_script", str(folder)]
    with (
        notes.open("wb") as log,
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "RAY_TMPDIR": ray_files}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        ) as process,
    ):

        def run(name: str) -> dict[str, Any]:
            assert process.stdin is not None
            process.stdin.write(f"{name}\n".encode())
            process.stdin.flush()
            found = answer(process, ANSWER_S, notes)
            assert "raised" not in found, found
            return found

        try:
            assert answer(process, READY_S, notes) == {"ready": True}
            yield run
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(60)
        finally:
            process.kill()
            shutil.rmtree(ray_files, ignore_errors=True)


def answer(process: subprocess.Popen[bytes], limit_s: float, notes: Path) -> dict[str, Any]:
    assert process.stdout is not None
    until, said = time.monotonic() + limit_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not said.endswith(b"\n"):
            part = os.read(process.stdout.fileno(), 65536) if selector.select(max(0.0, until - time.monotonic())) else b""
            assert part, f"nothing within {limit_s} s: {said!r} {notes.read_text(errors='replace')[-2000:]}"
            said += part
    found: dict[str, Any] = json.loads(said)
    return found


def test_workers_go_where_resources_and_labels_send_them(scenario: Scenario) -> None:
    found = scenario("placed")
    for name, used in (("labels", [0, 1, 1]), ("resources", [0, 0, 1])):
        assert (found[name]["same"], found[name]["error"]) == (True, ""), found
        assert found[name]["used"] == used, found
        assert found[name]["workers"] == sum(used), found


def test_a_node_killed_with_room_left_elsewhere_changes_nothing(scenario: Scenario) -> None:
    found = scenario("killed_with_room_left")
    assert (found["same"], found["error"]) == (True, ""), found
    assert min(found["used"]) >= 1, "both nodes were at work"
    assert found["longest_s"] < 60, found


def test_the_only_node_killed_and_replaced_changes_nothing(scenario: Scenario) -> None:
    found = scenario("killed_and_replaced")
    assert (found["same"], found["error"]) == (True, ""), found
    assert found["longest_s"] < 60, found


def test_the_only_node_killed_for_good_is_one_clear_error_in_stated_time(scenario: Scenario) -> None:
    """Three executions are given `stall_seconds`, or what processes take to start; and each is asked for its workers."""
    found = scenario("killed_for_good")
    assert found["same"], "what came before was right"
    assert found["steps"] >= 10
    assert "source 's', shard " in found["error"], found
    assert "room for 0 workers" in found["error"], found
    assert "\n" not in found["error"]
    assert found["end_s"] < 3 * STALL_S + 30, found


def test_a_node_that_leaves_changes_nothing(scenario: Scenario) -> None:
    found = scenario("left")
    assert (found["same"], found["error"]) == (True, ""), found
    assert found["used"] == [1], "it was at work"
    assert found["longest_s"] < 60, found


def test_a_node_that_joins_is_used_and_changes_nothing(scenario: Scenario) -> None:
    found = scenario("joined")
    assert (found["same"], found["error"]) == (True, ""), found
    assert found["used_s"] is not None, found
    assert found["used_s"] < 30, found
    assert found["workers"][0] == 1, found


def test_the_pool_shrinks_under_a_slow_consumer_and_grows_under_a_hungry_one(scenario: Scenario) -> None:
    found = scenario("slow_then_hungry")
    assert (found["same"], found["error"]) == (True, ""), found
    assert found["most"] > 1, found
    assert found["shrunk_s"] is not None, found
    assert found["shrunk_s"] < 30, found
    assert found["grown_s"] is not None, found
    assert found["grown_s"] < 30, found
