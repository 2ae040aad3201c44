"""Arrow arrays made from and seen as numpy's and Python's without `pa.array` and `to_numpy`: those import pandas where it is installed,
which costs every process that reads 50 MB and a third of a second, and does nothing for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

N = TypeVar("N", bound=np.generic)
Bools = npt.NDArray[np.bool_]


def numbers(array: pa.Array, dtype: type[N]) -> npt.NDArray[N]:
    """The values of a fixed-width array, [n], not copied; under nulls lies anything.

    Args:
        array: of a type as wide as `dtype`.
        dtype: of the values.
    """
    return np.frombuffer(array.buffers()[1], dtype)[array.offset : array.offset + len(array)] if len(array) else np.empty(0, dtype)


def of_numbers(values: npt.NDArray[np.generic]) -> pa.Array:
    """A contiguous array of numbers as Arrow has it, not copied."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def valid(array: pa.Array) -> Bools:
    """Where an array has a value, [n]."""
    bits = array.buffers()[0] if array.null_count else None
    return np.ones(len(array), np.bool_) if bits is None else _unpacked(bits, array.offset, len(array))


def _unpacked(bits: pa.Buffer, offset: int, size: int) -> Bools:
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=offset + size, bitorder="little")[offset:].view(np.bool_)


def mask(chosen: Bools) -> pa.BooleanArray:
    """What `filter` takes."""
    return pa.BooleanArray.from_buffers(pa.bool_(), len(chosen), [None, pa.py_buffer(np.packbits(chosen, bitorder="little"))])


def large_strings(strings: list[str]) -> pa.LargeStringArray:
    """Strings that UTF-8 can write."""
    encoded = [string.encode() for string in strings]
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=offsets[1:])
    return pa.LargeStringArray.from_buffers(len(encoded), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def nullable_strings(strings: Sequence[str | None]) -> pa.StringArray:
    """Strings that UTF-8 can write, or null."""
    if all(string is None for string in strings):
        return pa.nulls(len(strings), pa.string())
    return pa.concat_arrays([pa.nulls(1, pa.string()) if s is None else large_strings([s]).cast(pa.string()) for s in strings])
