"""Row blocks: every row is in one, in order, and none is larger than it may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zephon_ray.feed.blocks import cut_rows


@given(st.integers(0, 100), st.integers(1, 200), st.integers(1, 5000), st.integers(1, 20_000))
def test_row_blocks_cover_all_rows_in_order_and_are_as_few_as_their_size_allows(
    first: int, count: int, row_bytes: int, block_bytes: int
) -> None:
    cuts = cut_rows(range(first, first + count), row_bytes, block_bytes)
    assert [row for cut in cuts for row in cut] == list(range(first, first + count))
    sizes = [len(cut) for cut in cuts]
    most = max(1, block_bytes // row_bytes)
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert (len(cuts) - 1) * most < count
