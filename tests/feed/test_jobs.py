"""Jobs as their README submits them, to a cluster that `ray start` started, with a token. Its processes are ended one by one."""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from zephon_ray import runs
from zephon_ray.telemetry import EXPORTED, FEED_METRICS
from zephon_ray.testing import tiny_corpus

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
START_S = 120.0
SUBMIT_S = 150.0
EXPORT_S = 60.0
STEPS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """A head node, and the environment in which it is used."""

    address: str
    dashboard: str
    metrics: int
    environment: dict[str, str]

    def run(self, command: str, limit_s: float, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command], cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=limit_s, check=False
        )


def free_ports(count: int) -> list[int]:
    """Above those that Ray gives its workers."""
    found: list[int] = []
    for port in range(27000 + os.getpid() % 500, 30000):
        with socket.socket() as candidate, suppress(OSError):
            candidate.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


def processes_of(folder: str) -> list[psutil.Process]:
    """Those of the cluster whose files lie in a folder, and all that they started."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(folder in word for word in process.cmdline()):
                for one in (process, *process.children(recursive=True)):
                    found[one.pid] = one
    found.pop(os.getpid(), None)
    return list(found.values())


def end(folder: str) -> None:
    processes = processes_of(folder)
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(processes, timeout=30)[1] == []


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    folder = tempfile.mkdtemp(prefix="zr")  # short, for its sockets
    gcs, dashboard, client, metrics, agent = free_ports(5)
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": "",  # the package comes with the job
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
    }
    started = Head(address=f"127.0.0.1:{gcs}", dashboard=f"http://127.0.0.1:{dashboard}", metrics=metrics, environment=environment)
    command = (
        f"ray start --head --node-ip-address=127.0.0.1 --port={gcs} --dashboard-host=127.0.0.1 --dashboard-port={dashboard}"
        f" --ray-client-server-port={client} --metrics-export-port={metrics} --dashboard-agent-listen-port={agent}"
        f" --num-cpus=2 --object-store-memory={200 << 20} --temp-dir={folder} --disable-usage-stats"
    )
    try:
        ended = started.run(command, START_S)
        assert ended.returncode == 0, ended.stderr
        yield started
    finally:
        end(folder)
        shutil.rmtree(folder, ignore_errors=True)


def documented(mark: str) -> list[str]:
    """The lines of the README's block that has a mark."""
    text = (ROOT / "jobs" / "README.md").read_text()
    (block,) = re.findall(rf"<!-- test: {mark} -->\n```bash\n(.*?)```", text, re.DOTALL)
    return [line for line in block.splitlines() if line]


def submit(head: Head, command: str) -> subprocess.CompletedProcess[str]:
    """A line of the README; again for as long as Ray's agent is not there yet."""
    until = time.monotonic() + START_S
    while True:
        ended = head.run(command, SUBMIT_S)
        if "No available agent" not in ended.stdout + ended.stderr or time.monotonic() > until:
            return ended
        time.sleep(1.0)


def test_the_readme_s_environment_is_what_the_tests_set() -> None:
    names = set(re.findall(r"(RAY_\w+)=", " ".join(line.partition("#")[0] for line in documented("environment"))))
    assert names == {"RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"}


def job(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, f"jobs/{name}.py", *arguments], cwd=ROOT, env={**clean, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["serve", "verify", "prewarm"])
def test_a_job_that_is_none_says_how_to_submit_it(name: str) -> None:
    ended = job(name, "x")
    assert ended.returncode == 2
    assert "ray job submit" in ended.stderr


