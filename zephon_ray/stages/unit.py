"""A unit after it was read and tokenised (before, it is a `plan.windows.UnitTask`).

It is the unit of retry, of the token cache and of audit. Nothing here reads or tokenises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zephon_ray.plan.windows import UnitKey, UnitTask
from zephon_ray.stages.arrow_arrays import large_strings, mask, nullable_strings, numbers, of_numbers

__all__ = ["SCHEMA", "TokenisedUnit", "UnitKey", "UnitTask", "rows_of"]

SCHEMA = pa.schema(
    [
        pa.field("source", pa.int32(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("group", pa.int64(), nullable=False),
        pa.field("unit", pa.int64(), nullable=False),
        pa.field("last", pa.bool_(), nullable=False),
        pa.field("ids", pa.large_list(pa.field("item", pa.uint32(), nullable=False)), nullable=False),
        pa.field("offsets", pa.large_list(pa.field("item", pa.int64(), nullable=False)), nullable=False),
        pa.field("digest", pa.uint64(), nullable=False),
        pa.field("text_bytes", pa.int64(), nullable=False),
        pa.field("bad", pa.int64(), nullable=False),
        pa.field("empty", pa.int64(), nullable=False),
        pa.field("short", pa.int64(), nullable=False),
        pa.field("bad_examples", pa.list_(pa.string()), nullable=False),
        pa.field("error", pa.string()),
    ]
)
"""The columns of a tokenised unit as one row of Arrow."""

_NUMBERS = ("source", "epoch", "group", "unit", "digest", "text_bytes", "bad", "empty", "short")
_SCALARS = (*_NUMBERS, "last", "error")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenisedUnit:
    """The documents of one unit as ids, and what was left out.

    Args:
        source: index of the source in the recipe.
        epoch: from 0.
        group: number of the group within its source.
        unit: number of the unit within its group.
        last: this is the group's last unit.
        ids: uint32 [n], the documents' ids end to end, bos and eos included.
        offsets: int64 [documents + 1]; document d is `ids[offsets[d]:offsets[d + 1]]`.
        digest: 64-bit digest of the texts that are neither bad nor empty (see `stages.texts.digest_texts`).
        text_bytes: UTF-8 bytes of those texts.
        bad: bad records left out.
        empty: records left out for an empty or null text.
        short: documents left out for having fewer than two ids.
        bad_examples: where the first three bad records are, and what is wrong with them.
        error: set where `on_bad_record: fail` met a bad record; there are no ids then.
    """

    source: int
    epoch: int
    group: int
    unit: int
    last: bool
    ids: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]
    digest: int
    text_bytes: int
    bad: int
    empty: int
    short: int
    bad_examples: tuple[str, ...]
    error: str | None

    @property
    def key(self) -> UnitKey:
        return self.source, self.epoch, self.group, self.unit

    @staticmethod
    def nothing(*, source: int, epoch: int, group: int, unit: int, error: str | None = None) -> TokenisedUnit:
        """A unit without documents, the last of its group."""
        return TokenisedUnit(
            source=source,
            epoch=epoch,
            group=group,
            unit=unit,
            last=True,
            ids=np.empty(0, np.uint32),
            offsets=np.zeros(1, np.int64),
            digest=0,
            text_bytes=0,
            bad=0,
            empty=0,
            short=0,
            bad_examples=(),
            error=error,
        )

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def pairs(self) -> int:
        """Next-token pairs of its documents."""
        return len(self.ids) - self.documents

    @property
    def nbytes(self) -> int:
        """Of ids and offsets."""
        return self.ids.nbytes + self.offsets.nbytes

    def owned(self) -> TokenisedUnit:
        """The unit with arrays of its own: it holds no buffer of a batch that other units lie in."""
        own = self.ids.flags.owndata and self.offsets.flags.owndata
        return self if own else replace(self, ids=self.ids.copy(), offsets=self.offsets.copy())

    def to_arrow(self) -> pa.RecordBatch:
        """One row in `SCHEMA`. The buffers of ids and offsets are shared, not copied."""
        return rows_of([self])

    @staticmethod
    def from_arrow(batch: pa.RecordBatch, row: int = 0) -> TokenisedUnit:
        """A unit from a row in `SCHEMA`; ids and offsets are read-only views of the batch's buffers."""
        scalars = {name: batch.column(name)[row].as_py() for name in _SCALARS}
        return TokenisedUnit(
            **scalars,
            ids=numbers(batch.column("ids")[row].values, np.uint32),
            offsets=numbers(batch.column("offsets")[row].values, np.int64),
            bad_examples=tuple(batch.column("bad_examples")[row].as_py()),
        )


def rows_of(units: Sequence[TokenisedUnit]) -> pa.RecordBatch:
    """A row in `SCHEMA` for each unit, at least one. The buffers of ids and offsets are copied where there are several."""
    values = {name: of_numbers(np.array([getattr(u, name) for u in units], str(SCHEMA.field(name).type))) for name in _NUMBERS}
    values["last"] = mask(np.array([u.last for u in units]))
    for name in ("ids", "offsets"):
        arrays = [getattr(u, name) for u in units]
        items = of_numbers(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
        values[name] = pa.LargeListArray.from_arrays(_ends(map(len, arrays), np.int64), items, type=SCHEMA.field(name).type)
    examples = [u.bad_examples for u in units]
    strings = large_strings([text for some in examples for text in some]).cast(pa.string())
    values["bad_examples"] = pa.ListArray.from_arrays(_ends(map(len, examples), np.int32), strings)
    values["error"] = nullable_strings([u.error for u in units])
    return pa.RecordBatch.from_arrays([values[name] for name in SCHEMA.names], schema=SCHEMA)


def _ends(sizes: Iterable[int], dtype: type[np.signedinteger[Any]]) -> pa.Array:
    """Where lists that lie end to end begin and end."""
    return of_numbers(np.cumsum([0, *sizes], dtype=dtype))
