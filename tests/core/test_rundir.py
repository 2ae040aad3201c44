"""What a run's directory promises: it goes on with its own run only, finds damage, and nobody edits its trail unseen."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zephon_ray.rundir.directory as directory_module
from tests.ledgers import LINES, DiedError
from zephon_ray.errors import RunDirectoryError, StateError
from zephon_ray.manifest import Shard, SourceManifest
from zephon_ray.recipe import Recipe, fingerprint, fingerprint_fields, recipe_from_dict
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.rundir import RunDirectory, States
from zephon_ray.storage import Storage

STORAGE = Storage(StorageSpec())


def recipe(**fields: Any) -> Recipe:
    data = {
        "schema": 1,
        "name": "näme: of # it\nall",
        "seed": 2**63 + 1,
        "lanes": 2,
        "sequence_length": 16,
        "global_batch_size": 4,
        "tokenizer": {"path": "tokenizer.json", "eos": "<|eos|>"},
        "sources": [
            {"name": "web", "uri": "web/**/*.jsonl", "weight": 0.7},
            {"name": "code", "uri": "s3://bucket/code", "weight": 0.3, "epochs": 2},
        ],
    }
    return recipe_from_dict(data | fields, "/corpus")


def manifests(size: int = 10) -> list[SourceManifest]:
    web = [Shard(path=f"{part}.jsonl", url=f"/corpus/web/{part}.jsonl", size=size + part, format="jsonl") for part in range(3)]
    code = [Shard(path="c.parquet", url="s3://bucket/code/c.parquet", size=99, format="parquet", row_groups=((5, 50), (6, 60)))]
    return [
        SourceManifest.of(source=index, name=name, text_field="text", unit_bytes=1 << 20, shards=shards)
        for index, (name, shards) in enumerate((("web", web), ("code", code)))
    ]


def open_run(url: str, of: Recipe | None = None, tokenizer: str = "a" * 64, size: int = 10) -> RunDirectory:
    of, found = of or recipe(), manifests(size)
    identity = (of, tokenizer, [manifest.digest() for manifest in found])
    return RunDirectory.create_or_open(STORAGE, url, of, fingerprint(*identity), fingerprint_fields(*identity), found)


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "runs" / "one")
        return
    folder = f"/{uuid.uuid4().hex}"
    fsspec.filesystem("memory").makedirs(folder)
    yield f"memory:/{folder}/one"
    fsspec.filesystem("memory").rm(folder, recursive=True)


def content(url: str) -> dict[str, bytes]:
    return {entry.path: STORAGE.read_bytes(STORAGE.join(url, entry.path)) for entry in STORAGE.list_files(url)}


# Making and opening


def test_a_new_directory_holds_the_lock_the_manifests_and_who_made_it(url: str) -> None:
    run = open_run(url)
    audit = {"audit.jsonl"} if STORAGE.is_local(url) else {"audit/000000000001.json"}
    assert set(content(url)) == {"recipe.lock.yaml", "manifests/0000.json", "manifests/0001.json"} | audit
    assert [run.manifest(source) for source in (0, 1)] == manifests()
    (entry,) = run.verify_audit()
    assert (entry["event"], entry["pid"], entry["fields"]["fingerprint"]) == ("created", os.getpid(), run.lock.fingerprint)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", entry["time"])


def test_the_lock_gives_back_the_recipe_to_its_last_digit(url: str) -> None:
    made = recipe(sources=[{"name": "x", "uri": "x", "weight": 0.1 + 0.2}])
    found = manifests()[:1]
    identity = (made, "b" * 64, [found[0].digest()])
    RunDirectory.create_or_open(STORAGE, url, made, fingerprint(*identity), fingerprint_fields(*identity), found)
    lock = RunDirectory.open(STORAGE, url).lock
    assert lock.recipe.identity() == made.identity()
    assert lock.recipe.source_url(0) == "/corpus/x"
    assert lock.recipe.name == made.name
    assert lock.fields == fingerprint_fields(*identity)
    assert fingerprint(lock.recipe, "b" * 64, [found[0].digest()]) == lock.fingerprint
    assert set(lock.versions) == {"zephon-ray", "python", "numpy", "pyarrow", "tokenizers"}


def test_opening_again_changes_only_the_trail_which_tells_what_changed_outside_the_identity(url: str) -> None:
    open_run(url)
    before = content(url)
    other = recipe(name="other", tokenizer={"path": "/moved/tokenizer.json", "eos": "<|eos|>"}, execution={"runner": "inline"})
    run = open_run(url, other)
    after = content(url)
    assert {name: after[name] for name in before if "audit" not in name} == {name: before[name] for name in before if "audit" not in name}
    entry = run.verify_audit()[-1]
    assert (entry["event"], entry["number"]) == ("opened", 2)
    assert set(entry["fields"]["changed"]) == {"name", "tokenizer.path", "execution.runner"}
    assert entry["fields"]["changed"]["tokenizer.path"] == ["/corpus/tokenizer.json", "/moved/tokenizer.json"]
    assert run.lock.recipe.name == recipe().name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"of": {"seed": 7}}, [r"seed: the directory has 9223372036854775809, this run 7"]),
        (
            {"of": {"lanes": 4, "on_exhausted": "continue"}},
            [r"lanes: the directory has 2, this run 4", r"on_exhausted: .*'stop', .*'continue'"],
        ),
        ({"tokenizer": "c" * 64}, [rf"tokenizer\.sha256: the directory has '{'a' * 64}', this run '{'c' * 64}'"]),
        ({"size": 11}, [r"sources\[0\]\.manifest: ", r"shard 0\.jsonl: 10 bytes in the directory, 11 bytes now", r"shard 2\.jsonl: "]),
        ({"of": {"packing": {"algorithm": "wrap", "max_document_tokens": 5}}}, [r"packing\.max_document_tokens: .* 128, this run 5"]),
    ],
)
def test_the_directory_of_another_run_is_refused_and_each_field_that_differs_is_named(
    url: str, change: dict[str, Any], said: list[str]
) -> None:
    open_run(url)
    before = content(url)
    options = change | ({"of": recipe(**change["of"])} if "of" in change else {})
    with pytest.raises(RunDirectoryError) as refused:
        open_run(url, **options)
    for pattern in said:
        assert re.search(pattern, str(refused.value))
    assert "name:" not in str(refused.value)
    assert content(url) == before


def test_a_directory_that_holds_something_else_is_refused_and_left_as_it_is(url: str) -> None:
    for name in ("thesis.tex", "ledger/000001.claim", "states/000000000100.json"):
        place = STORAGE.join(url, name)
        STORAGE.write_bytes(place, b"precious")
        with pytest.raises(RunDirectoryError, match=f"holds something else \\({re.escape(name)}\\)"):
            open_run(url)
        assert content(url) == {name: b"precious"}
        STORAGE.delete(place)
    with pytest.raises(RunDirectoryError, match="is not the directory of a run"):
        RunDirectory.open(STORAGE, url)


def test_a_place_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    for place in ("file", "file/below"):
        with pytest.raises(RunDirectoryError, match=r"Give another --out|cannot be made"):
            open_run(str(tmp_path / place))
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_local_directories_are_for_their_owner_only(tmp_path: Path) -> None:
    open_run(str(tmp_path / "run")).open_ledger().close()
    for folder in ("run", "run/manifests", "run/ledger", "run/states"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "run/audit.jsonl").stat().st_mode) == 0o600


@pytest.mark.fault
@pytest.mark.parametrize("calls", range(1, 9))
def test_a_run_that_died_while_it_began_is_begun_again(url: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dies before the n-th file is written."""
    left = [calls]
    write = Storage.write_bytes

    def dying(storage: Storage, place: str, data: bytes, *, exclusive: bool = False) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise DiedError
        write(storage, place, data, exclusive=exclusive)

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "write_bytes", dying)
        try:
            open_run(url)
            assert calls > 3
        except DiedError:
            assert calls <= 4
    run = open_run(url)
    assert [run.manifest(source) for source in (0, 1)] == manifests()
    assert run.verify_audit()


