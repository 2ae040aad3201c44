"""Reading a ledger: steps 1 to `last` without a gap, whichever writers wrote them.

Lines that two writers both wrote must agree. How a ledger grows is the business of `zephon_ray.ledger.writer`.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from zephon_ray.errors import RunDirectoryError
from zephon_ray.ledger.line import NO_CHAIN, LedgerLine, Recorded, UnitDigests, describe, differing_fields, folds
from zephon_ray.ledger.segments import Listing, OpenSegment, Segment, read_open, unseal
from zephon_ray.storage import Storage

_LOAD_TRIES = 5
_MEND = "Restore the ledger from a copy of the directory, or remove the segments that are not this run's."

_log = logging.getLogger(__name__)


class LedgerReader:
    """Reads a ledger. `open` reads the names and the last segment only; others are read when they are asked for.

    Args:
        storage: opens URLs.
        url: the ledger's folder.
    """

    def __init__(self, storage: Storage, url: str) -> None:
        self.storage = storage
        self.url = url
        self.dropped_bytes = 0
        """Bytes at the end of open segments that a crash had left half written, and that were not used."""
        self._sealed: list[Segment] = []
        self._longest = 1  # steps of the longest segment
        self._tail: dict[int, LedgerLine] = {}
        self._last: LedgerLine | None = None
        self._cached: tuple[Segment, dict[int, LedgerLine]] | None = None

    @classmethod
    def open(cls, storage: Storage, url: str) -> LedgerReader:
        """Open a ledger to read what it holds now; a folder that does not exist is an empty ledger.

        Raises:
            RunDirectoryError: the last segment is damaged, or a segment is missing.
        """
        for _ in range(_LOAD_TRIES):
            ledger = cls(storage, url)
            with suppress(FileNotFoundError):  # A living writer has just sealed its open segment: look again.
                ledger._load(Listing.of(storage.names(url)))
                return ledger
        raise RunDirectoryError(f"{url}: the ledger's files went away while they were read, {_LOAD_TRIES} times. Try again.")

    @property
    def last(self) -> LedgerLine | None:
        """The newest line, None while there is none."""
        return self._last

    def expect(self, step: int) -> LedgerLine | None:
        """The line of a step, None if the ledger does not reach it.

        Raises:
            RunDirectoryError: its segment is damaged or missing.
        """
        if self._last is None or not 1 <= step <= self._last.step:
            return None
        return self._file_with(step)[step]

    def lines(self, first: int = 1, last: int | None = None) -> Iterator[LedgerLine]:
        """The lines of steps `first` to `last` (both included; by default to the end), in order, each proven by the chain.

        Raises:
            RunDirectoryError: a segment is damaged or missing, or two segments disagree about a step.
        """
        end = self._last.step if self._last is not None else 0
        end = end if last is None else min(last, end)
        before = self.expect(first - 1) if first <= end else None
        chain = before.chain if before is not None else NO_CHAIN
        step = max(first, 1)
        while step <= end:
            for line in self._run_from(step):
                if line.step > end:
                    return
                if not folds(line, chain):
                    raise RunDirectoryError(
                        f"{self.url}: the chain of step {line.step}, {line.chain}, does not follow from that of the "
                        f"step before, {chain}: segments of different runs lie here. {_MEND}"
                    )
                yield line
                chain, step = line.chain, line.step + 1

    def unit_digests(self, since: Mapping[int, tuple[int, int]]) -> Recorded:
        """The recorded digests of the units of all windows at or after a place in each source.

        Segments are read backward, until for each source one is met that tells of a window at or before its place; this
        finds all of them because windows are recorded in order.

        Args:
            since: source -> (epoch, window).

        Returns:
            The units of each such window that was recorded.
        """
        found: dict[tuple[int, int, int], UnitDigests] = {}
        wanted = dict(since)
        upto = self._last.step if self._last is not None else 0
        while wanted and upto >= 1:
            lines = self._file_with(upto)
            reached = set()
            for line in lines.values():
                for source, place in wanted.items():
                    for use in line.windows.get(source, ()):
                        if (use.epoch, use.window) >= place:
                            found[source, use.epoch, use.window] = {(group, unit): digest for group, unit, digest in use.units}
                        if (use.epoch, use.window) <= place:
                            reached.add(source)
            wanted = {source: place for source, place in wanted.items() if source not in reached}
            upto = next(iter(lines)) - 1
        return found

    def _file_with(self, step: int) -> Mapping[int, LedgerLine]:
        """All lines of the file that holds a step within the ledger."""
        if step in self._tail:
            return self._tail
        if holders := self._overlapping(step, step):
            return self._lines_of(holders[-1])
        end = self._last.step if self._last is not None else 0
        raise RunDirectoryError(
            f"{self.url}: no segment of the ledger holds step {step}, though it reaches step {end}. "
            "Restore the missing file from a copy of the directory."
        )

    def _run_from(self, step: int) -> list[LedgerLine]:
        """The lines from `step` to the end of its file. Two writers may have sealed the same steps: then they are compared."""
        lines = self._file_with(step)
        for segment in self._overlapping(step, max(lines)):
            for other in self._lines_of(segment).values():
                if differing := differing_fields(lines.get(other.step, other), other):
                    said = describe(differing, "elsewhere", f"in {segment.name}")
                    raise RunDirectoryError(f"{self.url}: two segments disagree about step {other.step}: {said}. {_MEND}")
        return [line for line in lines.values() if line.step >= step]

    def _overlapping(self, first: int, last: int) -> list[Segment]:
        """The sealed segments with any of the steps `first` to `last`, in order."""
        begin = bisect.bisect_left(self._sealed, first - self._longest + 1, key=lambda segment: segment.first)
        end = bisect.bisect_right(self._sealed, last, key=lambda segment: segment.first)
        return [segment for segment in self._sealed[begin:end] if segment.last >= first]

    def _lines_of(self, segment: Segment) -> dict[int, LedgerLine]:
        if self._cached is None or self._cached[0] != segment:
            url = self.storage.join(self.url, segment.name)
            try:
                data = self.storage.read_bytes(url)
            except FileNotFoundError as error:
                raise RunDirectoryError(f"{url}: the ledger segment was deleted. Restore it from a copy of the directory.") from error
            self._cached = segment, {line.step: line for line in unseal(data, segment, url)}
        return self._cached[1]

    def _load(self, listing: Listing) -> None:
        self._sealed = list(listing.sealed)
        self._longest = max([1, *(segment.last - segment.first + 1 for segment in self._sealed)])
        if self._sealed:
            newest = max(self._sealed, key=lambda segment: segment.last)
            self._last = self._lines_of(newest)[newest.last]
        for opened in listing.open:
            for line in self._salvage(opened):
                self._tail[line.step] = self._last = line

    def _salvage(self, opened: OpenSegment) -> list[LedgerLine]:
        """The lines that an open segment adds to the ledger. FileNotFoundError if it has been sealed meanwhile."""
        url = self.storage.join(self.url, opened.name)
        lines, dropped = read_open(self.storage.read_bytes(url), opened.first)
        if dropped:
            self.dropped_bytes += dropped
            _log.warning("%s: the last %d bytes were half written when a writer died; their steps will be made again", url, dropped)
        end = self._last.step if self._last is not None else 0
        chain = self._last.chain if self._last is not None else NO_CHAIN
        if any(line.step == end and line.chain != chain for line in lines):
            raise RunDirectoryError(f"{url}: step {end} differs from the one that is sealed: segments of different runs lie here. {_MEND}")
        new = [line for line in lines if line.step > end]
        if new and (new[0].step != end + 1 or not folds(new[0], chain)):
            raise RunDirectoryError(
                f"{url}: step {new[0].step} does not follow from step {end}, the last that is sealed. "
                "Restore the missing segment from a copy of the directory."
            )
        return new


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where two ledgers first differ: `fields` maps each differing field to its values in the first and in the second."""

    step: int
    fields: Mapping[str, tuple[Any, Any]]


def diff(one: LedgerReader, other: LedgerReader) -> Difference | None:
    """The first step that two ledgers record differently, of those that both have; None if they agree on all of them."""
    for line, counterpart in zip(one.lines(), other.lines(), strict=False):
        if fields := differing_fields(line, counterpart):
            return Difference(step=line.step, fields=fields)
    return None
