"""An entry: one tokenised unit as the bytes of a file.

    magic (8 bytes) | written: seconds since 1970, int64 little-endian | xxh3_128 of name, written and body (16 bytes) | body

The body is an Arrow IPC stream of one row in `stages.unit.SCHEMA`, its buffers compressed by zstd. What belongs to a run and not to the
text (source, epoch, group, and the source's name before each bad record) is left out, and put in again for the run that reads it.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import pyarrow as pa

from zephon_ray.hashing import digest128
from zephon_ray.plan.windows import UnitTask
from zephon_ray.stages.unit import SCHEMA, TokenisedUnit

LEVEL = 1
"""Of zstd: 3 saves a twentieth of the size and takes twice the time. To decompress takes the same."""

_MAGIC = b"ZRTOKEN1"
_HEAD = struct.Struct("<8sq16s")


class BadEntryError(Exception):
    """The bytes are no entry of that name, or are cut or damaged. It never leaves the cache: the unit is tokenised again."""


def pack(name: str, unit: TokenisedUnit, task: UnitTask, written_s: int) -> bytes | None:
    """A unit as the bytes of an entry.

    Args:
        name: of the entry.
        unit: without an error.
        task: what it was made from.
        written_s: seconds since 1970.

    Returns:
        None where a bad record is described in a way that names the source elsewhere than at its beginning.
    """
    where = task.group.where
    if not all(example.startswith(where) for example in unit.bad_examples):
        return None
    examples = tuple(example.removeprefix(where) for example in unit.bad_examples)
    plain = replace(unit, source=0, epoch=0, group=0, bad_examples=examples)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=LEVEL), use_threads=False)
    with pa.ipc.new_stream(sink, SCHEMA, options=options) as writer:
        writer.write_batch(plain.to_arrow())
    return _sealed(name, written_s, sink.getvalue())


def _sealed(name: str, written_s: int, body: pa.Buffer | memoryview) -> bytes:
    return _HEAD.pack(_MAGIC, written_s, _digest(name, written_s, body)) + memoryview(body)


def _digest(name: str, written_s: int, body: pa.Buffer | memoryview) -> bytes:
    return digest128(f"{name} {written_s} ".encode() + digest128(memoryview(body)))


def written_at(data: bytes) -> int:
    """When an entry was written, in seconds since 1970."""
    return int(_HEAD.unpack_from(data)[1])


def unpack(name: str, data: bytes, task: UnitTask) -> TokenisedUnit:
    """The unit of an entry, as a task's; ids and offsets are read-only.

    Raises:
        BadEntryError: cut, damaged, or of another name.
    """
    if len(data) < _HEAD.size:
        raise BadEntryError(f"{len(data)} bytes")
    magic, written_s, digest = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    if magic != _MAGIC or digest != _digest(name, written_s, body):
        raise BadEntryError("its checksum does not fit")
    try:
        stream = pa.ipc.open_stream(pa.py_buffer(body), options=pa.ipc.IpcReadOptions(use_threads=False))
        unit = TokenisedUnit.from_arrow(stream.read_next_batch())
    except (pa.ArrowException, StopIteration, KeyError, ValueError) as error:
        raise BadEntryError(str(error)) from error
    where = task.group.where
    source, epoch, group, number = task.key
    examples = tuple(where + example for example in unit.bad_examples)
    return replace(unit, source=source, epoch=epoch, group=group, unit=number, bad_examples=examples)


def rewritten(name: str, data: bytes, written_s: int) -> bytes:
    """A sound entry as if it were written at another time."""
    return _sealed(name, written_s, memoryview(data)[_HEAD.size :])