def test_a_job_cannot_be_given_another_runner() -> None:
    ended = job("verify", "x", "--runner=threads", RAY_ADDRESS="127.0.0.1:1")
    assert ended.returncode == 2
    assert "a job runs on Ray" in ended.stderr


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.xdist_group("ray")
def test_jobs_run_as_documented_and_the_feed_outlives_its_job_or_not(head: Head, tmp_path: Path) -> None:
    recipe, runs_folder = tiny_corpus(tmp_path, execution={"runner": "ray"}), tmp_path / "runs"
    paths = {"/path/to/recipe.yaml": recipe, "/path/to/runs": runs_folder, "/path/to/cache": tmp_path / "cache"}
    serve, verify, prewarm = (
        functools.reduce(lambda line, path: line.replace(path, str(paths[path])), paths, x) for x in documented("submit")
    )
    served = submit(head, serve)
    assert served.returncode == 0, served.stdout + served.stderr
    assert "zephon_ray.connect(" in served.stdout
    assert Path(head.environment["RAY_AUTH_TOKEN_PATH"]).read_text() not in served.stdout + served.stderr

    read = head.run(f"{sys.executable} -c '{RANK}' {head.address} {STEPS}", SUBMIT_S)
    assert read.returncode == 0, read.stderr
    assert read.stdout.split()[-1] == str(STEPS)
    _check_exported(head)

    (feed,) = feeds(head)
    assert feed["name"] == "first"
    assert feed["status"]["streams"]["train"]["step"] >= STEPS

    verified = submit(head, verify)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "steps 1 to 10 are equal to the ledger" in verified.stdout

    for written, there in ((True, 0), (False, 1)):  # a second time nothing is left to be done
        filled = submit(head, f"{prewarm} --json")
        assert filled.returncode == 0, filled.stdout + filled.stderr
        (said,) = (json.loads(line) for line in filled.stdout.splitlines() if line.startswith('{"units"'))
        assert (said["written"] > 0, said["cached"], said["not_kept"]) == (written, there * said["units"], 0)
        assert said["cache"]["entries"] == said["units"] > 0

    unheard = {**head.environment, "RAY_AUTH_MODE": "disabled"}
    refused = Head(address=head.address, dashboard=head.dashboard, metrics=head.metrics, environment=unheard).run(verify, 60)
    assert refused.returncode != 0

    stopped = head.run(f"PYTHONPATH={ROOT} python -m zephon_ray stop first --address {head.address} --json", 60)
    assert json.loads(stopped.stdout) == {"stopped": "first", "force": False}
    assert runs.verify(str(runs_folder / "first"), runner="threads").last_step >= STEPS
    _check_a_job_that_is_stopped(
        head, serve.replace("job submit", "job submit --no-wait --submission-id staying", 1).replace(" --detach", "")
    )


JOIN = f"""
import os, sys
sys.path.insert(0, "{ROOT}")
import ray  # which reads its environment now
from zephon_ray.errors import RunnerError
from zephon_ray.runners.ray_cluster import connect
for setting in ({{}}, {{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/nowhere"}},
                {{"RAY_AUTH_TOKEN_PATH": sys.argv[2]}}, {{"RAY_AUTH_TOKEN_PATH": sys.argv[3]}}):
    os.environ.update(setting)
    try:
        connect(sys.argv[1]).leave()
        print("joined")
    except RunnerError as error:
        print(error)
"""


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.xdist_group("ray")
def test_who_lacks_the_token_is_told_what_to_do_and_one_that_is_set_late_counts(head: Head, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(secrets.token_hex(32))
    environment = {key: value for key, value in head.environment.items() if not key.startswith("RAY_AUTH")}
    right = head.environment["RAY_AUTH_TOKEN_PATH"]
    said = subprocess.run(
        [sys.executable, "-c", JOIN, head.address, str(wrong), right], env=environment, capture_output=True, text=True, timeout=120,
        check=True,
    ).stdout.splitlines()  # fmt: skip
    assert "uses token authentication, and this process has no token. Set RAY_AUTH_MODE=token" in said[0]
    assert "RAY_AUTH_MODE=token is set, and /nowhere cannot be read" in said[1]
    assert "refuses the token of this process" in said[2]
    assert said[3:] == ["joined"]


def feeds(head: Head) -> list[dict[str, Any]]:
    """What `status` lists."""
    shown = head.run(f"PYTHONPATH={ROOT} python -m zephon_ray status --address {head.address} --json", 60)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    found: list[dict[str, Any]] = json.loads(shown.stdout)
    return found


def _check_a_job_that_is_stopped(head: Head, serve: str) -> None:
    """A job without --detach takes its feed with it."""
    assert submit(head, serve).returncode == 0
    until = time.monotonic() + START_S
    while not feeds(head):
        assert time.monotonic() < until, head.run("ray job logs staying", 60).stdout
    stopped = head.run("ray job stop staying", SUBMIT_S)
    assert stopped.returncode == 0, stopped.stderr
    assert feeds(head) == []


RANK = f"""
import sys
sys.path.insert(0, "{ROOT}")
from zephon_ray.feed.client import connect
with connect("first", address=sys.argv[1], incarnation="run:0") as feed:
    for _ in range(int(sys.argv[2])):
        batch = next(feed)
print(batch.step)
"""


def _check_exported(head: Head) -> None:
    """What the dashboard shows is there, on the port that is scraped."""
    wanted = {EXPORTED + metric.name for metric in FEED_METRICS if metric.kind == "gauge"}
    wanted |= {f"{EXPORTED}zephon_feed_{name}_total" for name in ("pairs", "units", "text_bytes", "waited_seconds")}  # those that grew
    until, found = time.monotonic() + EXPORT_S, ""
    while time.monotonic() < until and not all(name in found for name in wanted):
        with urllib.request.urlopen(f"http://127.0.0.1:{head.metrics}/metrics", timeout=10) as answer:
            found = answer.read().decode()
        time.sleep(1.0)
    assert {name for name in wanted if name not in found} == set()
    assert re.search(r'ray_zephon_feed_made_steps\{[^}]*feed="first"[^}]*stream="train"[^}]*\} \d+', found)
