"""Packing and dealing as properties: against naive forms that a reader can check by eye."""

from __future__ import annotations

from heapq import heapify, heapreplace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon_ray.hashing import extend_key64, key64
from zephon_ray.plan.dealing import Dealer, SourceStart
from zephon_ray.plan.fewest import MANY, Fewest
from zephon_ray.plan.packing import PADDING, Fills, best_fit_rows, lay_fills, lay_padding, lay_wrap
from zephon_ray.plan.pieces import PIECE, UnitShape, cut_pieces, join, mixture_order, pick, stable_order
from zephon_ray.plan.windows import Position

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=60)
NOWHERE = Position(epoch=0, window=0, places=())


def pieces_of(lanes: list[int], pairs: list[int]) -> np.ndarray:
    pieces = np.zeros(len(pairs), PIECE)
    pieces["lane"], pieces["pairs"], pieces["start"] = lanes, pairs, np.cumsum([0, *pairs])[:-1] + np.arange(len(pairs))
    return pieces


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5), st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=9))
def test_keys_of_arrays_are_the_keys_of_their_numbers(parts: list[int], last: list[int]) -> None:
    got = extend_key64(key64(*parts), np.array(last, np.int64), np.array(last[::-1], np.int64))
    assert got.tolist() == [key64(*parts, a, b) for a, b in zip(last, last[::-1], strict=True)]


@given(
    st.integers(MANY - 1, MANY + 1),
    st.lists(st.lists(st.integers(1, 300) | st.just(1) | st.just(1 << 20), max_size=80), min_size=1, max_size=4),
    st.integers(1, 400),
    st.randoms(use_true_random=False),
)
def test_each_piece_goes_to_the_lane_with_the_fewest_pairs_however_many_lanes_there_are(
    lanes: int, calls: list[list[int]], times: int, random: Random
) -> None:
    """As many pieces as bring both forms about, of like sizes and of such as differ by much."""
    dealt = [random.choice((0, 1, 500)) for _ in range(lanes)]
    fewest, heap = Fewest(np.array(dealt)), [(n, lane) for lane, n in enumerate(dealt)]
    heapify(heap)
    for pairs in calls:
        pieces = pairs * times
        expected = []
        for n in pieces:
            most, lane = heap[0]
            heapreplace(heap, (most + n, lane))
            expected.append(lane)
        assert fewest.deal(np.array(pieces, np.int64)).tolist() == expected


@given(st.lists(sizes, min_size=1, max_size=4), st.integers(40, 64))
def test_best_fit_puts_each_piece_where_the_contract_says(fills: list[list[int]], length: int) -> None:
    expected, rows_of_fills = list[int](), list[int]()
    for pairs in fills:
        room: list[int] = []
        row_of = [0] * len(pairs)
        for i in sorted(range(len(pairs)), key=lambda i: (-pairs[i], i)):
            fits = sorted((room[r], r) for r in range(len(room)) if room[r] >= pairs[i])
            row_of[i] = fits[0][1] if fits else len(room)
            if not fits:
                room.append(length)
            room[row_of[i]] -= pairs[i]
        expected += [sum(rows_of_fills) + row for row in row_of]
        rows_of_fills.append(len(room))
    rows, counts = best_fit_rows(np.array([p for pairs in fills for p in pairs]), np.array([len(pairs) for pairs in fills]), length)
    assert (rows.tolist(), counts.tolist()) == (expected, rows_of_fills)


@given(sizes, st.integers(1, 50), st.data())
def test_wrap_covers_each_lanes_line_without_gap_or_overlap(pairs: list[int], length: int, data: st.DataObject) -> None:
    lanes = sorted(data.draw(st.lists(st.integers(0, 2), min_size=len(pairs), max_size=len(pairs))))
    tails = np.array(data.draw(st.lists(st.integers(-30, 100), min_size=3, max_size=3)), np.int64)
    before = tails.copy()
    laid = lay_wrap(pieces_of(lanes, pairs), tails, length)
    assert tails.tolist() == [int(b) + sum(p for p, n in zip(pairs, lanes, strict=True) if n == lane) for lane, b in enumerate(before)]
    assert (laid.pieces["done"] - laid.pieces["begun"]).tolist() == pairs
    for lane in range(3):
        own = laid.segments[laid.segments["lane"] == lane]
        covered = [x for s in own for x in range(int(s["at"]), int(s["at"] + s["pairs"]))]
        assert covered == list(range(max(0, int(before[lane])), max(int(tails[lane]), max(0, int(before[lane])))))
    inside = laid.segments["at"] // length == (laid.segments["at"] + laid.segments["pairs"] - 1) // length
    assert inside.all(), "a segment lies in one row"
    for s in laid.segments:  # every pair is at its piece's place
        of = laid.pieces[(laid.pieces["lane"] == s["lane"]) & (laid.pieces["begun"] <= s["at"]) & (laid.pieces["done"] > s["at"])][0]
        assert s["start"] - of["start"] == s["at"] - of["begun"]


