"""Feeding: what lane groups ask for, and the windows that they are given. All groups of a stream are given the same.

A unit is whatever stands for one: its arrays, or a reference to where they lie. Whoever puts units in order looks at
their facts only; a lane group looks at their arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from zephon_ray.plan.windows import Position


class UnitFacts(Protocol):
    """What putting units in order, and the ledger, need to know of one: everything but its ids. Fields as in `TokenisedUnit`."""

    @property
    def source(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def unit(self) -> int: ...
    @property
    def last(self) -> bool: ...
    @property
    def digest(self) -> int: ...
    @property
    def bad(self) -> int: ...
    @property
    def empty(self) -> int: ...
    @property
    def short(self) -> int: ...
    @property
    def bad_examples(self) -> tuple[str, ...]: ...
    @property
    def error(self) -> str | None: ...
    @property
    def pairs(self) -> int:
        """Next-token pairs of its documents."""

    @property
    def nbytes(self) -> int:
        """Of its arrays."""

    def owned(self) -> Self:
        """The unit, holding nothing but itself: what a small source's units are kept as."""


U = TypeVar("U", bound=UnitFacts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Want:
    """What a lane group needs before it can go on: the next windows of `source`, about `pairs` pairs of them."""

    source: int
    pairs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Window(Generic[U]):
    """One window of a source: where it begins, and its units slot by slot. Its epoch counts, not that of units kept from an earlier one."""

    position: Position
    units: Sequence[U]


@dataclass(frozen=True, kw_only=True, slots=True)
class FedWindows(Generic[U]):
    """Consecutive windows of one source.

    Args:
        windows: in order, at least one.
        after: the start of the window after them.
    """

    windows: Sequence[Window[U]]
    after: Position
