"""Reading: the texts of any unit of any group, with shards kept open and streams kept going between units.

A reader belongs to one worker. What it gives depends on the task alone; what it keeps only saves work.
"""

from __future__ import annotations

import os
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
from zephon_ray.stages.open_files import has_room
from zephon_ray.stages.record_batches import is_compressed
from zephon_ray.stages.texts import BadUnitError, LeftOut, Texts, UnitTexts
from zephon_ray.stages.unit import UnitTask
from zephon_ray.storage import Storage

MAX_STREAMS = 1024
"""Streams that a reader keeps going unless it is told a number."""
MAX_FILES = 32
"""Files without a stream, and footers, that a reader keeps."""
MOST_BUFFER, LEAST_BUFFER = 1 << 20, 1 << 16
"""Bytes that a stream asks the store for at a time, and holds: as many as its share of `BUFFERS`, within these limits.

Besides, a compressed stream holds pyarrow's buffers of 1.06 MiB, its decoder's window, and what was decoded beyond a unit, up to 256 KiB:
together 1.6 MB for gzip and 2.5 MB for zstd at its usual levels. One of Parquet holds a page and up to a unit, or of a small row group
the units that were not read yet; one of a mapped record batch that is not compressed holds nothing, and of another the whole text column.
"""
SMALL_BYTES = 8 << 20
"""A row group whose text has so many bytes, as encoded, is decoded at once; but not more than twice as many of it, since a dictionary may
stand for any number."""
BUFFERS = 64 << 20
"""Bytes that the streams of a reader share for their buffers. Each takes its share when it is opened, so n streams, 64 < n <= 1024, that
were opened one after the other hold at most `BUFFERS * (1 + ln(n / 64))`: 167 MiB for 320."""

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
        max_streams: how many streams are kept going. Beyond that, and where the system allows no more open files, the one that rested
            longest is closed; if needed it is decoded again from its start, which for streams that take turns means for every unit.
    """

    def __init__(self, storage: Storage, max_bytes: int, fail: bool, max_streams: int = MAX_STREAMS) -> None:
        self._storage, self._max_bytes, self._fail, self._max_streams = storage, max_bytes, fail, max_streams
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
                    texts = Texts.of(texts_of_lines(block, group.text_field, self._max_bytes, left_out))
            except BadUnitError as error:
                return UnitTexts(texts=Texts.of([]), last=block.last, left_out=left_out, error=str(error))
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
            if len(self._streams) > self._max_streams:
                self._close_oldest()
        return block

    def _close_oldest(self) -> None:
        """Close the stream that rested longest."""
        self._streams.popitem(last=False)[1].close()

    @property
    def _buffer(self) -> int:
        """Bytes that a stream which is opened now asks the store for at a time."""
        return max(LEAST_BUFFER, min(MOST_BUFFER, BUFFERS // (len(self._streams) + 1)))

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
        file = self._open(group.shard, read_ahead=self._buffer)
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
            if position > group.shard.size or (not data and position < group.shard.size):
                # Cut between two members, or longer by one: no decoder would mind.
                raise DataChangedError(
                    f"{group.where}: {position} bytes were read when the stream {'went on' if data else 'ended'}, where the manifest has"
                    f" {group.shard.size}. {_CHANGED}"
                )
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
        # A chunk is fetched whole where the group is one unit anyway, or small, else page by page. And a small one is decoded at once:
        # writers cut pages at every thousand rows, so that one page is all of it, and a decoder within it holds all twice.
        small = (group.text_size or 0) <= SMALL_BYTES
        parquet = pq.ParquetFile(
            file,
            metadata=metadata,
            pre_buffer=False,  # it reads in another thread, which is dearer, and a chunk is one range anyway
            buffer_size=0 if units == 1 or small else self._buffer,
            page_checksum_verification=True,
        )
        self.counters.bytes_read += metadata.row_group(group.ordinal).column(column.leaf).total_compressed_size
        ahead = 2 * SMALL_BYTES if small and units > 1 else 0
        blocks = parquet_units(parquet, column, group.ordinal, footer.first_rows[group.ordinal], units, ahead_bytes=ahead)

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
        reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(use_threads=False))
        column = locate(reader.schema, group.text_field, group.where)
        if reader.num_record_batches != group.shard_groups:
            raise DataChangedError(
                f"{group.where}: {reader.num_record_batches} record batches where the manifest has {group.shard_groups}. {_CHANGED}"
            )
        mapped = self._storage.is_local(group.shard.url)
        if not mapped or is_compressed(file, group.ordinal):
            # To read one column of a batch pyarrow copies it, which is less than to fetch or decompress the others. A mapped batch
            # that is not compressed is better taken whole: then nothing is read before its values are.
            options = pa.ipc.IpcReadOptions(included_fields=[column.index], use_threads=False)
            reader = pa.ipc.open_file(file, options=options)
        values = column.of(reader.get_batch(group.ordinal))
        self.counters.bytes_read += values.nbytes
        blocks = arrow_units(values, group.unit_bytes, group.ordinal)

        def take() -> RowBlock:
            if mapped:
                # A mapped page that the file has no longer would end the process with SIGBUS. Only a cut in the midst of a unit still does.
                _check_size(group.shard, os.fstat(file.fileno()).st_size)
            return next(blocks)

        return _Stream(take=take, close=file.close)

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
        try:
            _check_size(shard, file.size())
        except DataChangedError:
            file.close()
            raise
        if self._storage.is_local(shard.url) and not has_room(file.fileno()) and self._streams:
            self._max_streams = len(self._streams)
            self._close_oldest()
        return file


def _check_size(shard: ShardFile, size: int) -> None:
    """Refuse a file of another size, in bytes, than the manifest's."""
    if size != shard.size:
        raise DataChangedError(f"shard {shard.path} ({shard.url}): {size} bytes where the manifest has {shard.size}. {_CHANGED}")


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
    except EOFError as error:
        where = f"{group.where} ({group.shard.url})"
        raise DataChangedError(f"{where}: {error}, where the manifest has {group.shard.size} bytes. {_CHANGED}") from error
    except FileNotFoundError as error:
        raise SourceError(f"{group.where}: the file is gone ({group.shard.url}). Restore it.") from error
    except (OSError, pa.ArrowException) as error:
        raise SourceError(
            f"{group.where}: group {group.group}, unit {unit} cannot be read: {error}. Write or copy the file again."
        ) from error