@given(st.lists(sizes, min_size=1, max_size=4), st.integers(40, 50), st.data())
def test_fills_give_whole_rows_with_every_pair_once(fills: list[list[int]], length: int, data: st.DataObject) -> None:
    pairs = [p for fill in fills for p in fill]
    tails = np.zeros(1, np.int64)
    pieces = pieces_of([0] * len(pairs), pairs)
    pieces["source"] = data.draw(st.lists(st.integers(0, 3), min_size=len(pairs), max_size=len(pairs)))
    last: list[tuple[int, int, int]] = []  # of each fill and source, as they come: what is carried on
    for fill in np.split(pieces, np.cumsum([len(f) for f in fills])[:-1]):
        of_sources = {int(p["source"]): int(p["start"]) for p in fill}
        last += sorted((start, source, int(fill["pairs"][fill["source"] == source].sum())) for source, start in of_sources.items())
    laid = lay_fills(pieces, np.array([len(f) for f in fills]), tails, length)
    assert tails[0] % length == 0
    covered = sorted((int(s["at"]), int(s["at"] + s["pairs"])) for s in laid.segments)
    assert covered[0][0] == 0
    assert covered[-1][1] == tails[0]
    assert all(a[1] == b[0] for a, b in pairwise(covered))
    real = laid.segments[laid.segments["pool"] != PADDING]
    assert sorted(real["start"].tolist()) == pieces["start"].tolist()
    assert laid.pieces[["start", "source", "pairs"]].tolist() == last
    assert (np.diff(np.unique(laid.pieces["begun"])) > 0).all()