@pytest.mark.fault
@pytest.mark.parametrize("damage", [lambda text: text[:100], lambda text: b"", lambda text: b"\xff" + text, lambda text: b"- 1\n" + text])
def test_a_damaged_lock_is_refused_by_name(url: str, damage: Any) -> None:
    open_run(url)
    place = STORAGE.join(url, "recipe.lock.yaml")
    STORAGE.write_bytes(place, damage(STORAGE.read_bytes(place)))
    with pytest.raises(RunDirectoryError, match=r"recipe\.lock\.yaml: "):
        open_run(url)


@pytest.mark.fault
@pytest.mark.parametrize(
    "pattern", [r"^fingerprint: \w", r"^  seed: \d", r"^  lanes: ", r"^    weight: 0\.", r"tokenizer\.sha256: a", r"\]\.manifest: .."]
)
def test_a_lock_that_was_edited_is_refused(url: str, pattern: str) -> None:
    open_run(url)
    place = STORAGE.join(url, "recipe.lock.yaml")
    edited, count = re.subn(f"({pattern})", r"\g<1>4", STORAGE.read_bytes(place).decode(), count=1, flags=re.MULTILINE)
    assert count == 1
    STORAGE.write_bytes(place, edited.encode())
    with pytest.raises(RunDirectoryError, match=r"do not agree: it was edited|its recipe is damaged"):
        open_run(url)


