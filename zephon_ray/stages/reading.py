"""Reading: the texts of any unit of any group, with shards kept open and streams kept going between units.

A reader belongs to one worker. What it gives depends on the task alone; what it keeps only saves work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq

from zephon_ray.errors import DataChangedError, SourceError
from zephon_ray.manifest import Group, ShardFile
from zephon_ray.manifest.text_column import TextColumn, locate
from zephon_ray.stages.columns import RowBlock, arrow_units, parquet_units, texts_of_rows, value_sizes
from zephon_ray.stages.json_lines import texts_of_lines
from zephon_ray.stages.lines import LineBlock, LineStream, read_range
from zephon_ray.stages.texts import BadUnitError, LeftOut, UnitTexts
from zephon_ray.stages.unit import UnitTask
from zephon_ray.storage import Storage

MAX_STREAMS = 64
"""Streams that a reader keeps going; beyond that the one that rested longest is closed, and decoded again from its start if needed."""
MAX_FILES = 32
"""Files without a stream, and footers, that a reader keeps."""
STREAM_BUFFER = 1 << 20
"""Bytes that a stream asks the store for at a time."""

_CHANGED = "The shard was changed in place: restore it, or start a new run."

Block = LineBlock | RowBlock


@dataclass(slots=True)
class ReadCounters:
    """What a reader did.

    Args:
        bytes_read: stored bytes read of JSON lines; for columns, bytes of the text column as stored.
        skipped_bytes: bytes that were decoded on the way to a unit in the middle of a group, but not parsed.
    """

    bytes_read: int = 0
    skipped_bytes: int = 0


@dataclass(kw_only=True, slots=True)
class _Stream:
    """A group that is being read in order."""

    take: Callable[[], Block]
    close: Callable[[], None]
    next_unit: int = 0
    ended: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Footer:
    """What a Parquet file's footer says: its metadata, where the text is, and for each row group how many rows lie before it."""

    metadata: pq.FileMetaData
    column: TextColumn
    first_rows: list[int]


