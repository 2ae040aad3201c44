"""A token cache in a bucket, of data in a bucket; and what tells the states of files and objects apart."""

from __future__ import annotations

import os
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.buckets import a_corpus, stored
from tests.core.test_storage import FakeS3, of
from tests.core.test_storage import bucket as fake_bucket
from tests.s3_server import Bucket
from zephon_ray.cache import store as cache_store
from zephon_ray.loader import Loader
from zephon_ray.prewarm import prewarm
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.storage import Storage, versions

fake_bucket = fake_bucket
"""A server that gives ETags, which the real one here does not."""


def with_cache(recipe: Recipe, url: str) -> Recipe:
    data: dict[str, Any] = yaml.safe_load(recipe.to_yaml())
    data["execution"] |= {"token_cache": url}
    return recipe_from_dict(data, "/")


def test_a_cache_in_a_bucket_is_filled_and_read_and_its_use_is_noted(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = stored(a_corpus(bucket.folder), bucket.url, endpoint_url=bucket.endpoint)
    recipe = with_cache(plain, f"{bucket.url}/cache")
    filled = prewarm(recipe, runner="threads", workers=2)
    assert filled.stats.written == filled.stats.units == filled.cache.entries > 0
    assert filled.cache.size == sum(path.stat().st_size for path in (bucket.folder / "cache").rglob("*") if path.is_file())

    monkeypatch.setattr(cache_store, "STORE_USE_S", -1.0)  # each use is noted, by writing the entry again
    written = {path: path.stat().st_mtime_ns for path in (bucket.folder / "cache").rglob("*") if path.is_file()}
    with Loader(recipe, runner="threads", workers=2) as warm, Loader(plain, runner="inline") as reference:
        assert [b.chain for b in islice(warm, 20)] == [b.chain for b in islice(reference, 20)]
    assert warm.stats().cached == warm.stats().units > 0
    assert any(path.stat().st_mtime_ns > before for path, before in written.items())


def test_objects_have_the_state_that_their_store_tells(fake_bucket: FakeS3) -> None:
    storage = of(fake_bucket)
    storage.write_bytes("s3://bucket/x", b"one")
    first = storage.version("s3://bucket/x")
    assert (first.size, first.settled) == (3, True)
    assert first.tag
    assert storage.version("s3://bucket/x") == first
    storage.write_bytes("s3://bucket/x", b"two")
    assert storage.version("s3://bucket/x").tag not in (None, first.tag)
    with pytest.raises(FileNotFoundError):
        storage.version("s3://bucket/none")


def test_a_store_that_tells_no_state_gives_none(bucket: Bucket) -> None:
    storage = Storage(bucket.spec())
    for url in (f"{bucket.url}/x", f"s3a://{bucket.name}/y", "memory://token-cache/x"):
        storage.write_bytes(url, b"one")
        assert storage.version(url) == versions.FileVersion(size=3, tag=None, settled=True)


def test_files_of_a_folder_have_their_times_and_one_that_is_used_looks_new(bucket: Bucket, tmp_path: Path) -> None:
    storage, now = Storage(bucket.spec()), time.time()
    for root in (str(tmp_path), bucket.url, "memory://token-cache-ages"):
        assert storage.ages(f"{root}/none") == []
        storage.write_bytes(f"{root}/folder/a", b"123", durable=False)
        storage.write_bytes(f"{root}/folder/below/b", b"1")
        if root == bucket.url:
            # The server of the tests leaves out zeros at the end of the milliseconds, and such a time is not read (".12Z", one in ten).
            os.utime(bucket.folder / "folder" / "a", ns=(int(now) * 10**9 + 123_000_000,) * 2)
        (found,) = storage.ages(f"{root}/folder")
        assert (found.name, found.size) == ("a", 3)
        assert found.written_s == pytest.approx(now, abs=120)
    old = tmp_path / "folder" / "a"
    for age_s, newer in ((50, False), (100, True)):
        _set_age(old, age_s)
        before = old.stat().st_mtime
        storage.refresh(str(old), 60.0)
        assert (old.stat().st_mtime > before) is newer


def _set_age(path: Path, age_s: float) -> None:
    os.utime(path, (time.time() - age_s,) * 2)


def test_a_change_of_a_file_is_seen_whatever_its_size_and_time(tmp_path: Path) -> None:
    path, storage = tmp_path / "x", Storage(StorageSpec())
    path.write_bytes(b"one")
    before, status = storage.version(str(path)), path.stat()
    seen = {before.tag}

    def set_back() -> None:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        seen.add(storage.version(str(path)).tag)

    until = time.monotonic() + 10
    while len(seen) < 2 and time.monotonic() < until:  # once the clock that files are stamped by has ticked
        path.write_bytes(b"two")
        set_back()
    other = tmp_path / "y"
    other.write_bytes(b"six")
    other.replace(path)
    set_back()
    assert len(seen) == 3
