"""Feeds are started, found by their name, looked at and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from tests.small import a_recipe, fields
from zephon_ray import runs
from zephon_ray.cli.main import run_command
from zephon_ray.errors import FeedError, RefusedError, RunDirectoryError, SourceError, UserError
from zephon_ray.feed import service as module
from zephon_ray.feed.client import connect
from zephon_ray.feed.protocol import NAMESPACE, Caller, actor_name
from zephon_ray.feed.service import Order, Service, read_token
from zephon_ray.loader import Loader
from zephon_ray.recipe import recipe_from_dict
from zephon_ray.testing import tiny_corpus

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(150)]

ROOT = Path(__file__).parents[2]
STEPS = 6


@pytest.fixture
def service() -> Iterator[Service]:
    with Service(None) as made:
        yield made
        for name in made.names():
            made.stop(name, force=True)


@pytest.fixture
def order(tmp_path: Path) -> Order:
    return Order(name="first", recipe=a_recipe(tmp_path), out=str(tmp_path / "run"))


def chains(recipe: object, steps: int) -> list[bytes]:
    with Loader(recipe, runner="inline") as loader:  # type: ignore[arg-type]
        return [next(loader).chain for _ in range(steps)]


def test_a_feed_is_found_by_its_name_read_refused_a_stop_while_it_is_read_and_then_stopped(
    service: Service, order: Order, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = service.start(order)
    assert started.streams["train"].fingerprint
    assert started.pid != os.getpid()
    assert service.names() == ["first"]
    with pytest.raises(UserError, match="there is a feed 'first'"):
        service.start(order)
    with connect("first", dp_rank=0, dp_world_size=1, incarnation="run:0") as feed:
        assert [next(feed).chain for _ in range(STEPS)] == chains(order.recipe, STEPS)
        with pytest.raises(RefusedError, match="rank 0 at"):
            service.stop("first")
        monkeypatch.setenv("RAY_ADDRESS", service.address)
        capfd.readouterr()
        assert run_command(["status", "first", "--json"]) == 0
        told = json.loads(capfd.readouterr().out)
        assert told["streams"]["train"]["taken_step"] >= STEPS - 2
        assert told["streams"]["train"]["directory"] == order.out
        assert run_command(["status", "first"]) == 0
        said = capfd.readouterr().out
        assert "mixture" in said
        assert "a 100.00 %" in said
        assert run_command(["status"]) == 0
        assert "first" in capfd.readouterr().out
    assert run_command(["stop", "first", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"stopped": "first", "force": False}
    assert service.names() == []
    with pytest.raises(FeedError, match=r"no feed 'first' .*there: none"):
        service.status("first")
    _check_directory(Path(order.out))


def _check_directory(out: Path) -> None:
    assert runs.verify(str(out), runner="threads").last_step >= STEPS
    assert {path.stat().st_mode & 0o777 for path in (out, *(p for p in out.iterdir() if p.is_dir()))} == {0o700}
    events = [json.loads(line)["event"] for line in (out / "audit.jsonl").read_text().splitlines()]
    assert events[0] == "created"
    assert events[-1] == "stopped"


def test_a_feed_with_a_token_takes_only_those_who_present_it_and_feeds_a_second_stream(
    service: Service, order: Order, tmp_path: Path
) -> None:
    secret = tmp_path / "token"
    secret.write_text("a long random word\n")
    validation = a_recipe(tmp_path / "more", {"b": {}})
    with Service(None, read_token(str(secret))) as ours:
        ours.start(replace(order, token=read_token(str(secret)), validation=validation))
        assert "a long random word" not in str(ours.status("first"))
        with pytest.raises(RefusedError, match="gave none"):
            service.status("first")
        with pytest.raises(RefusedError, match="gave none"):
            service.stop("first")
        with pytest.raises(RefusedError, match="gave none"), connect("first", incarnation="run:0") as feed:
            next(feed)
        with connect("first", incarnation="run:0", token_file=secret, stream="validation") as feed:
            assert next(feed).chain == chains(validation, 1)[0]
        assert ours.status("first").streams["validation"].directory == f"{order.out}-validation"
        ours.stop("first", force=True)
    assert service.names() == []


def test_what_cannot_be_read_is_told_to_who_starts_it_and_no_feed_is_left(service: Service, order: Order, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    nothing = recipe_from_dict(fields({"empty": {}}), str(tmp_path))
    with pytest.raises(SourceError, match="empty"):
        service.start(replace(order, recipe=nothing))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("something else")
    with pytest.raises(RunDirectoryError, match="holds something else"):
        service.start(replace(order, out=str(tmp_path / "other")))
    until = time.monotonic() + 20
    while service.names() and time.monotonic() < until:
        time.sleep(0.1)
    assert service.names() == []


def test_a_feed_that_hangs_is_stopped_by_force(service: Service, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAIN_S", 2.0)
    pid = service.start(order).pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(FeedError, match="does not answer within 2 s"):
        service.stop("first")
    service.stop("first", force=True)
    assert service.names() == []
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.long  # in the normal run `test_feed.py` kills one, whose ranks go on
@pytest.mark.fault
def test_a_feed_that_was_killed_is_said_to_be_away_and_not_to_have_ended(service: Service, order: Order) -> None:
    pid = service.start(order).pid
    os.kill(pid, signal.SIGKILL)
    said, until = set(), time.monotonic() + 60
    while True:
        assert time.monotonic() < until, said
        try:
            if service.status("first").pid != pid:
                break
        except FeedError as error:
            said.add(str(error))
    assert said == {"feed 'first' is away: Ray starts it again where its process died. Ask later"}


@pytest.mark.long
def test_a_feed_that_was_told_to_stop_ends_though_who_told_it_was_killed(service: Service, order: Order) -> None:
    """As the job that serves it is, if it takes longer than Ray gives it."""
    service.start(order)
    ray.get_actor(actor_name("first"), namespace=NAMESPACE).stop.remote(Caller(client="a job"), True)
    until = time.monotonic() + 60
    while service.names():
        assert time.monotonic() < until, "it is there still"
        time.sleep(0.1)
    assert '"stopped"' in (Path(order.out) / "audit.jsonl").read_text()
    service.start(order)


def serve(service: Service, recipe: Path, out: Path, **more: str) -> subprocess.Popen[str]:
    """The command, in a process that joins this one's cluster."""
    token = Path.home() / ".ray" / "auth_token"
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)} if token.exists() else {}
    command = ["serve", str(recipe), "--name", "first", "--out", str(out), "--address", service.address, "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "zephon_ray", *command], env={**os.environ, "PYTHONPATH": str(ROOT), **auth, **more},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_serve_stays_until_a_signal_stops_its_feed_which_lives_on_where_it_was_killed(service: Service, tmp_path: Path) -> None:
    recipe, out = tiny_corpus(tmp_path, execution={"runner": "ray"}), tmp_path / "run"
    with serve(service, recipe, out) as killed:
        assert killed.stdout
        told = json.loads(killed.stdout.readline())
        assert (told["event"], told["name"], told["directories"]) == ("serving", "first", {"train": str(out)})
        killed.kill()
    assert service.status("first").pid == told["pid"]
    with serve(service, recipe, out) as second:
        said = json.loads(second.communicate(timeout=60)[0])
        assert "there is a feed 'first'" in said["error"]["message"]
    assert second.returncode == 2
    service.stop("first")
    with serve(service, recipe, out) as third:
        assert third.stdout
        assert json.loads(third.stdout.readline())["event"] == "serving"
        third.terminate()
        assert json.loads(third.communicate(timeout=60)[0]) == {"event": "stopped", "name": "first", "by": "signal"}
    assert third.returncode == 0
    assert service.names() == []


def test_a_feed_of_a_cluster_that_ends_with_the_command_cannot_be_left_running(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["serve", "recipe.yaml", "--name", "x", "--out", "run", "--detach"]) == 2
    assert "--address" in capfd.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["stop", "x"]])