class UnitReader:
    """Reads units, in any order, best in the order of their groups.

    Args:
        storage: where the shards lie.
        max_bytes: longest record (a line, or a column's value).
        fail: the first bad record ends its unit.
    """

    def __init__(self, storage: Storage, max_bytes: int, fail: bool) -> None:
        self._storage, self._max_bytes, self._fail = storage, max_bytes, fail
        self._streams: OrderedDict[tuple[int, int, int], _Stream] = OrderedDict()
        self._files: OrderedDict[str, pa.NativeFile] = OrderedDict()
        self._footers: OrderedDict[str, _Footer] = OrderedDict()
        self.counters = ReadCounters()

    def read(self, task: UnitTask) -> UnitTexts:
        """The texts of a unit.

        Raises:
            SourceError: the shard is gone, cut or damaged.
            DataChangedError: the shard is not what the manifest says.
            StorageError: the store goes on failing.
        """
        group = task.group
        left_out = LeftOut(where=group.where, fail=self._fail)
        with _faults(group, task.unit):
            block = self._block(task)
            try:
                if isinstance(block, RowBlock):
                    texts = texts_of_rows(block, self._max_bytes, left_out)
                else:
                    texts = texts_of_lines(block, group.text_field, self._max_bytes, left_out)
            except BadUnitError as error:
                return UnitTexts(texts=(), last=block.last, left_out=left_out, error=str(error))
        return UnitTexts(texts=texts, last=block.last, left_out=left_out)

    def close(self) -> None:
        """Close everything that is kept open. The reader can go on afterwards."""
        while self._streams:
            self._streams.popitem()[1].close()
        while self._files:
            self._files.popitem()[1].close()
        self._footers.clear()

    def _block(self, task: UnitTask) -> Block:
        group = task.group
        if group.shard.format == "jsonl" and group.shard.compression is None:
            lines, read = read_range(self._file(group.shard), group.shard.size, group.ordinal, group.unit_bytes, self._max_bytes)
            self.counters.bytes_read += read
            return lines
        key = group.source, task.epoch, group.group
        stream = self._streams.pop(key, None)
        if stream is not None and stream.next_unit > task.unit:
            stream.close()
            stream = None
        stream = stream or self._open_stream(group)
        try:
            block = self._advance(stream, task)
        except BaseException:
            stream.close()
            raise
        if stream.ended:
            stream.close()
        else:
            self._streams[key] = stream
            if len(self._streams) > MAX_STREAMS:
                self._streams.popitem(last=False)[1].close()
        return block

    def _advance(self, stream: _Stream, task: UnitTask) -> Block:
        """The unit of a stream that the task names; those before it are passed over."""
        while not stream.ended:
            block = stream.take()
            stream.next_unit += 1
            stream.ended = block.last
            if stream.next_unit > task.unit:
                return block
            self.counters.skipped_bytes += (
                block.size if isinstance(block, LineBlock) else sum(int(value_sizes(values).sum()) for values in block.values)
            )
        raise DataChangedError(
            f"{task.group.where}: unit {task.unit} of group {task.group.group} is needed, but the group ends after {stream.next_unit}."
            f" {_CHANGED}"
        )

    def _open_stream(self, group: Group) -> _Stream:
        if group.shard.format == "jsonl":
            return self._open_lines(group)
        if group.shard.format == "parquet":
            return self._open_row_group(group)
        return self._open_record_batch(group)

    def _open_lines(self, group: Group) -> _Stream:
        file = self._open(group.shard, read_ahead=STREAM_BUFFER)
        compressed = pa.CompressedInputStream(file, "gzip" if group.shard.compression == "gz" else "zstd")
        at, stored = 0, 0

        def read(size: int) -> bytes:
            nonlocal at, stored
            try:
                data = bytes(compressed.read(size))
                position = file.tell()
            except (OSError, pa.ArrowException) as error:
                raise SourceError(
                    f"{group.where}: the {group.shard.compression} stream is cut or damaged after {at} decompressed bytes "
                    f"(of {group.shard.size} stored bytes, {stored} were read before): {error}. Write or copy the file again."
                ) from error
            at += len(data)
            self.counters.bytes_read += position - stored
            stored = position
            return data

        def close() -> None:
            compressed.close()
            file.close()

        return _Stream(take=LineStream(read, group.unit_bytes, self._max_bytes).take, close=close)

    def _open_row_group(self, group: Group) -> _Stream:
        file = self._open(group.shard)
        units = group.units or 1
        footer = self._footer(file, group)
        metadata, column = footer.metadata, footer.column
        _check_row_group(metadata, column, group)
        # A chunk is fetched whole where the group is one unit anyway, else page by page: pre_buffer would hold all of it.
        whole = units == 1
        parquet = pq.ParquetFile(
            file,
            metadata=metadata,
            pre_buffer=whole,
            buffer_size=0 if whole else STREAM_BUFFER,
            page_checksum_verification=True,
        )
        self.counters.bytes_read += metadata.row_group(group.ordinal).column(column.leaf).total_compressed_size
        blocks = parquet_units(parquet, column, group.ordinal, footer.first_rows[group.ordinal], units)

        def close() -> None:
            blocks.close()
            parquet.close()
            file.close()

        return _Stream(take=lambda: next(blocks), close=close)

    def _footer(self, file: pa.NativeFile, group: Group) -> _Footer:
        """The footer of a file, read once and kept for its other row groups."""
        footer = self._footers.pop(group.shard.url, None)
        if footer is None:
            opened = pq.ParquetFile(file)
            metadata, column = opened.metadata, locate(opened.schema_arrow, group.text_field, group.where)
            rows = (metadata.row_group(g).num_rows for g in range(metadata.num_row_groups))
            footer = _Footer(metadata=metadata, column=column, first_rows=list(accumulate(rows, initial=0)))
        self._footers[group.shard.url] = footer
        if len(self._footers) > MAX_FILES:
            self._footers.popitem(last=False)
        return footer

    def _open_record_batch(self, group: Group) -> _Stream:
        file = self._open(group.shard, mapped=True)
        column = locate(pa.ipc.open_file(file).schema, group.text_field, group.where)
        options = pa.ipc.IpcReadOptions(included_fields=[column.index], use_threads=False)
        reader = pa.ipc.open_file(file, options=options)
        if reader.num_record_batches != group.shard_groups:
            raise DataChangedError(
                f"{group.where}: {reader.num_record_batches} record batches where the manifest has {group.shard_groups}. {_CHANGED}"
            )
        values = column.of(reader.get_batch(group.ordinal))
        self.counters.bytes_read += values.nbytes
        blocks = arrow_units(values, group.unit_bytes, group.ordinal)
        return _Stream(take=lambda: next(blocks), close=file.close)

    def _file(self, shard: ShardFile) -> pa.NativeFile:
        """A file that stays open for the next range."""
        file = self._files.pop(shard.url, None)
        if file is None:
            file = self._open(shard)
        self._files[shard.url] = file
        if len(self._files) > MAX_FILES:
            self._files.popitem(last=False)[1].close()
        return file

    def _open(self, shard: ShardFile, *, read_ahead: int = 0, mapped: bool = False) -> pa.NativeFile:
        file = self._storage.open_input(shard.url, read_ahead=read_ahead, mapped=mapped)
        size = file.size()
        if size != shard.size:
            file.close()
            raise DataChangedError(f"shard {shard.path} ({shard.url}): {size} bytes where the manifest has {shard.size}. {_CHANGED}")
        return file


def _check_row_group(metadata: pq.FileMetaData, column: TextColumn, group: Group) -> None:
    """Refuse a row group that is not the manifest's. Those beside it are looked at when they are read themselves."""
    count = metadata.num_row_groups
    if count != group.shard_groups:
        raise DataChangedError(f"{group.where}: {count} row groups where the manifest has {group.shard_groups}. {_CHANGED}")
    found = metadata.row_group(group.ordinal)
    rows, size = found.num_rows, found.column(column.leaf).total_uncompressed_size
    if (rows, size) != (group.rows, group.text_size):
        raise DataChangedError(
            f"{group.where}: its row group {group.ordinal} has {rows} rows and {size} bytes of text where the manifest has {group.rows}"
            f" and {group.text_size}. {_CHANGED}"
        )


@contextmanager
def _faults(group: Group, unit: int) -> Iterator[None]:
    """Give what Arrow and the disk say the name of the shard."""
    try:
        yield
    except FileNotFoundError as error:
        raise SourceError(f"{group.where}: the file is gone ({group.shard.url}). Restore it.") from error
    except (OSError, pa.ArrowException) as error:
        raise SourceError(
            f"{group.where}: group {group.group}, unit {unit} cannot be read: {error}. Write or copy the file again."
        ) from error
