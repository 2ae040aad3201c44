"""Writing a ledger: one writer at a time, and nothing lost that was flushed.

A writer claims the next *generation* by creating `GENERATION.claim`, takes over what a dead writer left in its open segment,
and from then on every older writer that goes on is stopped at its next flush or seal.

What a crash can lose: nothing that `flush` returned for. Locally a line survives the death of the process as soon as `append`
returns, and the death of the machine after at most `SYNC_SECONDS` of appending; on object storage lines are held in memory
for at most `SEAL_SECONDS` of appending. Lost lines are made again by the run.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from zephon_ray.errors import ReplayError, RunDirectoryError
from zephon_ray.hashing import canonical_json
from zephon_ray.ledger.line import NO_CHAIN, LedgerLine, describe, differing_fields, folds
from zephon_ray.ledger.reader import LedgerReader
from zephon_ray.ledger.segments import Listing, OpenFile, OpenSegment, Segment, claim_name, open_record, seal, sync_folder
from zephon_ray.storage import Storage, local_path

SEAL_STEPS = 1000
"""Lines of a segment at most."""
SEAL_SECONDS = 10.0
"""On object storage a segment is written when its first line is this old, looked at when a line is appended."""
SYNC_SECONDS = 1.0
"""On local disks lines are synced at most this often, looked at when a line is appended, and at every flush and seal."""
_CLAIM_TRIES = 1000


class Ledger(LedgerReader):
    """The one writer of a ledger; see the module for what is safe when. Used by one thread at a time.

    Args:
        storage: opens URLs.
        url: the ledger's folder.
        generation: the generation that this writer has claimed, from 1.
        claim: what it wrote into its claim.
    """

    def __init__(self, storage: Storage, url: str, generation: int, claim: bytes) -> None:
        super().__init__(storage, url)
        self.generation = generation
        self._claim = claim
        self._local = storage.is_local(url)
        self._file: OpenFile | None = None
        self._pending: list[bytes] = []
        self._since = self._synced = 0.0
        self._closed = self._fenced = False

    @classmethod
    def open(cls, storage: Storage, url: str) -> Ledger:
        """Claim the next generation, so that older writers stop, and take over where they ended.

        Raises:
            RunDirectoryError: the last segment is damaged, or a segment is missing.
            StorageError: the store cannot be written.
        """
        storage.makedirs(url, private=True)
        ledger = cls(storage, url, *_claim(storage, url))
        ledger._load(Listing.of(storage.names(url)))
        return ledger

    def append(self, line: LedgerLine) -> bool:
        """Record a step. One that is already there is compared instead.

        Returns:
            True if the line is new, False if it was there, equal in every field.

        Raises:
            ReplayError: the step is there and differs, or its chain does not follow from the step before.
            RunDirectoryError: it leaves a gap; a newer writer has taken over; or the ledger is closed.
            StorageError: the store cannot be written.
        """
        if self._closed:
            raise RunDirectoryError(f"{self.url}: this ledger is closed; step {line.step} cannot be appended. Open it again.")
        if self._fenced:
            self._check_claim()
        end = self._last.step if self._last is not None else 0
        if line.step <= end:
            self._compare(line)
            return False
        self._check_follows(line, end)
        encoded = line.to_json()
        now = time.monotonic()
        if not self._pending:
            self._since = self._synced = now
        if self._local:
            if self._file is None:
                self._file = OpenFile(self._folder / OpenSegment(first=line.step, generation=self.generation).name)
            self._file.append(open_record(encoded))
        self._pending.append(encoded)
        self._tail[line.step] = self._last = line
        if len(self._pending) >= SEAL_STEPS or (not self._local and now - self._since >= SEAL_SECONDS):
            self._seal()
        elif self._local and now - self._synced >= SYNC_SECONDS:
            self.flush()
        return True

    @property
    def sealed(self) -> bool:
        """Every line appended so far lies in a sealed segment."""
        return not self._pending

    def flush(self) -> None:
        """Make every line appended so far safe. On object storage this writes a segment, so call it at checkpoints, not steps.

        Raises:
            RunDirectoryError: a newer writer has taken over; it may not have these lines.
            StorageError: the store cannot be written.
        """
        if not self._pending:
            return
        if self._file is None:
            self._seal()
            return
        self._file.sync()
        self._check_claim()
        self._synced = time.monotonic()

    def close(self) -> None:
        """Seal what is open. Further calls do nothing.

        Raises:
            RunDirectoryError: a newer writer has taken over.
            StorageError: the store cannot be written.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._pending and not self._fenced:
                self._seal()
        finally:
            if self._file is not None:
                self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _compare(self, line: LedgerLine) -> None:
        recorded = self.expect(line.step)
        differing = differing_fields(recorded, line) if recorded is not None else {"step": (None, line.step)}
        if differing:
            raise ReplayError(
                f"step {line.step} was made again and differs from the ledger {self.url}: "
                f"{describe(differing, 'recorded', 'made now')}. Data, code or a machine has changed: run `verify`."
            )

    def _check_follows(self, line: LedgerLine, end: int) -> None:
        if line.step != end + 1:
            raise RunDirectoryError(
                f"{self.url}: the ledger ends at step {end}, step {line.step} would leave a gap. "
                f"Resume from a state of step {end} or before."
            )
        chain = self._last.chain if self._last is not None else NO_CHAIN
        if not folds(line, chain):
            raise ReplayError(
                f"step {line.step}: chain {line.chain} of digest {line.digest} does not follow from {chain}, the chain of "
                f"step {end} in the ledger {self.url}. The run was resumed from a state with another history."
            )

    def _seal(self) -> None:
        """Turn the lines of the open segment into a sealed one.

        The claim is checked before, to leave no stray segment, and after, because only a claim that is still the newest once
        the lines are safe proves that the next writer will find them.
        """
        self._check_claim()
        last = next(reversed(self._tail))
        segment = Segment(generation=self.generation, first=last - len(self._pending) + 1, last=last)
        self._write(segment, self._pending)
        self._check_claim()
        if self._file is not None:
            self._file.close()
            self._file = None
            self._delete(OpenSegment(first=segment.first, generation=self.generation))
        self._cached = segment, self._tail
        self._tail, self._pending = {}, []

    def _check_claim(self) -> None:
        newest = self.generation
        while self.storage.exists(self.storage.join(self.url, claim_name(newest + 1))):
            newest += 1
        # A store without exclusive create lets two writers make the same claim: the one whose claim was overwritten gives way.
        own = b""
        with suppress(FileNotFoundError):
            own = self.storage.read_bytes(self.storage.join(self.url, claim_name(self.generation)))
        self._fenced = self._fenced or newest > self.generation or own != self._claim
        if self._fenced:
            what = f"another writer, generation {newest}, has taken over" if own else "this writer's claim was deleted"
            raise RunDirectoryError(f"{self.url}: {what}; this one is generation {self.generation}. Stop it; only the newest may go on.")

    def _load(self, listing: Listing) -> None:
        """Seal what dead writers left in open segments, under their own generation, and go on after it."""
        super()._load(Listing(sealed=listing.sealed, open=(), newest_generation=listing.newest_generation))
        for opened in listing.open:
            with suppress(FileNotFoundError):  # A still newer writer is doing the same.
                lines = self._salvage(opened)
                if lines:
                    segment = Segment(first=lines[0].step, last=lines[-1].step, generation=opened.generation)
                    self._write(segment, [line.to_json() for line in lines])
                    self._last = lines[-1]
                self._delete(opened)

    def _write(self, segment: Segment, lines: list[bytes]) -> None:
        self.storage.write_bytes(self.storage.join(self.url, segment.name), seal(lines))
        if self._local:
            sync_folder(self._folder)  # Only then may the open segment go.
        self._sealed.append(segment)
        self._longest = max(self._longest, len(lines))

    def _delete(self, opened: OpenSegment) -> None:
        self.storage.delete(self.storage.join(self.url, opened.name))

    @property
    def _folder(self) -> Path:
        return Path(local_path(self.url))


def _claim(storage: Storage, url: str) -> tuple[int, bytes]:
    """Claim the lowest generation above all that are known."""
    generation = Listing.of(storage.names(url)).newest_generation
    who = {"host": socket.gethostname(), "pid": os.getpid(), "nonce": os.urandom(16).hex()}
    for _ in range(_CLAIM_TRIES):
        generation += 1
        claim = canonical_json({**who, "generation": generation})
        place = storage.join(url, claim_name(generation))
        with suppress(FileExistsError):
            storage.write_bytes(place, claim, exclusive=True)
            if storage.read_bytes(place) == claim:
                return generation, claim
    raise RunDirectoryError(f"{url}: {_CLAIM_TRIES} writers claimed generations up to {generation} first. Start one writer at a time.")
