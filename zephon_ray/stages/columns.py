"""Columns: the text column of a Parquet row group or an Arrow record batch, cut into units of rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zephon_ray.manifest.shards import units_of
from zephon_ray.manifest.text_column import TextColumn
from zephon_ray.stages.arrow_arrays import large_strings, mask, numbers, valid
from zephon_ray.stages.texts import LeftOut, Texts

_BATCH_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlock:
    """The rows of one unit.

    Args:
        values: the column's values there: text or bytes in any of Arrow's layouts, dictionary or null.
        within: what rows are counted from, for messages: nothing for the shard, or "record batch 3, ".
        row: number of the first one, from 0.
        last: the unit is the group's last.
    """

    values: list[pa.Array]
    within: str = ""
    row: int
    last: bool


def row_cuts(rows: int, units: int) -> list[int]:
    """Where the units of a group begin, and where the last one ends: `units + 1` row numbers."""
    return [unit * rows // units for unit in range(units + 1)]


def parquet_units(
    file: pq.ParquetFile, column: TextColumn, row_group: int, first_row: int, units: int, *, ahead_bytes: int = 0
) -> Generator[RowBlock, None, None]:
    """The units of a row group.

    Only the text column is read.

    Args:
        file: open, with a buffer where the group is to be streamed.
        column: the text column.
        row_group: number of the row group.
        first_row: rows of the file before it.
        units: how many units it has.
        ahead_bytes: so much is decoded when the first unit is taken, beside that; else the group is decoded unit by unit.
    """
    rows = file.metadata.row_group(row_group).num_rows
    batch_rows = min(max(-(-rows // units), 1), _BATCH_ROWS)
    batches = file.iter_batches(batch_size=batch_rows, row_groups=[row_group], columns=[".".join(column.path)], use_threads=False)
    found = _units(map(column.of, batches), row_group, first_row, row_cuts(rows, units))
    return _ahead(found, ahead_bytes) if ahead_bytes else found


def _units(arrays: Iterator[pa.Array], row_group: int, first_row: int, cuts: list[int]) -> Generator[RowBlock, None, None]:
    """Values that come in any pieces, cut."""
    rest: list[pa.Array] = []
    held = 0
    for unit, (first, end) in enumerate(pairwise(cuts)):
        while held < end - first:
            array = next(arrays, None)
            if array is None:
                raise pa.ArrowInvalid(f"row group {row_group} ends before its {cuts[-1]} rows")
            rest.append(array)
            held += len(array)
        taken, rest = _split(rest, end - first)
        held -= end - first
        yield RowBlock(values=taken, row=first_row + first, last=unit == len(cuts) - 2)


def _ahead(units: Iterator[RowBlock], size: int) -> Generator[RowBlock, None, None]:
    """The same, decoded before the first is taken until they hold `size` bytes. Each has memory of its own, which is free when it was
    read; that of the decoder is when it has come to its end. A fault is raised where it is, not where it was found.
    """
    held, fault = deque[RowBlock](), None
    try:
        for unit in units:
            values = [array.cast(pa.large_binary()) for array in unit.values]
            values = [pa.concat_arrays(values)] if values else []
            held.append(replace(unit, values=values))
            size -= sum(array.nbytes for array in values)
            if size <= 0:
                break
    except (OSError, pa.ArrowException) as error:
        fault = error
    unit, values = RowBlock(values=[], row=0, last=False), []  # they hold the last one's memory
    while held:
        yield held.popleft()
    if fault is not None:
        raise fault
    yield from units


def _split(arrays: list[pa.Array], rows: int) -> tuple[list[pa.Array], list[pa.Array]]:
    """The first `rows` values of some arrays, and the others."""
    taken: list[pa.Array] = []
    for i, array in enumerate(arrays):
        if len(array) > rows:
            return [*taken, array.slice(0, rows)], [array.slice(rows), *arrays[i + 1 :]]
        taken.append(array)
        rows -= len(array)
    return taken, []


def arrow_units(values: pa.Array, unit_bytes: int, ordinal: int) -> Iterator[RowBlock]:
    """The units of a record batch.

    Args:
        values: its text column.
        unit_bytes: size of a unit, >= 1.
        ordinal: number of the record batch. How many rows lie before it is known only when those batches are read.
    """
    units = units_of(int(value_sizes(values).sum()), unit_bytes)
    cuts = row_cuts(len(values), units)
    for unit in range(units):
        rows = values.slice(cuts[unit], cuts[unit + 1] - cuts[unit])
        yield RowBlock(values=[rows], within=f"record batch {ordinal}, ", row=cuts[unit], last=unit == units - 1)


def value_sizes(values: pa.Array) -> npt.NDArray[np.int64]:
    """Bytes of each value, 0 for null, without making the values: int64 [rows]."""
    kind = values.type
    if pa.types.is_null(kind):
        return np.zeros(len(values), np.int64)
    if pa.types.is_dictionary(kind):
        words = value_sizes(values.dictionary)
        indices = _numbers_or_0(values.indices.cast(pa.int64()))
        return np.where(valid(values), words[indices], 0) if len(words) else np.zeros(len(values), np.int64)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        # A view is 16 bytes, of which the first four are the length; pyarrow has no kernel for it.
        views = np.frombuffer(values.buffers()[1], "<i4").reshape(-1, 4) if len(values) else np.zeros((0, 4), np.int32)
        sizes = views[values.offset : values.offset + len(values), 0].astype(np.int64)
        return np.where(valid(values), sizes, 0)
    return _numbers_or_0(pc.binary_length(values).cast(pa.int64()))


def _numbers_or_0(array: pa.Int64Array) -> npt.NDArray[np.int64]:
    """0 for null, under which anything may lie."""
    return np.where(valid(array), numbers(array, np.int64), 0) if array.null_count else numbers(array, np.int64)


def texts_of_rows(block: RowBlock, max_bytes: int, left_out: LeftOut) -> Texts:
    """The texts of a unit's rows, in file order.

    Args:
        block: the rows.
        max_bytes: longest value; a longer one is a bad record.
        left_out: takes what is left out.

    Raises:
        BadUnitError: a bad record, where `left_out` says that it ends the unit.
    """
    texts: list[pa.LargeStringArray] = []
    at = 0
    for values in block.values:
        raw = values.cast(pa.large_binary())
        sizes = _lengths(raw)
        strings = _checked(raw) if not len(sizes) or sizes.max() <= max_bytes else None
        if strings is None:
            texts.append(_with_care(raw, sizes, block, at, max_bytes, left_out))
        else:
            empty = int(np.count_nonzero(sizes == 0))
            left_out.empty += empty
            texts.append(strings.filter(mask(sizes > 0)) if empty else strings)
        at += len(values)
    return Texts.join(texts)


def _lengths(raw: pa.LargeBinaryArray) -> npt.NDArray[np.int64]:
    """Bytes of each value, 0 for null: int64 [rows]."""
    if not len(raw):
        return np.zeros(0, np.int64)
    offsets = np.frombuffer(raw.buffers()[1], np.int64)[raw.offset : raw.offset + len(raw) + 1]
    sizes = offsets[1:] - offsets[:-1]
    # What lies under a null counts for nothing.
    return np.where(valid(raw), sizes, 0) if raw.null_count else sizes


def _checked(raw: pa.LargeBinaryArray) -> pa.LargeStringArray | None:
    """The same values as text, not copied; None where one is not valid UTF-8."""
    try:
        return raw.cast(pa.large_string())
    except pa.ArrowInvalid:
        return None


def _with_care(
    raw: pa.LargeBinaryArray, sizes: npt.NDArray[np.int64], block: RowBlock, at: int, max_bytes: int, left_out: LeftOut
) -> pa.LargeStringArray:
    """The same value by value, where one of them is bad; `at` values of the block lie before them."""
    texts: list[str] = []
    for i, size in enumerate(sizes.tolist()):
        place = f"{block.within}row {block.row + at + i}"
        if size > max_bytes:
            left_out.bad_record(place, f"{size} bytes, longer than max_document_bytes={max_bytes}")
            continue
        value = raw[i].as_py()
        if not value:
            left_out.empty += 1
            continue
        try:
            texts.append(value.decode())
        except UnicodeDecodeError as error:
            left_out.bad_record(place, f"not valid UTF-8: byte 0x{value[error.start]:02x} at {error.start} of the value")
    return large_strings(texts)
