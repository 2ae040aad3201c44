"""A shard that is changed while a reader has it open is refused by name; it never gives other texts than the manifest promises."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.reading import a_source, as_arrow, gz, json_lines, manifest_of, put, zst
from zephon_ray.errors import DataChangedError
from zephon_ray.recipe import Recipe
from zephon_ray.stages.lines import read_range
from zephon_ray.stages.tokenise import UnitTokeniser, make_options
from zephon_ray.stages.unit import TokenisedUnit, UnitTask

UNIT = 1000
MENDED = "changed in place: restore it, or start a new run"


@pytest.fixture
def opened() -> Iterator[Callable[[Recipe], Callable[[int, int], TokenisedUnit]]]:
    """A function that makes units of a recipe by (group, unit), with one reader that keeps open what it opened."""
    tokenisers: list[UnitTokeniser] = []

    def open_source(recipe: Recipe) -> Callable[[int, int], TokenisedUnit]:
        tokenisers.append(UnitTokeniser(make_options(recipe)))
        manifest = manifest_of(recipe)
        return lambda group, unit: tokenisers[-1].tokenise(UnitTask(group=manifest.group(group), epoch=0, unit=unit))

    yield open_source
    for tokeniser in tokenisers:
        tokeniser.close()


Opened = Callable[[Recipe], Callable[[int, int], TokenisedUnit]]

LINES = json_lines([f"document {i} " + "x" * 80 for i in range(100)])
LONG_LINE = json_lines(["short", "y" * 100_000, "after"])


@pytest.mark.parametrize(
    ("data", "left", "group"),
    [
        (LINES, 2000, 5),  # nothing is left of the unit
        (LINES, LINES.index(b"\n", 5500) + 1, 5),  # it ends early, at the end of a line
        (LINES, LINES.index(b"\n", 5500), 5),  # in the midst of a line
        (LINES, 5000, 5),  # with the byte before the unit
        (LINES, len(LINES) - 1, len(LINES) // UNIT),  # the file's last byte
        (LONG_LINE, 50_000, 0),  # in what its last line needs beyond it
    ],
)
def test_a_plain_file_that_is_cut_during_a_run_is_refused_and_never_ends_early(
    tmp_path: Path, opened: Opened, data: bytes, left: int, group: int
) -> None:
    path = put(tmp_path / "a.jsonl", data)
    make = opened(a_source(tmp_path, "a.jsonl", unit_bytes=UNIT))
    make(0, 0)
    os.truncate(path, left)
    said = rf"'web', shard a\.jsonl .*the file has no byte \d+, where the manifest has {len(data)} bytes.*{MENDED}"
    with pytest.raises(DataChangedError, match=said):
        make(group, 0)


def test_bytes_beyond_the_manifests_size_are_not_read(tmp_path: Path, opened: Opened) -> None:
    data = LINES.rstrip(b"\n")
    last = len(data) // UNIT
    wanted, read = read_range(pa.BufferReader(data), len(data), last, UNIT, 1 << 20)
    assert read_range(pa.BufferReader(data + b"more" * 50_000), len(data), last, UNIT, 1 << 20) == (wanted, read)
    assert read == len(data) - last * UNIT + 1
    long = json_lines(["y" * 100_000]).rstrip(b"\n")
    assert read_range(pa.BufferReader(long + b"more" * 50_000), len(long), 0, UNIT, 1 << 20)[0].data == long

    path = put(tmp_path / "a.jsonl", data)
    make = opened(a_source(tmp_path, "a.jsonl", unit_bytes=UNIT))
    before = make(last, 0)
    with path.open("ab") as file:
        file.write(b" and more\n" + LINES)
    assert make(last, 0).to_arrow().equals(before.to_arrow())


@pytest.mark.parametrize("pack", [gz, zst])
@pytest.mark.parametrize("change", ["cut between two members", "longer by a member"])
def test_a_stream_of_other_members_than_the_manifests_is_refused(
    tmp_path: Path, opened: Opened, pack: Callable[[bytes], bytes], change: str
) -> None:
    name = f"a.jsonl.{pack.__name__}"
    first = json_lines([os.urandom(40).hex() for _ in range(4000)])  # far more than is read ahead
    data = pack(first) + pack(LINES)
    path = put(tmp_path / name, data)
    make = opened(a_source(tmp_path, name, unit_bytes=UNIT))
    make(0, 0)
    if change == "longer by a member":
        path.write_bytes(data + pack(LINES))
    else:
        os.truncate(path, len(pack(first)))
    with pytest.raises(DataChangedError, match=rf"'web', shard {name}: .*where the manifest has {len(data)}.*{MENDED}"):
        collections.deque((make(0, unit) for unit in range(1, (len(first) + 2 * len(LINES)) // UNIT)), maxlen=0)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_mapped_file_that_is_cut_during_a_run_is_refused_instead_of_ending_the_process(
    tmp_path: Path, opened: Opened, compression: str | None
) -> None:
    batch = pa.record_batch({"text": [os.urandom(500).hex() for _ in range(1000)]})
    path = put(tmp_path / "a.arrow", as_arrow(batch, compression=compression))
    size = path.stat().st_size
    make = opened(a_source(tmp_path, "a.arrow", unit_bytes=100_000))
    make(0, 0)
    os.truncate(path, 4096)
    with pytest.raises(DataChangedError, match=rf"shard a\.arrow .*: 4096 bytes where the manifest has {size}.*{MENDED}"):
        make(0, 8)
