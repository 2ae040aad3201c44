"""What the ledger promises: lines in order from any step, nothing different taken for equal, and no more read than is needed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

import zephon_ray.ledger.writer as writer_module
from tests.ledgers import LINES, STORAGE, append, changed, fill, make_lines, names
from zephon_ray.errors import ReplayError, RunDirectoryError
from zephon_ray.ledger import Ledger, LedgerReader, WindowUse, diff
from zephon_ray.storage import Storage


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
