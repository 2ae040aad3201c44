"""The ledger of a run: what every step was, kept so that a step made again can be proven equal.

`line` is one step, `segments` the files; `reader` reads them as one, `writer` makes them grow.
"""

from __future__ import annotations

from zephon_ray.ledger.line import LedgerLine, LeftOutCounts, Recorded, UnitDigests, WindowUse, differing_fields
from zephon_ray.ledger.reader import Difference, LedgerReader, diff
from zephon_ray.ledger.writer import Ledger

__all__ = [
    "Difference",
    "Ledger",
    "LedgerLine",
    "LedgerReader",
    "LeftOutCounts",
    "Recorded",
    "UnitDigests",
    "WindowUse",
    "diff",
    "differing_fields",
]
