"""Retention: which steps are kept to be given again. It holds what it is given, and knows neither ranks nor Ray.

What is kept is one unbroken range of steps. Those that some rank does not have yet, and `keep_steps` before them, are kept whatever
they cost; older ones back to a *mark*, within a budget of bytes, the oldest dropped first. A mark is a step that ranks may go back
to: the last two at which a state was saved or opened.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

MARKS = 2


class Kept(Protocol):
    """A step as it is kept."""

    @property
    def step(self) -> int:
        """From 1."""

    @property
    def nbytes(self) -> int:
        """What keeping it costs."""


K = TypeVar("K", bound=Kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What must be kept.

    Args:
        slowest: the step up to which every rank that lives has its rows; None where none does.
        awaited: the step from which ranks that have not come yet begin; None where all came.
    """

    slowest: int | None = None
    awaited: int | None = None


class Retention(Generic[K]):
    """The kept steps of a stream.

    Args:
        budget: bytes, at least 0, beyond which no step is kept that every rank has had.
        keep_steps: at least 0; so many behind the slowest rank are kept in any case.
    """

    def __init__(self, *, budget: int, keep_steps: int) -> None:
        self._budget, self._keep = budget, keep_steps
        self._steps: deque[K] = deque()
        self._marks: OrderedDict[int, None] = OrderedDict()
        self.nbytes = 0
        """Of all kept steps."""

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[K]:
        return iter(self._steps)

    @property
    def first(self) -> int | None:
        """The oldest kept step."""
        return self._steps[0].step if self._steps else None

    @property
    def last(self) -> int | None:
        """The newest kept step."""
        return self._steps[-1].step if self._steps else None

    def get(self, step: int) -> K | None:
        """A step, if it is kept."""
        at = step - self._steps[0].step if self._steps else -1
        return self._steps[at] if 0 <= at < len(self._steps) else None

    def put(self, kept: K) -> None:
        """Keep the step after the newest, or the first of a new range where nothing is kept.

        Raises:
            ValueError: it is neither.
        """
        if self._steps and kept.step != self._steps[-1].step + 1:
            raise ValueError(f"step {kept.step} cannot be kept behind step {self._steps[-1].step}")
        self._steps.append(kept)
        self.nbytes += kept.nbytes

    def forget_from(self, step: int) -> None:
        """Drop a step and all after it."""
        while self._steps and self._steps[-1].step >= step:
            self.nbytes -= self._steps.pop().nbytes

    def mark(self, step: int) -> None:
        """Ranks may go back to a step."""
        self._marks[step] = None
        self._marks.move_to_end(step)
        while len(self._marks) > MARKS:
            self._marks.popitem(last=False)

    def trim(self, bounds: Bounds) -> None:
        """Drop what need not be kept."""
        while self._steps and not self._needed(self._steps[0], bounds):
            self.nbytes -= self._steps.popleft().nbytes

    def _needed(self, oldest: K, bounds: Bounds) -> bool:
        if bounds.slowest is not None and oldest.step > bounds.slowest - self._keep:
            return True
        floors = [*self._marks, *(step for step in (bounds.awaited,) if step is not None)]
        wanted = oldest.step > min(floors, default=-1)
        return wanted and self.nbytes <= self._budget
