"""Faults of a bucket: those that pass leave no trace in the data, those that last end in the stated time with the key and the answer."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.buckets import a_corpus, stored
from tests.fault_proxy import SLOW_DOWN, Asked, Cut, Fault, FaultProxy, Hang, Refuse
from tests.s3_server import KEY, NEW_KEY, NEW_SECRET, SECRET, Bucket
from zephon_ray.errors import SourceError, StorageError
from zephon_ray.recipe import Recipe
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.runs import produce, verify
from zephon_ray.storage import Storage, connections, faults, store

pytestmark = pytest.mark.fault

STEPS = 60
EXPIRED = Refuse(status=400, code="ExpiredToken")
SLACK_SECONDS = 5.0
"""For what a loaded machine adds to a time."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits as they are, much shorter."""
    monkeypatch.setattr(faults, "FIRST_WAIT", 0.005)


def chain_of(recipe: Recipe, runner: str, out: str | None = None) -> str:
    return produce(recipe, steps=STEPS, runner=runner, workers=2, out=out).chain


def behind(proxy: FaultProxy, bucket: Bucket, scheme: str = "s3", **storage: Any) -> tuple[Recipe, Recipe]:
    """A recipe over files, and the same over the bucket behind the proxy."""
    local = a_corpus(bucket.folder)
    return local, stored(local, f"{scheme}://{bucket.name}", endpoint_url=proxy.endpoint, **storage)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("scheme", "runner"), [("s3", "inline"), *(pytest.param(scheme, "threads", marks=pytest.mark.long) for scheme in ("s3", "s3a"))]
)
def test_bursts_of_refusals_and_cut_connections_leave_no_trace(
    bucket: Bucket, proxy: FaultProxy, runner: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runner == "inline":
        monkeypatch.setattr(store, "PAGE_TRIES", 1)  # faults of listings come through as those of objects do
    order: list[Fault] = [SLOW_DOWN, Cut(), Refuse(status=500, code="InternalError"), Cut(at_once=True)]

    def fault(asked: Asked) -> Fault:
        """Each object and listing fails twice at first, in every way, and writes do so too."""
        return order[asked.number % len(order)] if asked.before < 2 else None

    local, remote = behind(proxy, bucket, scheme)
    expected = chain_of(local, "inline")
    proxy.fault = fault
    out = f"{scheme}://{bucket.name}/run"
    assert chain_of(remote, runner, out) == expected
    assert proxy.faults > 40
    assert {asked.method for asked in proxy.asked} >= {"LIST", "GET", "HEAD", "PUT"}
    assert verify(out, recipe=remote).steps == STEPS


def test_waits_grow_and_are_spread(bucket: Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    first, tries = 0.05, 5
    monkeypatch.setattr(faults, "FIRST_WAIT", first)
    (bucket.folder / "a").write_bytes(b"x")
    (bucket.folder / "b").write_bytes(b"x")
    proxy.fault = lambda asked: SLOW_DOWN if asked.method == "HEAD" else None
    storage = Storage(bucket.spec(endpoint_url=proxy.endpoint, max_tries=tries))

    def read(name: str) -> None:
        with pytest.raises(StorageError):
            storage.read_bytes(f"{bucket.url}/{name}")

    threads = [threading.Thread(target=read, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    times = [[asked.at for asked in proxy.asked if asked.name == name] for name in "ab"]
    waits = [[later - earlier for earlier, later in itertools.pairwise(at)] for at in times]
    assert [len(of_one) for of_one in waits] == [tries - 1] * 2
    for of_one in waits:
        assert all(wait >= first * 2**number / 2 for number, wait in enumerate(of_one))
    assert all(abs(one - other) > 1e-4 for one, other in zip(*waits, strict=True)), (
        "two that were refused together do not come back together"
    )


def test_waits_take_nothing_from_the_generator_of_the_trainer() -> None:
    import random

    random.seed(1)
    before = random.getstate()
    assert {faults._SPREAD.random() for _ in range(3)}
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        (SLOW_DOWN, "(SLOW_DOWN|HTTP status 503)"),  # an answer to HEAD has no word for it
        (Refuse(status=503, code=""), "HTTP status 503"),
        (Cut(at_once=True), "NETWORK_CONNECTION"),
        (Hang(), "Timeout was reached"),
    ],
    ids=["slow down", "no word", "cut", "silence"],
)
def test_a_fault_that_lasts_ends_in_the_stated_time_with_the_key_and_the_last_answer(
    bucket: Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, fault: Fault, answer: str
) -> None:
    monkeypatch.setattr(connections, "SILENT_SECONDS", 1.0)
    _, remote = behind(proxy, bucket, max_tries=1000, retry_seconds=2)
    proxy.fault = lambda asked: fault if asked.name == "b/1.jsonl" and asked.method in ("GET", "HEAD") else None
    began = time.monotonic()
    with pytest.raises(StorageError, match=rf"s3://{bucket.name}/b/1\.jsonl: .*{answer}.*after \d+ of 1000 tries, [\d.]+ of 2 s"):
        chain_of(remote, "threads")
    assert 0.5 < time.monotonic() - began < 2 + 1 + SLACK_SECONDS
    assert proxy.faults >= 2


@pytest.mark.usefixtures("quick")
def test_a_listing_that_is_refused_for_good_ends_in_the_stated_time(bucket: Bucket, proxy: FaultProxy) -> None:
    _, remote = behind(proxy, bucket, max_tries=3)
    proxy.fault = lambda asked: SLOW_DOWN if asked.method == "LIST" else None
    with pytest.raises(StorageError, match=rf"s3://{bucket.name}/a: .*SLOW_DOWN.*after 3 of 3 tries"):
        chain_of(remote, "inline")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_a_store_that_is_gone_is_named(bucket: Bucket, scheme: str) -> None:
    storage = Storage(StorageSpec(endpoint_url="http://127.0.0.1:9", max_tries=2, region="us-east-1"))
    with pytest.raises(StorageError, match=rf"{scheme}://b/a: .*onnect.*after 2 of 2 tries"):
        storage.read_bytes(f"{scheme}://b/a")


def test_a_single_try_is_no_try_again(bucket: Bucket, proxy: FaultProxy) -> None:
    proxy.fault = lambda asked: SLOW_DOWN
    with pytest.raises(StorageError, match="after 1 of 12 tries"):
        Storage(bucket.spec(endpoint_url=proxy.endpoint, retry_seconds=0)).size(f"{bucket.url}/a")
    assert len(proxy.asked) == 1


def write_credentials(key: str, secret: str) -> None:
    """Replace the shared credentials file of this process as a refresher does: whole, in one step."""
    file = Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"])
    fresh = file.with_suffix(".new")
    fresh.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    fresh.replace(file)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("scheme", "place", "bare"),
    [
        ("s3", "file", False),
        ("s3", "file", True),
        ("s3", "environment", False),
        ("s3a", "environment", True),
        pytest.param("s3a", "file", False, marks=pytest.mark.long),
    ],
)
def test_credentials_that_run_out_are_asked_for_again(
    bucket: Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, place: str, bare: bool, scheme: str
) -> None:
    def renew(key: str, secret: str) -> None:
        if place == "file":
            write_credentials(key, secret)
        else:
            os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = key, secret

    def fault(asked: Asked) -> Fault:
        if asked.access_key != KEY or asked.number < 12:
            return None
        renew(NEW_KEY, NEW_SECRET)
        if not bare:
            return EXPIRED if asked.method != "HEAD" else Refuse(status=400, code="")
        return Refuse(status=400, code="") if asked.method == "HEAD" else Refuse(status=403, code="InvalidAccessKeyId")

    local, remote = behind(proxy, bucket, scheme)
    if place == "file":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    renew(KEY, SECRET)
    proxy.fault = fault
    out = f"{scheme}://{bucket.name}/run"
    assert chain_of(remote, "threads", out) == chain_of(local, "inline")
    assert {asked.access_key for asked in proxy.asked} == {KEY, NEW_KEY}
    assert proxy.asked[-1].access_key == NEW_KEY


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("scheme", ["s3", pytest.param("s3a", marks=pytest.mark.long)])
def test_credentials_that_run_out_for_good_end_in_one_clear_message(
    bucket: Bucket, proxy: FaultProxy, caplog: pytest.LogCaptureFixture, scheme: str
) -> None:
    _, remote = behind(proxy, bucket, scheme, max_tries=2)
    proxy.fault = lambda asked: (EXPIRED if asked.method != "HEAD" else Refuse(status=400, code="")) if asked.number >= 12 else None
    with pytest.raises(StorageError, match=r"after 2 of 2 tries.*credentials have run out") as caught:
        chain_of(remote, "inline")
    for secret in (KEY, SECRET):
        assert secret not in str(caught.value) + caplog.text


@pytest.mark.usefixtures("quick")
def test_an_object_that_may_not_be_read_is_named_after_a_second_look(bucket: Bucket, proxy: FaultProxy) -> None:
    _, remote = behind(proxy, bucket)
    proxy.fault = lambda asked: Refuse(status=403, code="AccessDenied") if asked.name == "b/1.jsonl" else None
    with pytest.raises(SourceError, match=rf"refuses the credentials.*s3://{bucket.name}/b/1\.jsonl"):
        chain_of(remote, "inline")
    assert proxy.faults == 2 * 2, "the shard has two units"
