"""Storage keeps names as they stand, writes whole files, tries passing faults again, and gives up on lasting ones."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.fake_s3 import FakeS3, fake_s3
from zephon_ray.errors import StorageError
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.storage import Storage, faults, store

ODD_NAMES = [
    "a b.txt", "plus+.txt", "eq=1.txt", "pct%20.txt", "pct%zz.txt", "hash#1.txt", "ask?x.txt", "ünï.txt", "br[1].txt", "star*.txt",
    "quote'.txt",
]  # fmt: skip


@pytest.fixture
def storage() -> Storage:
    return Storage(StorageSpec(max_tries=8))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("EC2_METADATA_DISABLED", "true")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(faults, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(store, "PAGE_TRIES", 1)
    with fake_s3() as fake:
        yield fake


def of(bucket: FakeS3) -> Storage:
    return Storage(StorageSpec(endpoint_url=bucket.endpoint, max_tries=8))


class Flaky(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """A store in memory that fails for a while, or for ever, when a file's bytes are asked for."""

    protocol = "flaky"
    faults: ClassVar[list[BaseException]] = []
    lasting: BaseException | None = None
    asked = 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        type(self).asked += 1
        if self.lasting is not None:
            raise self.lasting
        if self.faults:
            raise self.faults.pop(0)
        return bytes(super().cat_file(path, start, end, **kwargs))


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Flaky]]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(faults, "FIRST_WAIT", 0.001)
    Flaky.faults, Flaky.lasting, Flaky.asked = [], None, 0
    yield Flaky
    fsspec.filesystem("flaky").store.clear()


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_local_name_is_taken_as_it_stands(storage: Storage, tmp_path: Path, name: str) -> None:
    url = storage.join(str(tmp_path), name)
    storage.write_bytes(url, b"content")
    assert (tmp_path / name).read_bytes() == b"content"
    assert storage.read_bytes(url) == b"content"
    assert [entry.path for entry in storage.list_files(str(tmp_path))] == [name]


def test_a_file_url_is_decoded(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "a b#%.txt").write_bytes(b"x")
    assert storage.read_bytes((tmp_path / "a b#%.txt").as_uri()) == b"x"


def test_links_to_folders_are_not_followed_and_links_to_files_are(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "a").write_bytes(b"12345")
    (tmp_path / "data" / "to_file").symlink_to("deep/a")
    (tmp_path / "data" / "to_folder").symlink_to("deep")
    (tmp_path / "data" / "deep" / "round").symlink_to("..")
    (tmp_path / "data" / "to_nothing").symlink_to("gone")
    found = storage.list_files(str(tmp_path / "data"))
    assert sorted(found) == [("deep/a", 5, False), ("to_file", 5, False), ("to_nothing", -1, False)]


