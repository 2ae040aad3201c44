"""The ledger of a run: what every step was, kept so that a step made again can be proven equal.

`line` is one step, `segments` the files, `ledger` the whole: reading, appending, and who may write.
"""

from __future__ import annotations

from zephon_ray.ledger.ledger import Difference, Ledger, LedgerReader, UnitDigests, diff
from zephon_ray.ledger.line import LedgerLine, WindowUse, differing_fields

__all__ = ["Difference", "Ledger", "LedgerLine", "LedgerReader", "UnitDigests", "WindowUse", "diff", "differing_fields"]
