"""Buckets are as good as disks: the same names, the same digests, the same runs. Against a real S3 server."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import yaml

from tests.buckets import RUNNERS, a_corpus, stored
from tests.fault_proxy import FaultProxy
from tests.golden_cases import GOLDEN, GoldenCase
from tests.s3_server import KEY, SECRET, Bucket
from tests.small import write_lines
from zephon_ray.collector import prepare
from zephon_ray.errors import StorageError, UserError
from zephon_ray.ledger import LedgerReader
from zephon_ray.loader import Stream
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.runs import produce, verify
from zephon_ray.storage import Storage

ODD_NAMES = [
    "a b/part 0.jsonl", "plus+sign/p.jsonl", "eq=1/p.jsonl", "pct%20lit/p.jsonl", "pct lit/p.jsonl", "pct%zz/p.jsonl", "hash#1/p.jsonl",
    "ask?x/p.jsonl", "ünï/p.jsonl", "time/2022-11-26T13:51:14+00:00.jsonl", "tilde~/p.jsonl", "quote'/p.jsonl", "br[1]/p.jsonl",
    "semi;x/p.jsonl", "star*/p.jsonl", "amp&x/p.jsonl", "dot./p.jsonl",
]  # fmt: skip


def lines(recipe: Recipe, out: Path | str) -> list[bytes]:
    storage = Storage(recipe.execution.storage)
    return [line.to_json() for line in LedgerReader.open(storage, storage.join(str(out), "ledger")).lines()]


def listed(bucket: Bucket, uri: str) -> list[str]:
    """The shards of a source at a URI of the bucket."""
    fields = {"name": "web", "uri": f"{bucket.url}/{uri}"}
    recipe = recipe_from_dict(
        {"schema": 1, "name": "x", "seed": 1, "lanes": 1, "sequence_length": 8, "global_batch_size": 1, "sources": [fields],
         "tokenizer": {"path": str(GOLDEN / "tokenizer.json")}, "execution": {"storage": {"endpoint_url": bucket.endpoint}}},
        str(GOLDEN),
    )  # fmt: skip
    job, _ = prepare(recipe)
    return [shard.path for shard in job.manifests[0].shards]


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_every_listed_key_can_be_opened_by_that_name_and_named_alone(bucket: Bucket, scheme: str) -> None:
    storage, root = Storage(bucket.spec()), f"{scheme}://{bucket.name}/ds"
    for name in ODD_NAMES:
        storage.write_bytes(storage.join(root, name), name.encode())
    assert sorted(p.relative_to(bucket.folder / "ds").as_posix() for p in bucket.folder.rglob("*.jsonl")) == sorted(ODD_NAMES)
    found = storage.list_files(root)
    assert {e.path: storage.read_bytes(storage.join(root, e.path)) for e in found} == {name: name.encode() for name in ODD_NAMES}
    for name in ODD_NAMES:
        alone = listed(bucket, f"ds/{name}")  # relative to the last part before what may be a wildcard
        assert [path.rsplit("/", 1)[-1] for path in alone] == [name.rsplit("/", 1)[1]]
        assert storage.size(storage.join(root, name)) == len(name.encode())


def test_globs_marks_and_neighbours_are_as_on_a_disk(bucket: Bucket) -> None:
    for name in ("ds/x/0.jsonl", "ds/x/y/1.jsonl", "ds/z.jsonl", "ds-other/2.jsonl", "ds/x/_hidden.jsonl"):
        write_lines(bucket.folder / name, ["a text"])
    storage = Storage(bucket.spec())
    for mark in ("ds/_SUCCESS", "ds/x_$folder$"):
        storage.write_bytes(f"{bucket.url}/{mark}", b"")
    assert listed(bucket, "ds") == listed(bucket, "ds/") == ["x/0.jsonl", "x/y/1.jsonl", "z.jsonl"]
    assert listed(bucket, "ds/**/*.jsonl") == ["x/0.jsonl", "x/y/1.jsonl", "z.jsonl"]
    assert listed(bucket, "ds/x/*") == ["0.jsonl"]
    assert listed(bucket, "d?/[x-z]*/*.jsonl") == ["ds/x/0.jsonl"]
    assert listed(bucket, "ds*/?.jsonl") == ["ds-other/2.jsonl", "ds/z.jsonl"]


def test_a_listing_of_several_pages_is_whole(bucket: Bucket) -> None:
    names = [f"part-{number:05d}.jsonl" for number in range(1001)]
    for name in names:
        (bucket.folder / name).touch()
    assert sorted(entry.path for entry in Storage(bucket.spec()).list_files(bucket.url)) == names


IN_S3 = ["arrow_units", "compressed_edges", "globs", "slots_of_unequal_files", "validation_pad"]
GOLDEN_CASES = [(name, "s3", runner) for name in IN_S3 for runner in RUNNERS]
GOLDEN_CASES += [("slots_of_unequal_files", scheme, "threads") for scheme in ("s3a", "memory")]


@pytest.mark.parametrize(("name", "scheme", "runner"), GOLDEN_CASES)
def test_golden_cases_have_their_digests_in_any_store(
    bucket: Bucket, golden_cases: dict[str, GoldenCase], name: str, scheme: str, runner: str
) -> None:
    case = golden_cases[name]
    root = f"{scheme}://{bucket.name}"
    shutil.copytree(case.recipe.parent, bucket.folder / name)
    shutil.copy(GOLDEN / "tokenizer.json", bucket.folder)
    if scheme == "memory":
        fsspec.filesystem("memory").put(str(bucket.folder), f"/{bucket.name}", recursive=True)
    data = yaml.safe_load(case.recipe.read_text())
    data["tokenizer"]["path"] = f"{root}/tokenizer.json"
    data["sources"] = [source | {"uri": f"{root}/{name}/{source['uri']}"} for source in data["sources"]]
    data["execution"] = {"storage": {"endpoint_url": bucket.endpoint}}
    recipe = recipe_from_dict(data, "/nowhere")
    stream = Stream(recipe, runner=runner, workers=2)
    try:
        for step in case.steps:
            batch = stream.next_batch()
            assert batch is not None
            assert (batch.digest.hex(), batch.chain.hex()) == (step.digest, step.chain), f"step {step.step}"
    finally:
        stream.close()


@pytest.mark.parametrize(("scheme", "runner"), [*(("s3", runner) for runner in RUNNERS), ("s3a", "threads")])
def test_a_run_kept_and_fed_by_a_bucket_has_the_ledger_of_a_local_one(bucket: Bucket, tmp_path: Path, runner: str, scheme: str) -> None:
    local = a_corpus(bucket.folder)
    root = f"{scheme}://{bucket.name}"
    recipe, out = stored(local, root, endpoint_url=bucket.endpoint), f"{root}/runs/one"
    produce(recipe, steps=5, out=out, runner=runner, workers=2)
    produce(recipe, steps=120, out=out, runner=runner, workers=2)
    assert verify(out, recipe=recipe, runner=runner, first=90).last_step == 120
    produce(local, steps=120, out=str(tmp_path / "local"))
    assert lines(recipe, out) == lines(local, tmp_path / "local")


def test_endpoint_and_credentials_may_come_from_the_environment_alone(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = stored(a_corpus(bucket.folder, ["a"]), bucket.url)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        with monkeypatch.context() as patched:
            patched.setenv(name, bucket.endpoint)
            produce(recipe, steps=3, out=f"{bucket.url}/{name}")
            assert verify(f"{bucket.url}/{name}").steps == 3


RUN = """
import sys
from zephon_ray.recipe import load_recipe
from zephon_ray.runs import produce
tell = lambda batch: print(batch.step, flush=True)
produce(load_recipe(sys.argv[1]), steps=1_000_000, out=sys.argv[2], runner=sys.argv[3], workers=2, on_step=tell)
"""


@pytest.mark.fault
def test_a_run_in_a_bucket_that_is_killed_goes_on_exactly(bucket: Bucket, tmp_path: Path) -> None:
    local = a_corpus(bucket.folder)
    recipe, out = stored(local, bucket.url, endpoint_url=bucket.endpoint), f"{bucket.url}/run"
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    for target in (4, 130, 260):
        command = [sys.executable, "-c", RUN, str(tmp_path / "recipe.yaml"), out, "threads"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            reached = next((line for line in process.stdout if int(line) >= target), None)
            process.send_signal(signal.SIGKILL)
        assert reached is not None
    assert len(lines(recipe, out)) >= 200, "what a state was saved behind is kept"
    produce(recipe, steps=300, out=out)
    produce(local, steps=300, out=str(tmp_path / "whole"))
    made = lines(recipe, out)
    assert made[:300] == lines(local, tmp_path / "whole")


def test_no_credential_is_written_down_anywhere(
    bucket: Bucket, proxy: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)  # at DEBUG botocore itself logs signatures and the ids of keys
    caplog.set_level(logging.DEBUG, "zephon_ray")
    recipe = stored(a_corpus(bucket.folder), bucket.url, endpoint_url=bucket.endpoint)
    produce(recipe, steps=5, out=str(tmp_path / "run"), runner="threads")
    produce(recipe, steps=5, out=f"{bucket.url}/run")
    job, identity = prepare(recipe)
    told = [pickle.dumps(job.options), pickle.dumps(job.manifests), pickle.dumps(Storage(recipe.execution.storage))]
    told += [recipe.to_yaml().encode(), json.dumps(dict(identity.fields)).encode()]
    for folder in (tmp_path / "run", bucket.folder):
        told += [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    for scheme in ("s3", "s3a"):
        for name, value in (("SECRET_ACCESS_KEY", "another" + SECRET), ("ACCESS_KEY_ID", KEY[::-1])):
            with monkeypatch.context() as patched:
                patched.setenv(f"AWS_{name}", value)
                storage = Storage(bucket.spec(region=f"region-{name}-{scheme}".lower().replace("_", "-")))
                with pytest.raises(OSError, match="refuses the credentials") as caught:
                    storage.list_files(f"{scheme}://{bucket.name}")
                told.append(repr(caught.value).encode())
                told.append(str(caught.value.__cause__).encode())
    everything = b"\n".join([*told, caplog.text.encode()])
    for secret in (SECRET, KEY, KEY[::-1]):
        assert secret.encode() not in everything


def test_a_bucket_that_is_not_there_is_named_at_once(bucket: Bucket) -> None:
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/x: .*NO_SUCH_BUCKET.*after 1 of 12 tries"):
        Storage(bucket.spec()).list_files("s3://no-such-bucket/x")


def test_a_scheme_that_nothing_serves_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"nosuch://x/y: .*Install what serves nosuch://"):
        Storage(StorageSpec()).read_bytes("nosuch://x/y")


def test_uploads_carry_their_length(bucket: Bucket) -> None:
    """Many stores refuse what the AWS library sends by default (411): this server is one of them."""
    storage = Storage(bucket.spec())
    for size in (0, 1, 11 << 20):
        storage.write_bytes(f"{bucket.url}/{size}.zst", os.urandom(size))
        assert (bucket.folder / f"{size}.zst").stat().st_size == size
