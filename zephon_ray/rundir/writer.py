"""`RunWriter`: writes the steps of a run down, and knows where to go on. One at a time writes to a directory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from zephon_ray.errors import StorageError
from zephon_ray.ledger import LedgerLine, LedgerReader, Recorded
from zephon_ray.manifest import SourceManifest
from zephon_ray.recipe import Recipe
from zephon_ray.rundir.directory import RunDirectory
from zephon_ray.rundir.states import STATE_EVERY
from zephon_ray.state import Identity, StreamState, from_bytes, to_bytes
from zephon_ray.storage import Storage


class RunWriter:
    """Ledger lines, and a state now and then, and after the last.

    Where nothing can be appended to a file, a writer that dies loses the lines since the last sealed segment, and whoever goes on must
    begin before them. So there each segment that is sealed for its age ends with a state: what has to be made again is what was lost.

    Args:
        directory: of the run.
        identity: of the run.

    Raises:
        RunDirectoryError, StorageError: the ledger cannot be opened to write.
    """

    def __init__(self, directory: RunDirectory, identity: Identity) -> None:
        self.directory, self._identity = directory, identity
        self.ledger = directory.open_ledger()
        self._sources = len(directory.lock.recipe.sources)
        self._latest: StreamState | None = None

    @classmethod
    def open(cls, recipe: Recipe, out: str, identity: Identity, manifests: Sequence[SourceManifest]) -> RunWriter:
        """Make or open the directory, and become its writer; older ones are stopped.

        Raises:
            RunDirectoryError: as `RunDirectory.create_or_open`.
            StorageError: the directory cannot be written.
        """
        storage = Storage(recipe.execution.storage)
        return cls(RunDirectory.create_or_open(storage, out, recipe, identity.fingerprint, identity.fields, manifests), identity)

    @property
    def last(self) -> LedgerLine | None:
        """The newest line, None while there is none."""
        return self.ledger.last

    def resume(self) -> tuple[bytes | None, Recorded]:
        """The newest state that the ledger reaches, and the digests of the windows that going on from it reads again.

        The audit trail says that the run was resumed, unless it is new.
        """
        end = self.ledger.last.step if self.ledger.last else 0
        found = self.nearest(end)
        if end or found:
            self.directory.audit("resumed", step=found[0].step if found else 0)
        return (found[1] if found else None), self.recorded(found[0] if found else None)

    def nearest(self, step: int) -> tuple[StreamState, bytes] | None:
        """The newest sound state at or before a step and not ahead of the ledger; None for the beginning.

        Raises:
            StateError: there are states, but each is damaged.
        """
        end = self.ledger.last.step if self.ledger.last else 0
        found = self.directory.states.nearest(min(step, end), lambda data: from_bytes(data, self._identity))
        return (from_bytes(found[1], self._identity), found[1]) if found else None

    def recorded(self, state: StreamState | None) -> Recorded:
        """What the ledger holds of the windows that are read again when going on from a state."""
        return recorded_since(self.ledger, state, self._sources)

    def write(self, line: LedgerLine, state: StreamState) -> bool:
        """Put a step into the ledger; False where it was there already, and equal."""
        new = self.ledger.append(line)
        self._latest = state
        if line.step % STATE_EVERY == 0:
            self.save()
        elif new and self.ledger.sealed:
            self.directory.states.save_passing(state.step, to_bytes(state, self._identity))
        return new

    def save(self) -> None:
        """Save the state after the last step that was written."""
        if self._latest is None:
            return
        self.save_state(self._latest)
        self._latest = None

    def save_state(self, state: StreamState) -> None:
        """Save the state of a step that was written, behind the ledger lines that lead to it."""
        self.ledger.flush()
        self.directory.states.save(state.step, to_bytes(state, self._identity))

    def recover(self) -> None:
        """After the directory refused something: make safe what was written, with a new segment if need be. Tried again until it works.

        Raises:
            StorageError, OSError: it refuses still.
            RunDirectoryError: another writer has taken over.
        """
        if self.directory.storage.is_local(self.directory.url):
            # A disk that failed once to sync cannot be trusted with that file again. Its lines are found by who opens the ledger.
            with suppress(StorageError, OSError):
                self.ledger.close()
            self.ledger = self.directory.open_ledger()
        else:
            self.ledger.flush()  # its lines are in memory only

    def close(self) -> None:
        """Save the last state, and seal the ledger."""
        try:
            self.save()
        finally:
            self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def recorded_since(ledger: LedgerReader, state: StreamState | None, sources: int) -> Recorded:
    """What a ledger holds of the windows that are read again when going on from a state (None: from the beginning)."""
    if state is None:
        return ledger.unit_digests(dict.fromkeys(range(sources), (0, 0)))
    positions = [source.position for source in state.lanes.sources]
    return ledger.unit_digests({source: (p.epoch, p.window) for source, p in enumerate(positions)})
