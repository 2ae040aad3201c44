"""The texts of one unit as they come out of reading: those to be tokenised, and a record of what was left out and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from zephon_ray.stages.arrow_arrays import large_strings

I64 = npt.NDArray[np.int64]

EXAMPLES = 3
"""How many bad records of a unit are described."""


class BadUnitError(Exception):
    """A bad record where the recipe says `on_bad_record: fail`. It never leaves the stage: the unit carries its message."""


@dataclass(kw_only=True, slots=True)
class LeftOut:
    """The records of a unit that are left out, counted and partly described.

    Args:
        where: source and shard, for messages.
        fail: the first bad record ends the unit.
    """

    where: str
    fail: bool
    bad: int = 0
    empty: int = 0
    examples: list[str] = field(default_factory=list)

    def bad_record(self, place: str, reason: str) -> None:
        """Note a bad record.

        Args:
            place: line or row within the shard.
            reason: what is wrong with it.

        Raises:
            BadUnitError: `fail` is set.
        """
        self.bad += 1
        if len(self.examples) < EXAMPLES or self.fail:
            self.examples.append(f"{self.where}, {place}: {reason}")
        if self.fail:
            raise BadUnitError(self.examples[-1])


class Texts:
    """Some texts end to end, none of them empty, as Arrow has them: their UTF-8 bytes in one buffer, and where each begins.

    Args:
        array: strings without null.
        strings: the same as Python's, where they are there anyway; else they are made when an engine asks for them.
    """

    def __init__(self, array: pa.LargeStringArray, strings: list[str] | None = None) -> None:
        self._array, self._strings = array, strings
        offsets = np.frombuffer(array.buffers()[1], np.int64) if len(array) else np.zeros(1, np.int64)
        self._offsets: I64 = offsets[array.offset : array.offset + len(array) + 1]

    @classmethod
    def of(cls, strings: list[str]) -> Texts:
        """Of strings that UTF-8 can write."""
        return cls(large_strings(strings), strings)

    @classmethod
    def join(cls, arrays: list[pa.LargeStringArray]) -> Texts:
        """Of Arrow arrays, one after the other; of a single one nothing is copied."""
        return cls(arrays[0] if len(arrays) == 1 else pa.concat_arrays([*arrays, large_strings([])]))

    def __len__(self) -> int:
        return len(self._array)

    @property
    def nbytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return int(self._offsets[-1] - self._offsets[0])

    @property
    def sizes(self) -> I64:
        """UTF-8 bytes of each text, int64 [texts]."""
        return self._offsets[1:] - self._offsets[:-1]

    def strings(self, first: int = 0, end: int | None = None) -> list[str]:
        """Texts `first` to `end`, by default all, as Python has them."""
        if self._strings is not None:
            return self._strings[first:end]
        made: list[str] = self._array[first:end].to_pylist()
        return made

    def chunks(self, size: int) -> Iterator[tuple[int, int]]:
        """Ranges of texts, in order, of about `size` bytes each: a text belongs to the one in which its first byte lies."""
        if self.nbytes <= size:
            return iter([(0, len(self))] if len(self) else [])
        edges = np.flatnonzero(np.diff((self._offsets[:-1] - self._offsets[0]) // size, prepend=-1))
        return pairwise([*edges.tolist(), len(self)])

    def digest(self) -> int:
        """In [0, 2^64): xxh3_64 over the lengths of the UTF-8 texts (int64, little-endian), then over their bytes."""
        digest = xxhash.xxh3_64(self.sizes.astype("<i8").tobytes())
        if self.nbytes:
            digest.update(memoryview(self._array.buffers()[2])[self._offsets[0] : self._offsets[-1]])
        return digest.intdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTexts:
    """What was read of a unit.

    Args:
        texts: those that are neither bad nor empty, in file order.
        last: this is the group's last unit.
        left_out: what is not among them.
        error: set where a bad record ended the unit; there are no texts then.
    """

    texts: Texts
    last: bool
    left_out: LeftOut
    error: str | None = None
