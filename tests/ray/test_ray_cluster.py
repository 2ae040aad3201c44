"""Clusters that loaders start, join and leave. Each in a process of its own, which Ray has not met."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.core.runner_suite import eventually
from tests.ray.test_ray_loaders import at_work
from tests.ray_session import living
from zephon_ray.errors import RunnerError, UserError
from zephon_ray.loader import Loader
from zephon_ray.runners import ray_cluster
from zephon_ray.testing import tiny_corpus

pytestmark = pytest.mark.timeout(150)


def found_by(script: str, *args: str, **environment: str) -> dict[str, Any]:
    """What a script put into the file that its last argument names; it must print nothing."""
    env = {**os.environ, **environment}
    ended = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=120, check=False, env=env)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    found: dict[str, Any] = json.loads(Path(args[-1]).read_text())
    return found


EMBEDDED = """
import json, os, signal, sys, time
import psutil
from zephon_ray.errors import RunnerError, UserError
from zephon_ray.loader import Loader

def handler(number, frame): ...
signal.signal(signal.SIGTERM, handler)
recipe, out = sys.argv[1:]
found = {}
with Loader(recipe, runner="ray", workers=1) as loader:
    found["chains"] = [next(loader).step for _ in range(4)]
    child = os.fork()
    if not child:
        try:
            loader.stats()
        except RunnerError as error:
            os._exit(7 if "fork" in str(error) else 1)
        os._exit(2)
    found["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    children = psutil.Process().children(recursive=True)
    found["children"] = [" ".join(process.cmdline()) for process in children]
    # A second loader shares the cluster, and closing it leaves the first one its own.
    with Loader(recipe, runner="ray", workers=1) as second:
        found["second"] = next(second).chain.hex()
    worker = next(p for p in psutil.Process().children(recursive=True) if "ReadZephonUnits" in " ".join(p.cmdline()))
    worker.kill()
    for _ in range(36):
        found["fortieth"] = next(loader).chain.hex()
    try:
        next(Loader(recipe, runner="ray", address="127.0.0.1:1"))
    except RunnerError as error:
        found["two"] = str(error)
found["handler"] = signal.getsignal(signal.SIGTERM) is handler
found["left"] = [process.name() for process in psutil.wait_procs(children, timeout=10)[1]]
began = time.monotonic()
try:
    next(Loader(recipe, runner="ray", address="127.0.0.1:1"))
except RunnerError as error:
    found["refused"] = str(error)
found["refused_s"] = time.monotonic() - began
with open(out, "w") as file:
    json.dump(found, file)
"""


def test_an_embedded_loader_is_quiet_also_when_its_worker_dies_and_leaves_nothing_behind(tmp_path: Path) -> None:
    recipe = tiny_corpus(tmp_path, texts=2000, execution={"prefetch_steps": 1})
    with Loader(recipe, runner="inline") as loader:
        alone = [next(loader).chain.hex() for _ in range(40)]
    # A stranger's address is not looked at.
    found = found_by(EMBEDDED, str(recipe), str(tmp_path / "found.json"), RAY_ADDRESS="127.0.0.1:2")
    assert found["chains"] == [1, 2, 3, 4]
    assert found["child"] == 7
    assert len(found["children"]) > 2
    assert not [words for words in found["children"] if "StatsActor" in words or "Autoscaling" in words], "what nobody asks anything"
    assert (found["second"], found["fortieth"]) == (alone[0], alone[39])
    assert "is in the Ray cluster at" in found["two"]
    assert found["handler"]
    assert found["left"] == []
    assert "127.0.0.1:1" in found["refused"]
    assert "\n" not in found["refused"]
    assert found["refused_s"] < 6


JOINED = """
import json, os, sys
import psutil, ray
from zephon_ray.errors import RunnerError, UserError
from zephon_ray.loader import Loader

recipe, address, out = sys.argv[1:]
with Loader(recipe, runner="ray", workers=1, address=address) as loader:
    found = {"chain": [next(loader).chain.hex() for _ in range(8)][-1]}
    here = ray.get_runtime_context()
    found |= {"address": here.gcs_address}
    with Loader(recipe, runner="ray", workers=1, address=address.replace("127.0.0.1", "localhost")) as second:
        next(second)
found["left"] = ray.is_initialized()
found["children"] = [p.name() for p in psutil.Process().children(recursive=True)]
with open(out, "w") as file:
    json.dump(found, file)
"""


def test_a_cluster_at_an_address_is_joined_and_left_as_it_was(tmp_path: Path) -> None:
    """The session's own cluster, by its address. What Ray Data leaves behind in any cluster may remain."""
    address = str(ray.get_runtime_context().gcs_address)
    recipe = tiny_corpus(tmp_path)
    with Loader(recipe, runner="inline") as loader:
        alone = [next(loader).chain.hex() for _ in range(8)]
    token = str(Path.home() / ".ray" / "auth_token")
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token} if Path(token).exists() else {}
    found = found_by(JOINED, str(recipe), address, str(tmp_path / "joined.json"), **auth)
    assert found == {"chain": alone[-1], "address": address, "left": False, "children": []}
    assert living("Mailbox") == []
    eventually(lambda: not at_work() and ray.available_resources().get("CPU") == 2, "no task is left")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nonsense", "host:port"),
        ("127.0.0.1:", "host:port"),
        (":6379", "host:port"),
        ("ray://127.0.0.1:10001", "node of the cluster"),
        ("127.0.0.1:1", "nothing answers"),
        ("127.0.0.1:99999", "nothing answers"),
        ("no-such-host.invalid:6379", "nothing answers"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_in_a_line(address: str, words: str) -> None:
    with pytest.raises(RunnerError if words == "nothing answers" else UserError) as caught:
        ray_cluster._knock(address)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert address in str(caught.value)


def test_a_server_that_is_no_ray_head_is_told_apart_at_once() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.RequestHandlerClass.log_error = lambda *_: None  # type: ignore[method-assign]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(RunnerError, match="no Ray head"):
            ray_cluster._knock(f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert time.monotonic() - began < 2 * ray_cluster.CONNECT_S


def test_a_token_that_is_missing_or_wrong_is_explained_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's cluster has a token: Ray makes one for every cluster that it starts here."""
    address = str(ray.get_runtime_context().gcs_address)
    token = Path.home() / ".ray" / "auth_token"
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(RunnerError, match="this process has no token"):
        ray_cluster._knock(address)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text("not-the-token")
    with pytest.raises(RunnerError, match="refuses the token"):
        ray_cluster._knock(address)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    ray_cluster._knock(address)


def test_what_ray_says_when_it_refuses_us_is_one_line_with_a_way_out() -> None:
    mismatch = ray_cluster._explained(RuntimeError("Version mismatch:\n  Ray: 2.40\n  Python: 3.9"))
    assert "\n" not in mismatch
    assert f"here Ray {ray.__version__}" in mismatch


def test_a_cluster_of_ours_is_started_without_what_nobody_asks_and_ray_is_left_as_it_was() -> None:
    private = ray._private

    def parts() -> list[object]:
        of_node = private.node.Node.start_api_server
        return [private.services.ConsolePopen, private.parameter.RayParams, of_node, private.utils.get_dashboard_dependency_error]

    before = parts()
    with ray_cluster._apart_and_lean():
        parameters = private.parameter.RayParams()
        assert (parameters.no_monitor, parameters.include_log_monitor) == (True, False)
        assert private.services.ConsolePopen.keywords == {"process_group": 0}
        assert not any(now is then for now, then in zip(parts(), before, strict=True))
    assert parts() == before


def test_a_cluster_that_a_user_started_where_ours_was_ended_is_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ray.get_runtime_context().gcs_address
    for name, value in (("holders", 1), ("alone", True), ("address", "192.0.2.1:1")):
        monkeypatch.setattr(ray_cluster._membership, name, value)
    assert not ray_cluster.is_alone()
    ray_cluster.connect(None).leave()
    assert ray.is_initialized()
    of_the_one_before = ray_cluster.Cluster(ours=True)
    monkeypatch.setattr(ray_cluster._membership, "address", here)
    assert ray_cluster.is_alone()
    of_the_one_before.leave()
    assert ray.is_initialized()
    assert ray_cluster._membership.holders == 1
