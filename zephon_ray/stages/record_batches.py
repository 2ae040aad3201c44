"""Record batches: what the metadata of an Arrow IPC file says of one and pyarrow does not tell.

A few fields of two FlatBuffers tables. Source: `File.fbs`, `Message.fbs` of https://github.com/apache/arrow/tree/main/format, and
https://flatbuffers.dev/internals for how a table is laid out.
"""

from __future__ import annotations

import struct

import pyarrow as pa

_TAIL = struct.Struct("<i6s")  # bytes of the footer, and the magic word
_BLOCK = struct.Struct("<qi4xq")  # of a record batch: its place, bytes of its metadata, bytes of its body
_CONTINUATION = b"\xff\xff\xff\xff"
_FOOTER_RECORD_BATCHES, _MESSAGE_HEADER, _RECORD_BATCH_COMPRESSION = 3, 2, 3


def is_compressed(file: pa.NativeFile, ordinal: int) -> bool:
    """Whether the buffers of a record batch are compressed.

    Args:
        file: an Arrow IPC file, which pyarrow has opened.
        ordinal: number of the record batch; it must exist.

    Raises:
        pa.ArrowInvalid: the metadata is damaged.
    """
    try:
        size = file.size()
        length, _ = _TAIL.unpack(file.read_at(_TAIL.size, size - _TAIL.size))
        footer = file.read_at(length, size - _TAIL.size - length)
        blocks = _follow(footer, _field(footer, _follow(footer, 0), _FOOTER_RECORD_BATCHES)) + 4
        offset, metadata_size, _ = _BLOCK.unpack_from(footer, blocks + ordinal * _BLOCK.size)
        metadata = file.read_at(metadata_size, offset)
        # Before the table stands its size, and before that, in files of Arrow 0.15 and later, a mark.
        message = metadata[8:] if metadata.startswith(_CONTINUATION) else metadata[4:]
        batch = _follow(message, _field(message, _follow(message, 0), _MESSAGE_HEADER))
        return _field(message, batch, _RECORD_BATCH_COMPRESSION) != 0
    except (struct.error, ValueError) as error:
        raise pa.ArrowInvalid(f"the metadata of record batch {ordinal} is damaged: {error}") from error


def _follow(data: bytes, at: int) -> int:
    """The place to which the offset at a place leads."""
    (offset,) = struct.unpack_from("<I", data, at)
    return at + int(offset)


def _field(data: bytes, table: int, number: int) -> int:
    """The place of a table's field; 0 where the table lacks it."""
    (back,) = struct.unpack_from("<i", data, table)
    layout, slot = table - back, 4 + 2 * number
    (size,) = struct.unpack_from("<H", data, layout)
    if slot >= size:
        return 0
    (offset,) = struct.unpack_from("<H", data, layout + slot)
    return table + int(offset) if offset else 0
