"""Columns: the text column of a Parquet row group or an Arrow record batch, cut into units of rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
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
    file: pq.ParquetFile, column: TextColumn, row_group: int, first_row: int, units: int, *, whole: bool
) -> Generator[RowBlock, None, None]:
    """The units of a row group.

    Only the text column is read.

    Args:
        file: open, with a buffer where the group is to be streamed.
        column: the text column.
        row_group: number of the row group.
        first_row: rows of the file before it.
        units: how many units it has.
        whole: decode the group at once, else batch by batch, so that it is never held whole.
    """
    rows = file.metadata.row_group(row_group).num_rows
    cuts = row_cuts(rows, units)
    columns = [".".join(column.path)]
    if whole:
        batches = iter(file.read_row_group(row_group, columns=columns, use_threads=False).to_batches())
        yield from _given_up_one_by_one(map(column.of, batches), first_row, cuts)
        return
    batch_rows = min(max(-(-rows // units), 1), _BATCH_ROWS)
    batches = file.iter_batches(batch_size=batch_rows, row_groups=[row_group], columns=columns, use_threads=False)
    rest: list[pa.Array] = []
    held = 0
    for unit in range(units):
        wanted = cuts[unit + 1] - cuts[unit]
        while held < wanted:
            batch = next(batches, None)
            if batch is None:
                raise pa.ArrowInvalid(f"row group {row_group} ends before its {rows} rows")
            rest.append(column.of(batch))
            held += len(rest[-1])
        taken, rest = _split(rest, wanted)
        held -= wanted
        yield RowBlock(values=taken, row=first_row + cuts[unit], last=unit == units - 1)


def _given_up_one_by_one(decoded: Iterable[pa.Array], first_row: int, cuts: list[int]) -> Iterator[RowBlock]:
    """Units that were decoded together, copied apart: so the memory of each is free when it was read, and not with the last one."""
    units, arrays = deque[RowBlock](), list(decoded)
    del decoded
    for unit, (first, end) in enumerate(pairwise(cuts)):
        taken, arrays = _split(arrays, end - first)
        values = taken if len(cuts) == 2 else [pa.concat_arrays([array]) for array in taken]
        units.append(RowBlock(values=values, row=first_row + first, last=unit == len(cuts) - 2))
    del taken, values
    while units:
        yield units.popleft()


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