def test_a_listing_stops_at_its_depth(storage: Storage, tmp_path: Path) -> None:
    for name in ("a", "b/a", "b/c/a"):
        storage.write_bytes(storage.join(str(tmp_path), name), b"")
    assert sorted(entry.path for entry in storage.list_files(str(tmp_path), depth=2)) == ["a", "b/a"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_that_may_not_be_read_is_not_passed_over(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o000)
    with pytest.raises(PermissionError):
        storage.list_files(str(tmp_path))


@pytest.mark.parametrize("scheme", ["local", "memory", "s3"])
def test_exclusive_writing_never_replaces(storage: Storage, tmp_path: Path, scheme: str, bucket: FakeS3) -> None:
    name = "claim.jsonl.zst"
    url = {"local": f"{tmp_path}/run/{name}", "memory": f"memory://{tmp_path.name}/{name}", "s3": f"s3://bucket/run/{name}"}[scheme]
    storage = of(bucket) if scheme == "s3" else storage
    storage.write_bytes(url, b"mine", exclusive=True)
    with pytest.raises(FileExistsError):
        storage.write_bytes(url, b"yours", exclusive=True)
    assert storage.read_bytes(url) == b"mine"
    storage.write_bytes(url, b"replaced")
    assert storage.read_bytes(url) == b"replaced"
    if scheme == "local":
        assert list((tmp_path / "run").iterdir()) == [tmp_path / "run" / name]


@pytest.mark.parametrize("scheme", ["local", "memory", "s3"])
def test_all_stores_agree_on_what_is_there(storage: Storage, tmp_path: Path, scheme: str, bucket: FakeS3) -> None:
    root = {"local": str(tmp_path), "memory": f"memory://{tmp_path.name}", "s3": "s3://bucket/root"}[scheme]
    storage = of(bucket) if scheme == "s3" else storage
    one = storage.join(root, "deep", "one")
    storage.write_bytes(one, b"12345")
    storage.write_bytes(storage.join(root, "two"), b"")
    assert sorted(storage.list_files(root)) == [("deep/one", 5, False), ("two", 0, False)]
    assert (storage.kind(root), storage.kind(one), storage.kind(root + "/none")) == ("folder", "file", None)
    assert (storage.size(one), storage.exists(one), storage.exists(root + "/none")) == (5, True, False)
    with storage.open_input(one, read_ahead=4) as file:
        assert (file.size(), file.read_at(2, 1), file.read_at(9, 4)) == (5, b"23", b"5")
        file.seek(3)
        assert (file.read(1), file.read()) == (b"4", b"5")
    storage.delete(one)
    storage.delete(one)
    assert not storage.exists(one)
    for action in (storage.read_bytes, storage.size):
        with pytest.raises(FileNotFoundError):
            action(one)


def test_marks_of_folders_in_a_bucket_are_told_from_files_and_neighbours_left_out(bucket: FakeS3) -> None:
    for key in ("ds/", "ds/sub/", "ds/sub_$folder$", "ds/sub", "ds/empty"):
        bucket.objects[key] = b""
    bucket.objects |= {"ds/sub/part": b"x", "ds-other/part": b"x"}
    found = of(bucket).list_files("s3://bucket/ds")
    assert sorted(entry.path for entry in found if not entry.is_directory_mark) == ["empty", "sub/part"]


def test_every_listed_key_of_a_bucket_can_be_opened_by_that_name(bucket: FakeS3) -> None:
    bucket.objects |= {f"ds/{name}": name.encode() for name in ODD_NAMES}
    storage = of(bucket)
    assert {e.path: storage.read_bytes(storage.join("s3://b/ds", e.path)) for e in storage.list_files("s3://b/ds")} == {
        name: name.encode() for name in ODD_NAMES
    }


@pytest.mark.parametrize("fault", [(503, "SlowDown"), (500, "InternalError"), (400, "ExpiredToken"), "cut"])
def test_a_bucket_that_fails_three_times_gives_the_same_bytes(bucket: FakeS3, fault: tuple[int, str] | str) -> None:
    bucket.objects["a"] = bytes(range(256)) * 100
    bucket.fault = lambda method, key, before: fault if before < 3 and method in ("GET", "LIST") else None
    assert of(bucket).read_bytes("s3://bucket/a") == bytes(range(256)) * 100
    assert bucket.asked["GET", "a"] == 4
    assert [entry.path for entry in of(bucket).list_files("s3://bucket")] == ["a"]


def test_a_bucket_that_goes_on_failing_is_named_with_the_tries_and_the_last_answer(bucket: FakeS3) -> None:
    bucket.objects["a"] = bytes(1000)
    bucket.fault = lambda method, key, before: (503, "SlowDown") if method == "GET" else None
    with pytest.raises(StorageError, match=r"s3://bucket/a: .*(SLOW_DOWN|SERVICE_UNAVAILABLE).*after 8 of 8 tries"):
        of(bucket).read_bytes("s3://bucket/a")
    assert bucket.asked["GET", "a"] == 8


def test_refused_access_is_tried_once_more_with_credentials_that_are_read_again(bucket: FakeS3) -> None:
    bucket.fault = lambda method, key, before: (403, "AccessDenied")
    with pytest.raises(PermissionError, match="refuses the credentials") as caught:
        of(bucket).read_bytes("s3://bucket/a")
    assert caught.value.filename == "s3://bucket/a"
    assert sum(bucket.asked.values()) == 2


def test_a_read_that_fails_in_the_middle_goes_on_where_it_began(storage: Storage, flaky: type[Flaky]) -> None:
    storage.write_bytes("flaky://f/a", bytes(range(100)))
    with storage.open_input("flaky://f/a") as file:
        assert file.read(30) == bytes(range(30))
        flaky.faults = [ConnectionResetError("gone"), TimeoutError("late"), OSError("503 SlowDown: throttled")]
        assert file.read(30) == bytes(range(30, 60))
    assert flaky.asked == 5


def test_a_lasting_fault_is_not_tried_again(storage: Storage, flaky: type[Flaky]) -> None:
    storage.write_bytes("flaky://f/a", b"x")
    flaky.lasting = OSError("bad request: no such version")
    with pytest.raises(StorageError, match=r"flaky://f/a: bad request.*after 1 of 8 tries"):
        storage.read_bytes("flaky://f/a")


def test_waits_are_bounded_in_number(storage: Storage, flaky: type[Flaky]) -> None:
    storage.write_bytes("flaky://f/a", b"x")
    flaky.lasting = TimeoutError("late")
    with pytest.raises(StorageError, match=r"late \(TimeoutError, after 8 of 8 tries, "):
        storage.read_bytes("flaky://f/a")
    assert flaky.asked == 8


def test_small_reads_of_a_remote_stream_share_a_request(storage: Storage, flaky: type[Flaky]) -> None:
    storage.write_bytes("flaky://f/a", bytes(1000))
    with storage.open_input("flaky://f/a", read_ahead=500) as file:
        assert b"".join(file.read(10) for _ in range(100)) == bytes(1000)
    assert flaky.asked == 2


def test_storage_can_be_pickled(storage: Storage) -> None:
    assert pickle.loads(pickle.dumps(storage)) == storage
