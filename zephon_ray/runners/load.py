"""Load: how much of its time a pool of workers works, and how much of its time its taker waits."""

from __future__ import annotations

SETTLED_S = 4.0
"""Seconds after a change of the pool before anything is said of it."""
HUNGRY = 0.5
_WAITS_S, _WORKS_S = 2.0, 8.0


class Load:
    """Shares of time, averaged with a weight that decays: over about 2 s for the taker, 8 s for the workers.

    Args:
        now: seconds on a monotonic clock, as in every call.
    """

    def __init__(self, now: float) -> None:
        self._now = now
        self._waiting_since: float | None = None
        self._waited_s = self._known_s = 0.0
        self._waits = self._works = 0.0

    def taker_waits(self, now: float) -> None:
        self._waiting_since = now

    def taker_goes_on(self, now: float) -> None:
        if self._waiting_since is not None:
            self._waited_s += now - max(self._waiting_since, self._now)
        self._waiting_since = None

    def tick(self, now: float, *, working: bool) -> None:
        """Look again. `working`: whether anything that was asked of the workers is not there."""
        since, passed = self._now, now - self._now
        if passed <= 0:
            return
        waited = self._waited_s + (now - max(self._waiting_since, since) if self._waiting_since is not None else 0.0)
        self._now, self._waited_s = now, 0.0
        self._known_s += passed
        self._waits += min(1.0, passed / _WAITS_S) * (min(1.0, waited / passed) - self._waits)
        self._works += min(1.0, passed / _WORKS_S) * (working - self._works)

    def forget(self) -> None:
        """The pool has changed."""
        self._known_s, self._waits, self._works = 0.0, 0.0, HUNGRY

    @property
    def hungry(self) -> bool:
        """The taker waits most of the time."""
        return self._known_s >= SETTLED_S and self._waits > HUNGRY

    @property
    def working_share(self) -> float | None:
        """In [0, 1]; None while too little is known."""
        return self._works if self._known_s >= SETTLED_S else None
