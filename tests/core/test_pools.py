"""Pools: the ids that pieces lie in stay what and where they are, whatever comes and goes beside them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zephon_ray.plan.packing import PADDING
from zephon_ray.plan.pieces import PIECE
from zephon_ray.pools import Pools


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.booleans(), st.lists(st.integers(0, 6)), st.integers(0, 3)),
        max_size=12,
    )
)
def test_pools_keep_their_ids_while_others_come_and_go(rounds: list[tuple[list[int], bool, list[int], int]]) -> None:
    """Whole or piece by piece, of arrays long and short, in gaps or at the end, and when the line grows; and none lies in what padding is
    made of.
    """
    pools, number = Pools(7, 5), 0
    held, sizes = dict[int, tuple[list[int], list[int]]](), dict[int, list[int]]()
    for lengths, own, cuts, drop in rounds:
        edges = np.cumsum([0, *lengths])
        ids = np.split(np.arange(edges[-1] + 3, dtype=np.uint32) + 1000 * number, [edges[cut] for cut in sorted(cuts) if cut < len(edges)])
        pieces = np.zeros(len(lengths), PIECE)
        pieces["pairs"], pieces["start"] = np.array(lengths) - 1, edges[:-1]
        expected = pieces["start"] + 1000 * number
        (pools.add_own if own else pools.add_all)(number, ids, pieces)
        values = [x for first, n in zip(expected.tolist(), lengths, strict=True) for x in range(first, first + n)]
        held[number] = pieces["start"].tolist(), values
        gone = list(held)[:drop]
        pools.drop(gone)
        held = {n: pool for n, pool in held.items() if n not in gone}
        sizes[number], number = lengths, number + 1
        for n, (starts, kept) in held.items():
            assert [x for at, size in zip(starts, sizes[n], strict=True) for x in pools.line[at : at + size].tolist()] == kept
        live = [n for n in held if n % 2]
        assert pools.without([]) == set(held)
        assert pools.without([np.array([PADDING, *live]), np.array(live[:1], np.int64)]) == set(held) - set(live)
        assert pools.line[:5].tolist() == [7] * 5


def test_a_dropped_pools_room_is_used_again() -> None:
    pools = Pools(0, 1)
    for number in range(50):
        pieces = np.zeros(1, PIECE)
        pools.add_all(number, [np.ones(1000, np.uint32)], pieces)
        pools.drop([number])
    assert len(pools.line) < 5000


def test_a_pool_that_is_a_little_longer_than_the_one_whose_place_it_takes_fills_that_nevertheless() -> None:
    """Windows are never of one length, and as long as a tenth of all that is held."""
    pools, ends = Pools(0, 1), []
    for number in range(60):
        pieces = np.zeros(1, PIECE)
        pools.add_all(number, [np.ones(100 + number, np.uint32)] * 10, pieces)
        pools.drop([number - 3] if number >= 3 else [])
        ends.append(int(pieces["start"][0]))
        assert pools.ids <= 4 * 10 * (100 + number)
    assert max(ends) < 5 * 10 * 160
