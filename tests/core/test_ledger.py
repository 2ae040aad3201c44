"""What the ledger promises: nothing that was flushed is lost, nothing damaged or different is taken, and one writer writes."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zephon_ray.ledger.writer as writer_module
from zephon_ray.errors import ReplayError, RunDirectoryError, StorageError
from zephon_ray.hashing import chain_digest
from zephon_ray.ledger import Ledger, LedgerLine, LedgerReader, WindowUse, diff, differing_fields
from zephon_ray.ledger.line import NO_CHAIN
from zephon_ray.ledger.segments import Segment, open_record, read_open, seal, unseal
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.storage import Storage

ROOT = Path(__file__).parents[2]
STORAGE = Storage(StorageSpec())


def run(seed: int = 7) -> Iterator[LedgerLine]:
    """A run without end of two sources; every fifth step begins a window of source 0, every eleventh one of source 1."""
    chance = random.Random(seed)
    chain, pairs = NO_CHAIN, [0, 0]
    for step in itertools.count(1):
        digest = chance.randbytes(16)
        chain = chain_digest(bytes.fromhex(chain), step, digest).hex()
        pairs = [pairs[0] + chance.randrange(1000), pairs[1] + chance.randrange(1000)]
        windows, left_out = {}, {}
        for source, period in ((0, 5), (1, 11)):
            if step % period == 1:
                epoch, window = divmod(step // period, 3)
                units = tuple((group, window, chance.getrandbits(64)) for group in range(4))
                windows[source] = (WindowUse(epoch=epoch, window=window, units=units),)
                left_out[source] = (chance.randrange(3), 0, 1)
        yield LedgerLine(
            step=step, digest=digest.hex(), chain=chain, pairs=tuple(pairs), padding=step % 3, left_out=left_out, windows=windows
        )


def make_lines(count: int, seed: int = 7) -> list[LedgerLine]:
    return list(itertools.islice(run(seed), count))


LINES = make_lines(400)


def changed(line: LedgerLine, **fields: Any) -> LedgerLine:
    names = ("step", "digest", "chain", "pairs", "padding", "left_out", "windows")
    return LedgerLine(**{name: getattr(line, name) for name in names} | fields)


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "ledger")
        return
    folder = f"/{uuid.uuid4().hex}"
    yield f"memory:/{folder}/ledger"
    fsspec.filesystem("memory").rm(folder, recursive=True)


@pytest.fixture
def local(tmp_path: Path) -> str:
    return str(tmp_path / "ledger")


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "SEAL_STEPS", 50)


def append(ledger: Ledger, lines: list[LedgerLine]) -> None:
    for line in lines:
        ledger.append(line)


def fill(url: str, lines: list[LedgerLine]) -> None:
    with Ledger.open(STORAGE, url) as ledger:
        append(ledger, lines)


def names(url: str) -> list[str]:
    return sorted(entry.path for entry in STORAGE.list_files(url))


class Watched(Storage):
    """The real storage, which tells of every call before it is made."""

    hook: ClassVar[Callable[[str, str], None]] = staticmethod(lambda call, url: None)

    def read_bytes(self, url: str) -> bytes:
        Watched.hook("read", url)
        return super().read_bytes(url)

    def write_bytes(self, url: str, data: bytes, *, exclusive: bool = False) -> None:
        Watched.hook("write", url)
        super().write_bytes(url, data, exclusive=exclusive)

    def delete(self, url: str) -> None:
        Watched.hook("delete", url)
        super().delete(url)

    def exists(self, url: str) -> bool:
        Watched.hook("exists", url)
        return super().exists(url)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str, str], None]], Storage]:
    def watch(hook: Callable[[str, str], None]) -> Storage:
        monkeypatch.setattr(Watched, "hook", staticmethod(hook))
        return Watched(StorageSpec())

    return watch


# One line


counts = st.integers(0, 2**62)
hex32 = st.binary(min_size=16, max_size=16).map(bytes.hex)
uses = st.builds(
    WindowUse, epoch=counts, window=counts, units=st.lists(st.tuples(counts, counts, st.integers(0, 2**64 - 1)), max_size=3).map(tuple)
)
any_line = st.builds(
    LedgerLine,
    step=st.integers(1, 2**62),
    digest=hex32,
    chain=hex32,
    pairs=st.lists(counts, max_size=3).map(tuple),
    padding=counts,
    left_out=st.dictionaries(st.integers(0, 20), st.tuples(counts, counts, counts), max_size=3),
    windows=st.dictionaries(st.integers(0, 20), st.lists(uses, max_size=3).map(tuple), max_size=3),
)


@given(any_line)
def test_a_line_comes_back_from_its_json_as_it_was(line: LedgerLine) -> None:
    data = line.to_json()
    assert b"\n" not in data
    assert LedgerLine.from_json(data) == line


@given(any_line, any_line)
def test_two_lines_differ_in_named_fields_exactly_when_they_are_not_equal(one: LedgerLine, other: LedgerLine) -> None:
    assert bool(differing_fields(one, other)) == (one != other)
    assert differing_fields(one, LedgerLine.from_json(one.to_json())) == {}


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"step":1}', LINES[0].to_json() + b" "])
def test_what_is_no_line_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a ledger line"):
        LedgerLine.from_json(data)


# Files


def test_one_flipped_bit_anywhere_in_a_sealed_segment_is_found_and_the_file_is_named() -> None:
    segment = Segment(first=1, last=5, generation=1)
    data = seal([line.to_json() for line in LINES[:5]])
    assert unseal(data, segment, "here") == LINES[:5]
    for place, bit in itertools.product(range(len(data)), (0, 5)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << bit
        with pytest.raises(RunDirectoryError, match="here"):
            unseal(bytes(flipped), segment, "here")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (LINES[:4], "should hold steps 1 to 5, but holds 4 steps"),
        (LINES[1:6], "should hold steps 1 to 5, but holds 5 steps"),
        ([], "holds no step"),
        ([*LINES[:3], changed(LINES[3], digest="00" * 16), LINES[4]], "chain of step 4"),
        ([changed(LINES[0], digest="00" * 16), *LINES[1:5]], "chain of step 1"),
    ],
)
def test_a_sealed_segment_that_is_whole_but_wrong_is_refused(lines: list[LedgerLine], said: str) -> None:
    with pytest.raises(RunDirectoryError, match=said):
        unseal(seal([line.to_json() for line in lines]), Segment(first=1, last=5, generation=1), "here")


def test_a_sealed_segment_cut_at_any_byte_is_refused() -> None:
    data = seal([line.to_json() for line in LINES[:5]])
    for size in range(len(data)):
        with pytest.raises(RunDirectoryError):
            unseal(data[:size], Segment(first=1, last=5, generation=1), "here")


def test_a_sealed_segment_is_read_by_any_zstd_tool_as_one_json_line_a_step() -> None:
    zstd = pytest.importorskip("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
    text = zstd.decompress(seal([line.to_json() for line in LINES[:5]]))
    assert text == b"".join(line.to_json() + b"\n" for line in LINES[:5])


def test_an_open_segment_cut_at_any_byte_gives_every_line_that_is_whole() -> None:
    records = [open_record(line.to_json()) for line in LINES[:8]]
    ends = list(itertools.accumulate(map(len, records)))
    data = b"".join(records)
    for size in range(len(data) + 1):
        lines, dropped = read_open(data[:size], 1)
        whole = sum(end <= size for end in ends)
        assert lines == LINES[:whole]
        assert dropped == size - ([0] + ends)[whole]


@given(st.data())
def test_whatever_stands_in_an_open_segment_only_lines_that_were_written_come_out(data: st.DataObject) -> None:
    content = bytearray(b"".join(open_record(line.to_json()) for line in LINES[:8]))
    start = data.draw(st.integers(0, len(content)))
    content[start : start + data.draw(st.integers(0, 400))] = data.draw(st.binary(max_size=400))
    lines, _ = read_open(bytes(content), 1)
    assert lines == LINES[: len(lines)]


# Appending and reading


def test_lines_come_back_in_order_from_any_step_and_segments_are_named_by_generation_and_steps(url: str) -> None:
    fill(url, LINES[:120])
    assert names(url) == [
        "000001-000000000001-000000000050.jsonl.zst",
        "000001-000000000051-000000000100.jsonl.zst",
        "000001-000000000101-000000000120.jsonl.zst",
        "000001.claim",
    ]
    reader = LedgerReader.open(STORAGE, url)
    assert reader.last == LINES[119]
    assert list(reader.lines()) == LINES[:120]
    for first, last in ((1, 1), (50, 51), (49, 101), (120, 120), (101, 500), (0, 3)):
        assert list(reader.lines(first, last)) == LINES[max(first, 1) - 1 : min(last, 120)]
    assert list(reader.lines(121)) == []
    assert [reader.expect(step) for step in (0, 1, 77, 120, 121)] == [None, LINES[0], LINES[76], LINES[119], None]


def test_a_ledger_that_does_not_exist_is_empty(url: str) -> None:
    reader = LedgerReader.open(STORAGE, url)
    assert reader.last is None
    assert list(reader.lines()) == []
    assert reader.unit_digests({0: (0, 0)}) == {}
    STORAGE.write_bytes(STORAGE.join(url, "other"), b"")  # for the fixture to delete


def test_a_reader_sees_what_a_living_writer_has_flushed_and_changes_nothing(url: str) -> None:
    with Ledger.open(STORAGE, url) as ledger:
        append(ledger, LINES[:70])
        ledger.flush()
        before = names(url)
        assert list(LedgerReader.open(STORAGE, url).lines()) == LINES[:70]
        assert names(url) == before
        assert ledger.append(LINES[70])


def test_a_later_writer_goes_on_and_equal_lines_are_not_written_twice(url: str) -> None:
    fill(url, LINES[:70])
    with Ledger.open(STORAGE, url) as ledger:
        assert ledger.generation == 2
        assert [ledger.append(line) for line in LINES[40:90]] == [False] * 30 + [True] * 20
    assert [name for name in names(url) if name.startswith("000002-")] == ["000002-000000000071-000000000090.jsonl.zst"]
    assert list(LedgerReader.open(STORAGE, url).lines()) == LINES[:90]


other_use = WindowUse(epoch=0, window=0, units=((0, 0, 1), *LINES[0].windows[0][0].units[1:]))


@pytest.mark.parametrize(
    ("step", "fields", "said"),
    [
        (3, {"digest": "0" * 32}, rf"digest: recorded '{LINES[2].digest}', made now '{'0' * 32}'"),
        (3, {"pairs": (1, LINES[2].pairs[1])}, rf"pairs\[0\]: recorded {LINES[2].pairs[0]}, made now 1\."),
        (3, {"pairs": (*LINES[2].pairs, 4)}, r"pairs\[2\]: recorded None, made now 4"),
        (3, {"padding": 9}, r"padding: recorded 0, made now 9"),
        (1, {"left_out": {}}, r"left_out\[0\]\.bad: recorded \d, made now None"),
        (
            1,
            {"windows": LINES[0].windows | {0: (other_use,)}},
            r"windows\[0\] epoch 0 window 0 group 0 unit 0: recorded '\w{16}', made now '0{15}1'",
        ),
    ],
)
def test_a_step_made_again_that_differs_in_any_field_is_refused_with_both_values(
    url: str, step: int, fields: dict[str, Any], said: str
) -> None:
    fill(url, LINES[:60])
    with Ledger.open(STORAGE, url) as ledger:
        with pytest.raises(ReplayError, match=said) as refused:
            ledger.append(changed(LINES[step - 1], **fields))
        assert f"step {step} was made again" in str(refused.value)
    with Ledger.open(STORAGE, url) as ledger:
        ledger.append(LINES[60])
        with pytest.raises(ReplayError):  # also while its segment is open
            ledger.append(changed(LINES[60], padding=99))


def test_a_gap_and_a_chain_that_does_not_follow_are_refused(url: str) -> None:
    with Ledger.open(STORAGE, url) as ledger:
        with pytest.raises(RunDirectoryError, match=r"ends at step 0, step 2 would leave a gap"):
            ledger.append(LINES[1])
        ledger.append(LINES[0])
        for wrong in ({"digest": "0" * 32}, {"chain": "0" * 32}, {"chain": "nonsense"}, {"chain": LINES[1].chain.upper()}):
            with pytest.raises(ReplayError, match=r"step 2: chain .* does not follow"):
                ledger.append(changed(LINES[1], **wrong))
        assert ledger.append(LINES[1])
    with pytest.raises(RunDirectoryError, match="closed"):
        ledger.append(LINES[2])
    ledger.close()


def test_opening_reads_only_the_last_segment_and_a_replay_reads_each_segment_once(
    url: str, watched: Callable[[Callable[[str, str], None]], Storage]
) -> None:
    fill(url, LINES)
    read: list[str] = []
    storage = watched(lambda call, place: read.append(place.rpartition("/")[2]) if call == "read" and place.endswith(".zst") else None)
    with Ledger.open(storage, url) as ledger:
        assert read == ["000001-000000000351-000000000400.jsonl.zst"]
        del read[:]
        assert not any(ledger.append(line) for line in LINES[120:])
        assert read == [f"000001-{first:012d}-{first + 49:012d}.jsonl.zst" for first in range(101, 400, 50)]


def test_unit_digests_are_found_backward_and_no_further_than_needed(
    url: str, watched: Callable[[Callable[[str, str], None]], Storage]
) -> None:
    fill(url, LINES)
    read: list[str] = []
    storage = watched(lambda call, place: read.append(place) if call == "read" else None)

    def expected(since: dict[int, tuple[int, int]]) -> dict[tuple[int, int, int], dict[tuple[int, int], int]]:
        return {
            (source, use.epoch, use.window): {(group, unit): digest for group, unit, digest in use.units}
            for line in LINES
            for source, used in line.windows.items()
            for use in used
            if source in since and (use.epoch, use.window) >= since[source]
        }

    reader = LedgerReader.open(storage, url)
    for since, segments in (
        ({0: (23, 0), 1: (11, 1)}, 2),  # source 0 from step 346 on, source 1 from step 375 on
        ({0: (10, 0)}, 5),  # from step 151 on
        ({1: (0, 0)}, 8),
        ({0: (99, 0)}, 1),  # not used yet
        ({}, 1),
    ):
        reader = LedgerReader.open(storage, url)
        del read[:]
        found = reader.unit_digests(since)
        assert found == expected(since)
        assert len(read) == segments - 1  # the last one was read at opening
    assert len(expected({0: (23, 0), 1: (11, 1)})) == 14


def test_diff_names_the_first_step_that_differs_and_what(url: str) -> None:
    other_url = STORAGE.join(url.rpartition("/")[0], "other")
    fill(url, LINES[:90])
    fill(other_url, [*LINES[:59], changed(LINES[59], padding=99), *LINES[60:120]])
    one, other = LedgerReader.open(STORAGE, url), LedgerReader.open(STORAGE, other_url)
    difference = diff(one, other)
    assert difference is not None
    assert (difference.step, difference.fields) == (60, {"padding": (0, 99)})
    assert diff(one, one) is None
    shorter_url = STORAGE.join(url.rpartition("/")[0], "shorter")
    fill(shorter_url, LINES[:20])
    assert diff(one, LedgerReader.open(STORAGE, shorter_url)) is None


def test_lines_on_object_storage_are_written_after_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    folder = f"memory://{uuid.uuid4().hex}"
    with Ledger.open(STORAGE, folder) as ledger:
        for line, seconds in zip(LINES[:4], (0.0, 6.0, 3.9, 0.2), strict=True):
            now[0] += seconds
            ledger.append(line)
            ended = LedgerReader.open(STORAGE, folder).last
            assert (ended.step if ended else 0) == (4 if line.step == 4 else 0)
    fsspec.filesystem("memory").rm(folder.removeprefix("memory:/"), recursive=True)


def test_a_reader_that_comes_while_the_open_segment_is_being_sealed_looks_again(
    local: str, watched: Callable[[Callable[[str, str], None]], Storage]
) -> None:
    writer = Ledger.open(STORAGE, local)
    append(writer, LINES[:70])
    looks: list[str] = []

    def seal_it(call: str, place: str) -> None:
        if call == "read" and place.endswith(".open"):
            looks.append(place)
            writer.close()

    assert list(LedgerReader.open(watched(seal_it), local).lines()) == LINES[:70]
    assert len(looks) == 1


# Crashes and damage


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


class DiedError(BaseException):
    pass


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
            [sys.executable, "-c", "import sys; from tests.core.test_ledger import child; child(sys.argv[1])", local],
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


@pytest.mark.bench
def test_appending_costs_well_under_50_microseconds_a_step(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "SEAL_STEPS", 1000)
    lines = make_lines(20_000)
    spent = []
    for turn in range(3):
        with Ledger.open(STORAGE, f"{local}-{turn}") as ledger:
            start = time.perf_counter()
            append(ledger, lines)
            spent.append(time.perf_counter() - start)
    assert min(spent) / len(lines) < 50e-6