def test_a_lock_of_a_later_version_is_refused(url: str) -> None:
    open_run(url)
    place = STORAGE.join(url, "recipe.lock.yaml")
    STORAGE.write_bytes(place, STORAGE.read_bytes(place).replace(b"lock: 1\n", b"lock: 2\n"))
    with pytest.raises(RunDirectoryError, match="lock=2, but this version of zephon-ray reads 1"):
        RunDirectory.open(STORAGE, url)


@pytest.mark.fault
def test_a_damaged_or_missing_manifest_is_refused_by_name(url: str) -> None:
    run = open_run(url)
    place = STORAGE.join(url, "manifests/0000.json")
    STORAGE.write_bytes(place, STORAGE.read_bytes(place).replace(b"11", b"12"))
    with pytest.raises(RunDirectoryError, match=r"manifests/0000\.json: the manifest is missing or damaged \(its digest is"):
        run.manifest(0)
    STORAGE.delete(place)
    with pytest.raises(RunDirectoryError, match=r"manifests/0000\.json"):
        run.manifest(0)
    with pytest.raises(RunDirectoryError, match=r"sources\[0\]\.manifest"):
        open_run(url, size=11)


# States


def test_the_nearest_state_is_the_newest_at_or_before_a_step(url: str) -> None:
    run = open_run(url)
    assert run.states.nearest(500) is None
    for step in (200, 0, 1000000, 100):
        run.states.save(step, b'{"at":%d}' % step)
    assert run.states.steps() == [0, 100, 200, 1000000]
    for step, nearest in ((0, 0), (99, 0), (100, 100), (199, 100), (999999, 200), (10**9, 1000000)):
        assert run.states.nearest(step) == (nearest, b'{"at":%d}' % nearest)
    run.states.save(100, b'{"again":1}')
    assert run.states.nearest(100) == (100, b'{"again":1}')
    file = json.loads(STORAGE.read_bytes(STORAGE.join(url, "states/000000000100.json")))
    assert (file["step"], file["state"]) == (100, {"again": 1})
    assert run.states.damaged == 0


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**13), st.binary(max_size=100))
def test_any_bytes_come_back_as_they_were_saved(tmp_path: Path, step: int, data: bytes) -> None:
    states = States(STORAGE, str(tmp_path))
    states.save(step, data)
    assert states.load(step) == data


