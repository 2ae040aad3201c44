"""A row block: some rows of one step as one object of the object store. Steps share none, so dropping a step drops its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlock:
    """Rows first_row .. first_row + rows - 1 of a global batch.

    Args:
        first_row: from 0, within the global batch.
        rows: at least 1.
        ref: `ray.ObjectRef` of int32 [rows, 3, T]: inputs, labels and positions of each row. Whoever holds it, holds the rows.
    """

    first_row: int
    rows: int
    ref: Any


def cut_rows(rows: range, row_bytes: int, block_bytes: int) -> tuple[range, ...]:
    """Consecutive rows as the row blocks that they are given in: as few as may be, of about the same size.

    Args:
        rows: of a global batch, at least one.
        row_bytes: of one.
        block_bytes: of a block, at most, unless a single row has more.
    """
    count = -(-len(rows) // max(1, block_bytes // row_bytes))
    return tuple(rows[i * len(rows) // count : (i + 1) * len(rows) // count] for i in range(count))
