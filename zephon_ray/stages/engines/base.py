"""What an engine is: texts of a unit in, flat ids out. Nothing here, and no engine, knows of bos, eos or records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from zephon_ray.stages.texts import Texts

U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

EngineName = Literal["auto", "hf", "fast"]

CHUNK_BYTES = 1 << 18
"""Bytes of text that an engine works on at a time: what it needs besides stays in the cache, or at least small (the reference takes
about a hundred times the text's ids)."""


class EngineUnfitError(Exception):
    """An engine cannot be had, or does not know this tokenizer; says why. It never leaves the package."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encoded:
    """Texts as ids.

    Args:
        ids: uint32 [n], of all texts end to end.
        offsets: int64 [texts + 1]; text i is `ids[offsets[i]:offsets[i + 1]]`.
    """

    ids: U32
    offsets: I64

    @classmethod
    def of(cls, ids: Sequence[U32], sizes: Sequence[I64]) -> Encoded:
        """From parts: ids end to end, and how many each text has."""
        counts = np.concatenate(sizes) if sizes else np.empty(0, np.int64)
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        return cls(ids=np.concatenate(ids) if ids else np.empty(0, np.uint32), offsets=offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def of_text(self, number: int) -> U32:
        return self.ids[self.offsets[number] : self.offsets[number + 1]]


class Engine(Protocol):
    """One tokenizer, loaded. Any number of threads may use it at once."""

    @property
    def name(self) -> str:
        """For messages: which library, of which version."""

    def encode(self, texts: Texts) -> Encoded:
        """The ids of each text."""