@pytest.mark.fault
def test_damaged_states_are_passed_over_counted_and_warned_of_if_an_older_one_is_sound(url: str, caplog: pytest.LogCaptureFixture) -> None:
    states = open_run(url).states
    place = STORAGE.join(url, "states/000000000200.json")
    for step in (100, 200):
        states.save(step, b'{"at":%d}' % step)
    sound = STORAGE.read_bytes(place)
    of_100 = STORAGE.read_bytes(STORAGE.join(url, "states/000000000100.json"))
    damages = [sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :] for at in range(len(sound))]
    damages += [sound[:size] for size in range(len(sound))] + [sound + b"\n", of_100]
    for damaged in damages:
        STORAGE.write_bytes(place, damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert states.nearest(250) == (100, b'{"at":100}')
        assert "state of step 200 is damaged" in caplog.text
        assert "passed over for that of step 100" in caplog.text
    assert states.damaged == len(damages)
    STORAGE.delete(STORAGE.join(url, "states/000000000100.json"))
    with pytest.raises(StateError, match=r"000000000200\.json: the saved state of step 200 is damaged .* No older one is sound"):
        states.nearest(250)
    assert states.nearest(199) is None


def test_a_state_that_its_reader_refuses_counts_as_damaged(url: str) -> None:
    states = open_run(url).states
    states.save(100, b"old")
    states.save(200, b"new")

    def check(data: bytes) -> None:
        if data == b"new":
            raise StateError("another version")

    assert states.nearest(200, check) == (100, b"old")
    assert states.damaged == 1


def test_a_run_goes_on_from_its_newest_state_and_agrees_with_the_ledger_on_the_overlap(url: str) -> None:
    run = open_run(url)
    with run.open_ledger() as ledger:
        for line in LINES[:150]:
            ledger.append(line)
        ledger.flush()
        run.states.save(100, b"{}")
    again = open_run(url)
    with again.open_ledger() as ledger:
        assert ledger.last is not None
        nearest = again.states.nearest(ledger.last.step)
        assert nearest == (100, b"{}")
        assert [ledger.append(line) for line in LINES[100:160]] == [False] * 50 + [True] * 10
    assert list(again.read_ledger().lines()) == LINES[:160]
    assert again.read_ledger().unit_digests({0: (10, 0)})[0, 10, 0] == {
        (group, unit): digest for use in LINES[150].windows[0] for group, unit, digest in use.units
    }


# The audit trail


def trail(url: str) -> list[str]:
    if STORAGE.is_local(url):
        return ["audit.jsonl"]
    return sorted(name for name in content(url) if name.startswith("audit/"))


def test_an_edit_a_removal_and_a_swap_in_the_trail_are_found(url: str) -> None:
    run = open_run(url)
    run.audit("resumed", step=100, dp=[4, 2])
    run.audit("resumed", step=300)
    assert [entry["event"] for entry in run.verify_audit()] == ["created", "resumed", "resumed"]
    assert run.verify_audit()[1]["fields"] == {"step": 100, "dp": [4, 2]}
    if STORAGE.is_local(url):
        file = STORAGE.join(url, "audit.jsonl")
        sound = STORAGE.read_bytes(file)
        lines = sound.splitlines(keepends=True)
        spoilt = [
            sound.replace(b'"step":100', b'"step":101'),
            b"".join(lines[1:]),
            lines[0] + lines[2],
            lines[1] + lines[0] + lines[2],
            sound + lines[2],
            sound.replace(b'"event":"created"', b'"event": "created"'),
            sound + b"\n",
        ]
        for edited in spoilt:
            STORAGE.write_bytes(file, edited)
            with pytest.raises(RunDirectoryError, match=r"audit\.jsonl, entry \d: the audit trail is broken"):
                run.verify_audit()
    else:
        first, second, _ = trail(url)
        sound = STORAGE.read_bytes(STORAGE.join(url, second))
        for edited in (sound.replace(b'"step":100', b'"step":101'), STORAGE.read_bytes(STORAGE.join(url, first)), b""):
            STORAGE.write_bytes(STORAGE.join(url, second), edited)
            with pytest.raises(RunDirectoryError, match=f"{second}, entry 2: the audit trail is broken"):
                run.verify_audit()
        STORAGE.delete(STORAGE.join(url, second))
        with pytest.raises(RunDirectoryError, match="the audit trail is broken"):
            run.verify_audit()


@pytest.mark.fault
def test_an_entry_that_a_crash_left_half_written_is_cut_and_the_next_one_says_so(tmp_path: Path) -> None:
    run = open_run(str(tmp_path / "run"))
    file = tmp_path / "run/audit.jsonl"
    sound = file.read_bytes()
    for size in (1, 20, len(sound) - 1):
        file.write_bytes(sound + sound[:size])
        assert len(run.verify_audit()) == 1
        run.audit("resumed")
        assert run.verify_audit()[-1]["fields"] == {"torn_bytes": size}
        file.write_bytes(sound)


def test_nothing_is_chained_to_a_broken_end(tmp_path: Path) -> None:
    run = open_run(str(tmp_path / "run"))
    file = tmp_path / "run/audit.jsonl"
    file.write_bytes(file.read_bytes().replace(b"created", b"craeted"))
    with pytest.raises(RunDirectoryError, match="entry 1: the audit trail is broken"):
        run.audit("resumed")


def record_often(url: str) -> None:
    run = RunDirectory.open(STORAGE, url)
    for number in range(20):
        run.audit("resumed", number=number)


def test_entries_of_several_processes_at_once_form_one_chain(tmp_path: Path) -> None:
    run = open_run(str(tmp_path / "run"))
    processes = [multiprocessing.get_context("spawn").Process(target=record_often, args=(run.url,)) for _ in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert len(run.verify_audit()) == 41


def test_a_trail_that_was_copied_between_kinds_of_storage_goes_on(tmp_path: Path) -> None:
    remote = f"memory://{uuid.uuid4().hex}"
    here = str(tmp_path / "run")
    open_run(here)
    for name, data in content(here).items():
        STORAGE.write_bytes(STORAGE.join(remote, name), data)
    open_run(remote)
    back = str(tmp_path / "back")
    for name, data in content(remote).items():
        STORAGE.write_bytes(STORAGE.join(back, name), data)
    entries = open_run(back).verify_audit()
    assert [(entry["number"], entry["event"]) for entry in entries] == [(1, "created"), (2, "opened"), (3, "opened")]
    fsspec.filesystem("memory").rm(remote.removeprefix("memory:/"), recursive=True)


def test_two_that_create_the_same_directory_at_once_both_end_in_one_run(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one comes between the look for a lock and its making; one with another recipe is refused."""
    look = directory_module._refuse_foreign

    def and_the_other(storage: Storage, place: str) -> None:
        look(storage, place)
        monkeypatch.setattr(directory_module, "_refuse_foreign", look)
        open_run(place)

    monkeypatch.setattr(directory_module, "_refuse_foreign", and_the_other)
    assert [entry["event"] for entry in open_run(url).verify_audit()] == ["created", "opened"]
    monkeypatch.setattr(directory_module, "_refuse_foreign", and_the_other)
    with pytest.raises(RunDirectoryError, match="seed: the directory has 9223372036854775809, this run 5"):
        open_run(f"{url}-2", recipe(seed=5))
