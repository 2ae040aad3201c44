"""One line and one file: what is written comes back as it was, and damage to it is found."""

from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ledgers import LINES, changed
from zephon_ray.errors import RunDirectoryError
from zephon_ray.ledger import LedgerLine, WindowUse, differing_fields
from zephon_ray.ledger.segments import Segment, open_record, read_open, seal, unseal

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
