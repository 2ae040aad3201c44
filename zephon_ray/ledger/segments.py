"""The files that ledger lines lie in, and how damage to them is found.

A *sealed segment*, `GENERATION-FIRST-LAST.jsonl.zst`, never changes: a zstd frame of one canonical JSON line a step, then a
skippable frame (RFC 8878, section 3.1.2: every zstd tool steps over it) with the XXH3-128 of the first frame, so that one
flipped bit anywhere is found. An *open segment*, `GENERATION-FIRST.open`, exists only on local disks: each line is followed by
a tab and its XXH3-128 and is written with one call, so that whatever a crash leaves, its longest sound beginning is known.
What the lines mean together is the business of `reader`, who may write that of `writer`.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from zephon_ray.errors import RunDirectoryError, StorageError
from zephon_ray.hashing import digest128
from zephon_ray.ledger.line import NO_CHAIN, LedgerLine, folds

_SEALED = re.compile(r"(\d{6,})-(\d{12,})-(\d{12,})\.jsonl\.zst")
_OPEN = re.compile(r"(\d{6,})-(\d{12,})\.open")
_CLAIM = re.compile(r"(\d{6,})\.claim")
_SKIPPABLE = struct.pack("<II", 0x184D2A50, 16)
_TRAILER_BYTES = len(_SKIPPABLE) + 16
_LEVEL = 3
_MEND = "Restore this file from a copy of the directory, or start the run anew in an empty directory."


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Segment:
    """A sealed segment: steps `first` to `last` (both included), written by writer `generation`. Ordered by `first`."""

    first: int
    last: int
    generation: int

    @property
    def name(self) -> str:
        return f"{self.generation:06d}-{self.first:012d}-{self.last:012d}.jsonl.zst"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class OpenSegment:
    """An open segment that begins with step `first`, of writer `generation`."""

    first: int
    generation: int

    @property
    def name(self) -> str:
        return f"{self.generation:06d}-{self.first:012d}.open"


def claim_name(generation: int) -> str:
    return f"{generation:06d}.claim"


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """What a ledger's folder holds; files of other names are not ours and are left alone."""

    sealed: tuple[Segment, ...]
    open: tuple[OpenSegment, ...]
    newest_generation: int

    @classmethod
    def of(cls, names: Sequence[str]) -> Listing:
        """The listing of a folder with these file names; `newest_generation` is 0 if there is none."""
        sealed = [Segment(generation=int(m[1]), first=int(m[2]), last=int(m[3])) for m in map(_SEALED.fullmatch, names) if m]
        opened = [OpenSegment(generation=int(m[1]), first=int(m[2])) for m in map(_OPEN.fullmatch, names) if m]
        claims = [int(m[1]) for m in map(_CLAIM.fullmatch, names) if m]
        generations = [*claims, *(segment.generation for segment in sealed), *(segment.generation for segment in opened)]
        return cls(sealed=tuple(sorted(sealed)), open=tuple(sorted(opened)), newest_generation=max(generations, default=0))


def seal(lines: Sequence[bytes]) -> bytes:
    """The bytes of a sealed segment of these lines (canonical JSON, without line ends)."""
    frame: bytes = pa.Codec("zstd", compression_level=_LEVEL).compress(b"".join(line + b"\n" for line in lines), asbytes=True)
    return frame + _SKIPPABLE + digest128(frame)


def unseal(data: bytes, segment: Segment, url: str) -> list[LedgerLine]:
    """The lines of a sealed segment.

    Args:
        data: the file's bytes.
        segment: what its name says.
        url: where it lies, for errors.

    Raises:
        RunDirectoryError: the file is damaged, or not what its name says.
    """
    frame, trailer = data[:-_TRAILER_BYTES], data[-_TRAILER_BYTES:]
    if trailer != _SKIPPABLE + digest128(frame):
        raise RunDirectoryError(f"{url}: the ledger segment is damaged: its {len(data)} bytes do not match its checksum. {_MEND}")
    try:
        text: bytes = pa.CompressedInputStream(pa.BufferReader(frame), "zstd").read()
        lines = [LedgerLine.from_json(line) for line in text.split(b"\n")[:-1]]
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{url}: the ledger segment cannot be read: {error}. {_MEND}") from error
    steps = [line.step for line in lines]
    if steps != list(range(segment.first, segment.last + 1)):
        found = f"{len(steps)} steps ({steps[0]} to {steps[-1]})" if steps else "no step"
        raise RunDirectoryError(
            f"{url}: the ledger segment should hold steps {segment.first} to {segment.last}, but holds {found}. {_MEND}"
        )
    chain = NO_CHAIN if segment.first == 1 else None
    for line in lines:
        if chain is not None and not folds(line, chain):
            raise RunDirectoryError(f"{url}: the chain of step {line.step}, {line.chain}, does not follow from the step before. {_MEND}")
        chain = line.chain
    return lines


def open_record(line: bytes) -> bytes:
    """What is appended to an open segment for one line of canonical JSON."""
    return line + b"\t" + digest128(line).hex().encode() + b"\n"


def read_open(data: bytes, first: int) -> tuple[list[LedgerLine], int]:
    """The longest sound beginning of an open segment: whole, undamaged lines of consecutive steps whose chain folds.

    Args:
        data: the file's bytes, however a crash left them.
        first: the step that it begins with.

    Returns:
        The lines, and how many bytes at the end are not part of them (0 after a clean stop).
    """
    lines: list[LedgerLine] = []
    place = 0
    while (end := data.find(b"\n", place)) >= 0:
        text, _, checksum = data[place:end].rpartition(b"\t")
        if digest128(text).hex().encode() != checksum:
            break
        try:
            line = LedgerLine.from_json(text)
        except ValueError:
            break
        previous = lines[-1].chain if lines else NO_CHAIN if first == 1 else None
        if line.step != first + len(lines) or (previous is not None and not folds(line, previous)):
            break
        lines.append(line)
        place = end + 1
    return lines, len(data) - place


class OpenFile:
    """An open segment that this process appends to. Failed writes leave no half line behind.

    Raises:
        StorageError: (every method) the disk is full, read-only or gone; what was flushed before is safe.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._sound = True
        self._named = False
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._fault("make", error) from error

    def append(self, record: bytes) -> None:
        """Give one record to the operating system: it survives this process, and after `sync` the machine."""
        try:
            written = os.write(self._fd, record)
            while written < len(record):
                written += os.write(self._fd, record[written:])
        except OSError as error:
            with suppress(OSError):  # A half record that stays is found by its checksum.
                os.ftruncate(self._fd, self._size)
            raise self._fault("append to", error) from error
        self._size += len(record)

    def sync(self) -> None:
        """Make everything appended survive the machine."""
        try:
            if not self._sound:  # After a failed fsync the kernel forgets what was not written; the next would lie.
                raise OSError("an earlier sync failed")
            os.fsync(self._fd)
            if not self._named:
                sync_folder(self._path.parent)
                self._named = True
        except OSError as error:
            self._sound = False
            raise self._fault("sync", error) from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _fault(self, verb: str, error: OSError) -> StorageError:
        return StorageError(
            f"{self._path}: cannot {verb} the ledger's open segment: {error.strerror or error}. Mend the disk and run again."
        )


def sync_folder(path: Path) -> None:
    """Make the names in a local folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