def test_who_looks_for_a_feed_says_where(command: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert run_command(command) == 2
    assert "RAY_ADDRESS" in capfd.readouterr().err


def test_a_local_directory_is_refused_where_other_nodes_would_not_see_it(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunDirectoryError, match=r"3 nodes.*--local-out-ok"):
        module._placed(order, nodes=3)
    assert module._placed(replace(order, local_out_ok=True), nodes=3).out == order.out
    assert module._placed(replace(order, out="s3://bucket/run"), nodes=3).out == "s3://bucket/run"
    monkeypatch.chdir(tmp_path)
    assert module._placed(replace(order, out="run"), nodes=1).out == str(tmp_path / "run")
    job = tmp_path / "working_dir_files" / "_ray_pkg_1"
    job.mkdir(parents=True)
    monkeypatch.chdir(job)
    with pytest.raises(RunDirectoryError, match="deletes after it"):
        module._placed(replace(order, out="run"), nodes=1)


@pytest.mark.parametrize("name", ["", "a:b", "a/b", "a b", "a\n"])
def test_a_name_that_cannot_be_one_is_refused(service: Service, order: Order, name: str) -> None:
    with pytest.raises(UserError, match="feeds are named"):
        service.start(replace(order, name=name))


def test_the_feed_takes_of_what_only_the_head_has() -> None:
    """That it is there then, with other nodes beside, is seen in `test_feed_clusters.py`."""
    (name,) = module._on_head() or {}
    assert [name in node["Resources"] for node in ray.nodes()] == [True]  # type: ignore[no-untyped-call]


def test_an_empty_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(" \n")
    with pytest.raises(UserError, match="is empty"):
        read_token(str(tmp_path / "token"))
    assert read_token(None) is None
