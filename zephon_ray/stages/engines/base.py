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


class EngineUnfitError(Exception):
    """An engine cannot be had, or does not know this tokenizer; says why. It never leaves the package."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encoded:
    """Texts as ids.

    Args:
        ids: uint32 [n], of all texts end to end.
        sizes: int64 [texts], ids of each.
    """

    ids: U32
    sizes: I64

    @classmethod
    def join(cls, parts: Sequence[Encoded]) -> Encoded:
        """Parts, one after the other; of a single one nothing is copied."""
        if len(parts) == 1:
            return parts[0]
        nothing = cls(ids=np.empty(0, np.uint32), sizes=np.empty(0, np.int64))
        return cls(ids=np.concatenate([p.ids for p in (nothing, *parts)]), sizes=np.concatenate([p.sizes for p in (nothing, *parts)]))

    def __len__(self) -> int:
        return len(self.sizes)

    def of_text(self, number: int) -> U32:
        first = int(self.sizes[:number].sum())
        return self.ids[first : first + int(self.sizes[number])]


class Engine(Protocol):
    """One tokenizer, loaded. Any number of threads may use it at once."""

    @property
    def name(self) -> str:
        """For messages: which library, of which version."""

    def encode(self, texts: Texts) -> Encoded:
        """The ids of each text."""
