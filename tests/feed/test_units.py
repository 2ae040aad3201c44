"""References to units: they say what the units say, and kept ones hold nothing but themselves. No Ray here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from zephon_ray.errors import SourceError
from zephon_ray.feed.units import Facts, Place, Shelf, UnitRef, copied, describe, refer, unit_at
from zephon_ray.runners.base import FailedUnit
from zephon_ray.runners.ray_worker import BLOCK_BYTES, batch_of, packed, units_of
from zephon_ray.runners.worker import Effort, Made
from zephon_ray.stages.unit import TokenisedUnit


def a_unit(number: int, ids: int = 100) -> TokenisedUnit:
    nothing = TokenisedUnit.nothing(source=1, epoch=2, group=number, unit=3)
    offsets = np.array([0, ids // 2, ids])
    return replace(
        nothing, ids=np.arange(number, number + ids, dtype=np.uint32), offsets=offsets, digest=2**63 + number, text_bytes=7, bad=1,
        empty=2, short=3, bad_examples=("a", "b"), last=bool(number % 2),
    )  # fmt: skip


def a_block(units: list[TokenisedUnit | FailedUnit]) -> pa.Table:
    (table,) = packed(Made(unit=unit, effort=Effort(skipped_bytes=number)) for number, unit in enumerate(units))
    return table


def test_a_description_says_all_but_the_arrays_and_the_row_leads_back_to_the_unit() -> None:
    units = [a_unit(number) for number in range(5)]
    failed = FailedUnit(source=0, epoch=0, group=9, unit=0, error=SourceError("gone"))
    block = a_block([*units[:2], failed, *units[2:]])
    given = refer(block, describe(block), Shelf(lambda places: places))
    assert [effort.skipped_bytes for _, effort in given] == [0, 1, 2, 3, 4, 5]
    refs = [ref for ref, _ in given if isinstance(ref, UnitRef)]
    assert isinstance(given[2][0], FailedUnit)
    assert str(given[2][0].error) == "gone"
    for ref, unit in zip(refs, units, strict=True):
        assert all(getattr(ref, name) == getattr(unit, name) for name in Facts.__dataclass_fields__)
        there = unit_at(block, ref.spot.place.row)
        np.testing.assert_array_equal(there.ids, unit.ids)
        np.testing.assert_array_equal(there.offsets, unit.offsets)
        assert there.key == unit.key


def test_rows_are_copied_into_blocks_of_a_bounded_size_that_share_no_buffer() -> None:
    units = [a_unit(number, ids=1_600_000) for number in range(5)]
    blocks = [a_block([units[0], units[1]]), a_block([units[2], units[3]]), a_block([units[4]])]
    new = list(copied([(blocks[1], 1), (blocks[0], 0), (blocks[2], 0)]))
    assert [batch_of(table).num_rows for table in new] == [2, 1]
    assert [table.num_rows for table in new] == [1, 1], "Ray Data makes an object of each row"
    assert all(table.nbytes <= BLOCK_BYTES for table in new)
    found = [unit_at(new[0], 0), unit_at(new[0], 1), unit_at(new[1], 0)]
    assert [unit.group for unit in found] == [3, 0, 4]
    for unit in found:
        np.testing.assert_array_equal(unit.ids, units[unit.group].ids)
    old = [unit_at(blocks[1], 1), unit_at(blocks[0], 0), unit_at(blocks[2], 0)]
    assert not any(np.shares_memory(a.ids, b.ids) for a in found for b in old)


def test_a_block_is_passed_on_in_time_before_the_next_unit_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zephon_ray.runners.ray_worker.BLOCK_S", 0.0)
    made: list[int] = []

    def slow() -> Iterator[Made]:
        for number in range(3):
            made.append(number)
            yield Made(unit=a_unit(number), effort=Effort())

    for number, block in enumerate(packed(slow())):
        assert [unit.unit.group for unit in units_of(block)] == [number]
        assert made == list(range(number + 1))
    assert made == [0, 1, 2]


@pytest.mark.parametrize("ids", [100, 0])
def test_a_unit_that_owns_its_arrays_holds_no_block(ids: int) -> None:
    there = unit_at(a_block([a_unit(0, ids), a_unit(1, ids)]), 1)
    assert not there.offsets.flags.owndata
    owned = there.owned()
    assert owned.ids.flags.owndata
    assert owned.offsets.flags.owndata
    assert owned.to_arrow().equals(there.to_arrow())


def test_kept_units_move_once_and_the_others_stay() -> None:
    asked: list[list[Place]] = []

    def copy(places: list[Place]) -> list[Place]:
        asked.append(list(places))
        return [Place(block="new", row=row) for row in range(len(places))]

    shelf = Shelf(copy)  # type: ignore[arg-type]
    block = a_block([a_unit(0), a_unit(1), a_unit(2)])
    refs = [ref for ref, _ in refer("old", describe(block), shelf)]
    kept = [refs[2].owned(), refs[0].owned()]
    assert [ref.spot.place for ref in kept] == [Place(block="old", row=2), Place(block="old", row=0)]
    shelf.move()
    shelf.move()
    assert asked == [[Place(block="old", row=2), Place(block="old", row=0)]]
    assert [ref.spot.place for ref in kept] == [Place(block="new", row=0), Place(block="new", row=1)]
    assert [ref.spot.place.block for ref in refs] == ["old"] * 3


def test_a_row_that_a_block_does_not_have_is_an_error() -> None:
    with pytest.raises(IndexError, match="the block has 1 rows, and row 1"):
        unit_at(a_block([a_unit(0)]), 1)


def test_the_process_of_a_lane_worker_does_not_load_ray_data() -> None:
    """It takes as long as all the rest, and ranks wait for a lane worker that takes the place of one that was killed."""
    loaded = "import sys, zephon_ray.feed.lane_worker; print([name for name in sys.modules if name in ('ray.data', 'pandas', 'torch')])"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=60, check=True).stdout == "[]\n"
