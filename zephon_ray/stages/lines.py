"""Lines: the bytes of a JSON lines file cut into units, each line in the unit in which its first byte lies.

Plain files are read range by range, compressed ones as one stream of all their members. At most a unit and its last line are held; a
line beyond the limit is passed over without being held. What a line says is no concern of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

BOM = b"\xef\xbb\xbf"
BLANKS = b" \t\r"
MOST_BLOCK, LEAST_BLOCK = 1 << 18, 1 << 12
"""Bytes that are read at a time: as many as a unit has, within these limits."""

Read = Callable[[int], bytes]
"""Gives at most that many of the next bytes; none at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineBlock:
    r"""The lines of one unit.

    Args:
        data: whole lines end to end; the last one perhaps without its `\n`. A byte order mark is still there.
        offset: place of `data` in the (decompressed) file.
        line: number of its first line, from 1; None where that is not known.
        too_long: a last line, longer than the limit, follows `data` but is not in it.
        last: no line follows the unit.
        size: bytes of the unit, with the line that is too long.
    """

    data: bytes
    offset: int
    line: int | None
    too_long: bool
    last: bool
    size: int


def read_range(file: pa.NativeFile, size: int, ordinal: int, unit_bytes: int, max_line: int) -> tuple[LineBlock, int]:
    """The lines that begin in the byte range `[ordinal * unit_bytes, (ordinal + 1) * unit_bytes)` of a plain file.

    Reads the range, the byte before it, and what its last line needs beyond it (with a little slack, which saves a second request).

    Args:
        file: the file, open.
        size: its size in bytes, as the manifest has it; nothing beyond is read.
        ordinal: number of the range.
        unit_bytes: size of a range, >= 1.
        max_line: longest line that is held, in bytes.

    Returns:
        (the lines, number of bytes read)

    Raises:
        EOFError: the file is shorter than `size`, and a byte that it lacks is needed.
    """
    first, end = ordinal * unit_bytes, min((ordinal + 1) * unit_bytes, size)
    begin = max(first - 1, 0)
    slack = min(max(unit_bytes >> 4, LEAST_BLOCK), MOST_BLOCK)
    at = begin

    def read(wanted: int) -> bytes:
        nonlocal at
        wanted = min(wanted, size - at)
        block = bytes(file.read_at(wanted, at)) if wanted else b""
        at += len(block)
        if len(block) < wanted:  # the file was cut after it was opened; to go on would make another unit of it
            raise EOFError(f"the file has no byte {at}")
        return block

    def more() -> bytes:
        nonlocal slack
        block = read(slack)
        slack = min(slack * 2, MOST_BLOCK)
        return block

    head = read(end - begin + slack)
    start = 0 if ordinal == 0 else head.find(b"\n", 0, max(end - 1 - begin, 0)) + 1
    if ordinal > 0 and start == 0:
        return LineBlock(data=b"", offset=first, line=None, too_long=False, last=True, size=0), at - begin
    cut = _cut(head[start:], begin + start, end, more, max_line, to_its_end=False)
    line = 1 if ordinal == 0 else None
    return LineBlock(data=cut.data, offset=begin + start, line=line, too_long=cut.too_long, last=True, size=cut.size), at - begin


class LineStream:
    """The units of a compressed file, one after the other.

    Args:
        read: gives the decompressed bytes.
        unit_bytes: size of a unit in decompressed bytes, >= 1.
        max_line: longest line that is held, in bytes.
    """

    def __init__(self, read: Read, unit_bytes: int, max_line: int) -> None:
        self._unit_bytes, self._max_line = unit_bytes, max_line
        self._read = partial(read, min(max(unit_bytes, LEAST_BLOCK), MOST_BLOCK))
        self._rest = b""  # begins with the next line, and is not empty unless nothing was read or nothing is left
        self._start, self._line = 0, 1
        self.next_unit = 0
        self.ended = False

    def take(self) -> LineBlock:
        """The next unit. There must be one: `ended` is not set."""
        limit = (self.next_unit + 1) * self._unit_bytes
        self.next_unit += 1
        start, line = self._start, self._line
        if start >= limit:  # a line that began in an earlier unit fills this one
            return LineBlock(data=b"", offset=start, line=line, too_long=False, last=False, size=0)
        cut = _cut(self._fill(limit - start), start, limit, self._read, self._max_line, to_its_end=True)
        self._start += cut.size
        self._line += cut.data.count(b"\n") + cut.dropped
        self._rest = cut.rest or self._read()
        self.ended = not self._rest
        return LineBlock(data=cut.data, offset=start, line=line, too_long=cut.too_long, last=self.ended, size=cut.size)

    def _fill(self, size: int) -> bytes:
        """The bytes that are at hand, with as many more as make up `size` if there are so many."""
        parts = [self._rest]
        held = len(self._rest)
        while held < size and (block := self._read()):
            parts.append(block)
            held += len(block)
        return b"".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """What `_cut` gives: the lines, what was read beyond them, and what became of a last line that is too long."""

    data: bytes
    rest: bytes
    size: int
    dropped: bool = False
    too_long: bool = False


def _cut(buffer: bytes, start: int, limit: int, read: Callable[[], bytes], max_line: int, *, to_its_end: bool) -> _Cut:
    """Cut a buffer after the line that holds the byte before `limit`, reading on to the end of that line.

    Args:
        buffer: begins at the start of a line, and reaches to `limit` unless the file ends before it.
        start: place of the buffer in the file.
        limit: place in the file, above `start` unless the file is empty.
        read: gives what follows the buffer.
        max_line: a last line that is longer and not whole in the buffer is not held.
        to_its_end: read such a line to its end all the same.
    """
    at = buffer.find(b"\n", max(limit - 1 - start, 0))
    if at >= 0:
        return _Cut(data=buffer[: at + 1], rest=buffer[at + 1 :], size=at + 1)
    if len(buffer) < limit - start:
        return _Cut(data=buffer, rest=b"", size=len(buffer))
    line_at = buffer.rfind(b"\n") + 1
    mark = len(BOM) if start == line_at == 0 and buffer.startswith(BOM) else 0
    length = len(buffer) - line_at - mark
    blank = not buffer[line_at + mark :].strip(BLANKS)  # a line of blanks is no record, however long it is
    parts, size, rest, dropped = [buffer], len(buffer), b"", False
    while at < 0 and (to_its_end or length <= max_line or blank) and (block := read()):
        at = block.find(b"\n")
        piece, rest = (block, b"") if at < 0 else (block[: at + 1], block[at + 1 :])
        size += len(piece)
        length += len(piece) - (at >= 0)
        blank = blank and not piece.strip(BLANKS + b"\n")
        if dropped or length > max_line:
            parts, dropped = [buffer[:line_at]] if not dropped else parts, True
        else:
            parts.append(piece)
    return _Cut(data=b"".join(parts), rest=rest, size=size, dropped=dropped, too_long=dropped and not blank)
