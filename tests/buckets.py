"""Fixtures of buckets on a real S3 server, and corpora in them. `tests/conftest.py` makes the fixtures known to all tests."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fault_proxy import FaultProxy, fault_proxy
from tests.golden_cases import GOLDEN
from tests.s3_server import KEY, SECRET, Bucket, s3_server
from tests.small import a_recipe
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.storage import connections

RUNNERS = ["inline", "threads"]
"""The runners that read from buckets here."""


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server for the session, started when first asked for, and the folder of its buckets."""
    folder = tmp_path_factory.mktemp("s3")
    with s3_server(folder) as endpoint:
        yield endpoint, folder


@pytest.fixture
def bucket(s3_endpoint: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket of its own, and a process that knows the credentials and nothing else of any store."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    environment = {"ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET, "EC2_METADATA_DISABLED": "true"}
    environment |= {"SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"), "CONFIG_FILE": str(tmp_path / "config")}
    for name, value in environment.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    # The storage sets it where it meets an endpoint; it must not stay for other tests.
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "")
    monkeypatch.delenv("AWS_REQUEST_CHECKSUM_CALCULATION")
    endpoint, folder = s3_endpoint
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    (folder / name).mkdir()
    connections.forget(None)
    yield Bucket(name=name, folder=folder / name, endpoint=endpoint)
    connections.forget(None)
    shutil.rmtree(folder / name)


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[FaultProxy]:
    """A proxy in front of the bucket's server, that does no harm until told."""
    with fault_proxy(bucket.endpoint) as proxy:
        yield proxy


def stored(recipe: Recipe, root: str, **storage: Any) -> Recipe:
    """The same recipe with its sources below the URL `root`, and the options of the store."""
    data = yaml.safe_load(recipe.to_yaml())
    for source in data["sources"]:
        source["uri"] = f"{root}/{source['name']}"
    data["execution"]["storage"] = storage
    return recipe_from_dict(data, str(GOLDEN))


def a_corpus(folder: Path, sources: Sequence[str] = ("a", "b"), **over: Any) -> Recipe:
    """A recipe, as `a_recipe` has it, whose files lie in `folder`."""
    weights = {name: {"weight": 0.7 if index == 0 else 0.3} for index, name in enumerate(sources)}
    return a_recipe(folder, weights, **over)
