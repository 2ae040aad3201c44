"""The texts of one unit as they come out of reading: those to be tokenised, and a record of what was left out and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

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


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTexts:
    """What was read of a unit.

    Args:
        texts: those that are neither bad nor empty, in file order.
        last: this is the group's last unit.
        left_out: what is not among them.
        error: set where a bad record ended the unit; there are no texts then.
    """

    texts: Sequence[str]
    last: bool
    left_out: LeftOut
    error: str | None = None


def digest_texts(texts: Sequence[str]) -> tuple[int, npt.NDArray[np.int64]]:
    """The digest of a unit's text: xxh3_64 over the lengths of the UTF-8 texts (int64, little-endian), then over their bytes.

    Returns:
        (digest in [0, 2^64), int64 [texts] lengths in bytes)
    """
    encoded = [text.encode() for text in texts]
    sizes = np.fromiter(map(len, encoded), "<i8", len(encoded))
    digest = xxhash.xxh3_64(sizes.tobytes())
    digest.update(b"".join(encoded))
    return digest.intdigest(), sizes
