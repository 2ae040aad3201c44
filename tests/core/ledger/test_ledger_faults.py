"""What crashes, damage and a second writer can do to a ledger: nothing that was flushed is lost, and one writer writes."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zephon_ray.ledger.writer as writer_module
from tests.ledgers import LINES, STORAGE, DiedError, append, changed, fill, make_lines, names, run
from zephon_ray.errors import RunDirectoryError, StorageError
from zephon_ray.ledger import Ledger, LedgerReader
from zephon_ray.ledger.segments import seal
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.storage import Storage

ROOT = Path(__file__).parents[3]


@pytest.mark.fault
def test_a_flipped_byte_in_a_sealed_segment_is_an_error_that_names_the_file(url: str) -> None:
    fill(url, LINES[:120])
    for first, last in ((51, 100), (101, 120)):
        name = f"000001-{first:012d}-{last:012d}.jsonl.zst"
        place = STORAGE.join(url, name)
        sound = STORAGE.read_bytes(place)
        STORAGE.write_bytes(place, sound[:40] + bytes([sound[40] ^ 4]) + sound[41:])
        with pytest.raises(RunDirectoryError, match=name):
            list(LedgerReader.open(STORAGE, url).lines())
        if last == 120:
            with pytest.raises(RunDirectoryError, match=name):
                Ledger.open(STORAGE, url)
        STORAGE.write_bytes(place, sound)
    assert list(LedgerReader.open(STORAGE, url).lines()) == LINES[:120]


@pytest.mark.fault
def test_a_segment_that_is_missing_or_of_another_run_is_an_error(url: str) -> None:
    fill(url, LINES[:120])
    middle = STORAGE.join(url, "000001-000000000051-000000000100.jsonl.zst")
    STORAGE.write_bytes(middle, seal([line.to_json() for line in make_lines(100, seed=8)[50:]]))
    with pytest.raises(RunDirectoryError, match="chain of step 51"):
        list(LedgerReader.open(STORAGE, url).lines())
    STORAGE.delete(middle)
    reader = LedgerReader.open(STORAGE, url)
    with pytest.raises(RunDirectoryError, match="no segment of the ledger holds step 51"):
        list(reader.lines())
    with pytest.raises(RunDirectoryError, match="step 77"):
        reader.expect(77)


@pytest.mark.fault
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_an_open_segment_cut_or_overwritten_anywhere_loses_only_what_is_made_again(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / uuid.uuid4().hex
    ledger = Ledger.open(STORAGE, str(folder))
    append(ledger, LINES[:60])
    (opened,) = folder.glob("*.open")
    content = opened.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    rubbish = data.draw(st.one_of(st.just(b""), st.just(bytes(300)), st.binary(max_size=50)))
    opened.write_bytes(content[:cut] + rubbish)
    whole = 50 + content[:cut].count(b"\n")
    seen = LedgerReader.open(STORAGE, str(folder))
    with Ledger.open(STORAGE, str(folder)) as again:
        assert again.last is not None
        assert again.last.step >= whole
        assert again.last == LINES[again.last.step - 1] == seen.last
        assert not list(folder.glob("*.open"))
        append(again, LINES[30:80])
    assert list(LedgerReader.open(STORAGE, str(folder)).lines()) == LINES[:80]
    shutil.rmtree(folder)


@pytest.mark.fault
def test_death_before_any_call_to_storage_loses_no_flushed_line(url: str, watched: Callable[[Callable[[str, str], None]], Storage]) -> None:
    """Dies before the first call to storage, then before the second, and so on until a whole life passes without."""
    for calls in itertools.count():
        place = f"{url}-{calls}"
        left = [calls]

        def count(call: str, where: str, left: list[int] = left) -> None:
            if left[0] == 0:
                raise DiedError
            left[0] -= 1

        flushed, died = 0, False
        try:
            ledger = Ledger.open(watched(count), place)
            for line in LINES[:130]:
                ledger.append(line)
                if line.step % 20 == 0:
                    ledger.flush()
                    flushed = line.step
            ledger.close()
        except DiedError:
            died = True
        with Ledger.open(STORAGE, place) as again:
            assert (again.last.step if again.last else 0) >= flushed
            append(again, LINES[max(flushed - 5, 0) : 135])
        assert list(LedgerReader.open(STORAGE, place).lines()) == LINES[:135]
        assert not [name for name in names(place) if name.endswith(".open")]
        if not died:
            break
    assert calls > 20


def child(folder: str) -> None:
    """Appends for ever, says what is flushed, and shortens segments and syncs so that a kill falls anywhere in them."""
    writer_module.SEAL_STEPS = 37
    writer_module.SYNC_SECONDS = 0.001
    ledger = Ledger.open(STORAGE, folder)
    last = ledger.last.step if ledger.last else 0
    for line in run():
        if line.step <= last - 10:
            continue
        ledger.append(line)
        if line.step % 7 == 0:
            ledger.flush()
            print(line.step, flush=True)


@pytest.mark.fault
def test_kill_9_loses_no_line_that_was_reported_as_flushed(local: str) -> None:
    reached = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from tests.core.ledger.test_ledger_faults import child; child(sys.argv[1])", local],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            target = reached + random.Random(reached).randrange(50, 400)
            flushed = 0
            for text in process.stdout:
                flushed = int(text)
                if flushed >= target:
                    break
            process.send_signal(signal.SIGKILL)
            flushed = max([flushed, *map(int, re.findall(r"\d+(?=\n)", process.stdout.read()))])
        finally:
            process.kill()
            process.wait(30)
        assert process.returncode == -signal.SIGKILL
        reader = LedgerReader.open(STORAGE, local)
        assert reader.last is not None
        assert reader.last.step >= flushed > reached
        reached = flushed
    made = make_lines(reached + 100)
    with Ledger.open(STORAGE, local) as ledger:
        assert ledger.generation == 4
        append(ledger, made[reached - 50 :])
        assert list(ledger.lines(1, reached + 100)) == made
    assert not list(Path(local).glob("*.open"))


@pytest.mark.fault
def test_a_full_disk_is_a_fault_of_storage_and_leaves_no_half_line(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger.open(STORAGE, local)
    ledger.append(LINES[0])
    write = os.write

    def half(fd: int, data: bytes) -> int:
        if len(data) < 60:
            raise OSError(28, "No space left on device")
        return write(fd, data[: len(data) // 2])

    with monkeypatch.context() as full:
        full.setattr(os, "write", half)
        with pytest.raises(StorageError, match="No space left on device"):
            ledger.append(LINES[1])
    assert ledger.append(LINES[1])
    assert list(LedgerReader.open(STORAGE, local).lines()) == LINES[:2]
    ledger.close()


# Two writers


def test_an_older_writer_that_goes_on_is_stopped_and_does_no_harm(url: str) -> None:
    old = Ledger.open(STORAGE, url)
    append(old, LINES[:30])
    old.flush()
    with Ledger.open(STORAGE, url) as new:
        assert new.last == LINES[29]
        old.append(LINES[30])
        with pytest.raises(RunDirectoryError, match="another writer, generation 2, has taken over; this one is generation 1"):
            old.flush()
        with pytest.raises(RunDirectoryError, match="generation 2"):
            old.append(LINES[31])
        old.close()
        append(new, LINES[30:60])
    assert list(LedgerReader.open(STORAGE, url).lines()) == LINES[:60]


def test_an_older_writer_is_stopped_at_its_seal_at_the_latest(url: str) -> None:
    old = Ledger.open(STORAGE, url)
    old.append(LINES[0])
    with Ledger.open(STORAGE, url), pytest.raises(RunDirectoryError, match="generation 2"):
        append(old, LINES[1:60])
    assert [name for name in names(url) if name.startswith("000001-") and "50" in name] == []


@pytest.mark.parametrize("same", [True, False])
def test_lines_that_two_writers_both_sealed_must_agree(
    url: str, same: bool, watched: Callable[[Callable[[str, str], None]], Storage]
) -> None:
    """The newer writer comes just before the older one's segment is written, after its look at the claims."""
    newer: list[Ledger] = []
    made = LINES if same else [*LINES[:20], *(changed(line, padding=99) for line in LINES[20:])]

    def take_over(call: str, place: str) -> None:
        if call == "write" and place.endswith("-000000000050.jsonl.zst") and not newer:
            newer.append(Ledger.open(STORAGE, url))
            begin = newer[0].last.step if newer[0].last else 0
            append(newer[0], made[begin:40])
            newer[0].close()

    old = Ledger.open(watched(take_over), url)
    with pytest.raises(RunDirectoryError, match="generation 2"):
        append(old, LINES[:60])
    reader = LedgerReader.open(STORAGE, url)
    if same or STORAGE.is_local(url):  # Locally the newer writer finds the older one's open segment and makes none of its lines.
        assert list(reader.lines()) == LINES[:50]
        assert list(reader.lines(35)) == LINES[34:50]
    else:
        with pytest.raises(RunDirectoryError, match="two segments disagree about step 21: padding"):
            list(reader.lines())


class Overwriting(Storage):
    """A store without exclusive create, whose listings lag: everyone may claim the same generation."""

    def write_bytes(self, url: str, data: bytes, *, exclusive: bool = False) -> None:
        super().write_bytes(url, data)

    def list_files(self, url: str, *, depth: int | None = None) -> list[Any]:
        return []


def test_where_two_writers_made_the_same_claim_the_one_that_was_overwritten_gives_way(url: str) -> None:
    one = Ledger.open(Overwriting(StorageSpec()), url)
    other = Ledger.open(Overwriting(StorageSpec()), url)
    assert one.generation == other.generation == 1
    one.append(LINES[0])
    with pytest.raises(RunDirectoryError, match="another writer, generation 1"):
        one.flush()
    other.close()


def test_many_claims_at_once_give_each_writer_its_own_generation(url: str) -> None:
    ledgers = [Ledger.open(STORAGE, url) for _ in range(5)]
    assert [ledger.generation for ledger in ledgers] == [1, 2, 3, 4, 5]
    ledgers[-1].append(LINES[0])
    ledgers[-1].close()
    for ledger in ledgers[:-1]:
        ledger.append(LINES[0])
        with pytest.raises(RunDirectoryError, match="generation 5"):
            ledger.close()