@given(st.lists(st.integers(0, 100), min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 12))
def test_padding_fills_up_to_the_end(tails: list[int], length: int, rows: int) -> None:
    segments = lay_padding(np.arange(len(tails)), np.array(tails), rows * length, length)
    for lane, tail in enumerate(tails):
        own = segments[segments["lane"] == lane]
        assert [x for s in own for x in range(s["at"], s["at"] + s["pairs"])] == list(range(tail, rows * length))
    assert (segments["at"] // length == (segments["at"] + segments["pairs"] - 1) // length).all()


small_or_late = st.integers(-1, 30) | st.integers(2**62, 2**62 + 30)


@given(st.lists(st.tuples(st.integers(0, 5), small_or_late), min_size=1, max_size=30))
def test_pieces_are_taken_lane_by_lane_by_virtual_time_and_equal_ones_as_they_come(pieces: list[tuple[int, int]]) -> None:
    lane, time = (np.array(column, kind) for column, kind in zip(zip(*pieces, strict=True), (np.int32, np.int64), strict=True))
    assert mixture_order(lane, time).tolist() == sorted(range(len(pieces)), key=lambda i: (*pieces[i], i))


@given(st.lists(st.integers(0, 70_000), max_size=20), st.sampled_from([70_001, 1 << 32]))
def test_numbers_are_sorted_whatever_they_are_bounded_by(numbers: list[int], bound: int) -> None:
    few = [n % 7 for n in numbers]
    for some, limit in ((numbers, bound), (few, 7)):
        assert stable_order(np.array(some, np.int64), limit).tolist() == sorted(range(len(some)), key=lambda i: (some[i], i))


def test_documents_with_equal_keys_stay_in_the_contracts_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of 64 bits are not seen to be equal, so here they are made so: the order is that of group, unit, document, piece."""
    monkeypatch.setattr("zephon_ray.plan.pieces.extend_key64", lambda prefix, *_: np.zeros(len(prefix), np.uint64))
    units = [UnitShape(window=0, epoch=0, group=g, unit=0, offsets=np.array([0, 3, 6, 30]) + 100 * g) for g in (2, 0, 1)]
    cut = cut_pieces(units, seed=1, source=0, max_pairs=10, shuffled=True)
    assert cut.start.tolist() == [100 * g + at for g in range(3) for at in (0, 3, 6, 16, 26)]


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=9), st.data())
def test_records_are_picked_and_joined_whole(starts: list[int], data: st.DataObject) -> None:
    pieces = np.zeros(len(starts), PIECE)
    pieces["start"], pieces["lane"] = starts, np.arange(len(starts))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(starts), max_size=len(starts))), np.bool_)
    which = np.array(data.draw(st.lists(st.integers(0, len(starts) - 1), max_size=9)), np.int64)
    assert pick(pieces, mask).tolist() == pieces[mask].tolist()
    assert pick(pieces, which).tolist() == pieces[which].tolist()
    assert join((pieces, pick(pieces, mask))).tolist() == [*pieces.tolist(), *pieces[mask].tolist()]


def dealer(lanes: int, keep: range | None = None) -> Dealer:
    zeros = np.zeros(lanes, np.int64)
    start = SourceStart(position=NOWHERE, dealt=zeros, windows=zeros, indices=zeros, counts=zeros)
    return Dealer(source=0, share=1 << 19, keep=keep or range(lanes), phase=zeros, start=start, partial=np.zeros(lanes, np.bool_))


@given(st.lists(sizes, min_size=1, max_size=5), st.integers(1, 9))
def test_dealing_gives_each_piece_to_the_lane_with_the_fewest_pairs(windows: list[list[int]], lanes: int) -> None:
    """One window at a time or all at once, whole or a part of the lanes: the same."""

    def cut(*some: list[int]):  # type: ignore[no-untyped-def]
        shapes = [
            UnitShape(window=w, epoch=0, group=0, unit=0, offsets=np.cumsum([0, *(p + 1 for p in pairs)])) for w, pairs in enumerate(some)
        ]
        return cut_pieces(shapes, seed=1, source=0, max_pairs=1000, shuffled=False)

    dealt, expected = [0] * lanes, []
    for w, pairs in enumerate(windows):
        for p in pairs:
            lane = min(range(lanes), key=lambda n: (dealt[n], n))
            expected.append((lane, w, dealt[lane] * 2, p))
            dealt[lane] += p
    whole = dealer(lanes).deal(cut(*windows), [NOWHERE] * len(windows), NOWHERE, 0)
    one, part = dealer(lanes), dealer(lanes, range(lanes // 2, lanes))
    singly = [one.deal(cut(w), [NOWHERE], NOWHERE, 0) for w in windows]
    kept = part.deal(cut(*windows), [NOWHERE] * len(windows), NOWHERE, 0)
    columns = ["lane", "window", "virtual_time", "pairs"]
    assert sorted(expected) == sorted(whole[columns].tolist())
    assert sorted(expected) == sorted(row for pieces in singly for row in pieces[columns].tolist())
    assert [row for row in sorted(expected) if row[0] >= lanes // 2] == sorted(kept[columns].tolist())
    assert max(dealt) - min(dealt) <= 40
    _, before = one.start_of(len(windows))
    assert (before + min(dealt)).tolist() == dealt


@given(st.integers(1, 4), st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=12), st.sets(st.integers(0, 2)))))
def test_pieces_wait_for_their_fill_in_order_and_what_is_left_in_a_final_lane_is_a_fill(
    size: int, rounds: list[tuple[list[int], set[int]]]
) -> None:
    fills, waiting, ended, number = Fills(3, size), [list[int]() for _ in range(3)], set[int](), 0
    for lanes, finals in rounds:
        pieces = np.zeros(len([lane for lane in lanes if lane not in ended]), PIECE)
        pieces["lane"] = sorted(lane for lane in lanes if lane not in ended)
        pieces["start"] = np.arange(number, number + len(pieces))
        number += len(pieces)
        for lane, start in zip(pieces["lane"].tolist(), pieces["start"].tolist(), strict=True):
            waiting[lane].append(start)
        ended |= finals
        fills.add(pieces)
        taken, sizes = fills.take(np.array([lane in ended for lane in range(3)]))
        expected, of_sizes = list[int](), list[int]()
        for lane in range(3):
            while len(waiting[lane]) >= size or (lane in ended and waiting[lane]):
                expected += waiting[lane][:size]
                of_sizes.append(len(waiting[lane][:size]))
                del waiting[lane][:size]
        assert (taken["start"].tolist(), sizes.tolist()) == (expected, of_sizes)
        assert sum(map(len, fills.pools)) == sum(map(len, waiting))
