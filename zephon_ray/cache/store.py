"""The files of a token cache under a URL: read and written whole, checked, and bounded.

    v1/HEX/NAME      HEX: the first digit of the name, so that entries fall into 16 sets of about the same size

Each set is bounded by itself, by whoever writes into it: a writer that finds it full lists it and deletes what was used longest ago. So
there is nothing to be locked, and a listing is of a sixteenth of the cache. A fault of the cache costs time, never a run.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from zephon_ray.cache.entry import BadEntryError, pack, rewritten, unpack, written_at
from zephon_ray.errors import StorageError
from zephon_ray.plan.windows import UnitTask
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.stages.unit import TokenisedUnit
from zephon_ray.storage import Storage, join

SETS = 16
FILLED = 0.75
"""A set that is full is emptied down to this share."""
OTHERS = 1 / 16
"""On average so much of a set is written, by all writers together, between two listings of it."""
LOCAL_USE_S, STORE_USE_S = 60.0, 86_400.0
"""Use is noted when the last note is older than this: on a disk as the file's time, in a store by writing the entry again."""
PAUSE_S = 60.0
"""After a fault the cache is left alone for so long."""
_TRIES, _RETRY_S = 3, 5

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CacheCounters:
    """What a cache did for one worker.

    Args:
        hits: entries that were found and are sound.
        misses: entries that were not there.
        corrupt: entries that were cut or damaged; the unit is tokenised and written again.
        written: units that were put there.
        faults: reads and writes that failed for another reason.
    """

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    written: int = 0
    faults: int = 0


class TokenCache:
    """Entries under a URL. It belongs to one thread.

    Args:
        url: absolute path or URL of a folder.
        max_bytes: of all entries together, at least 1.
        spec: how stores are reached. Faults are waited for much less than those of data are.
    """

    def __init__(self, url: str, max_bytes: int, spec: StorageSpec) -> None:
        limits = {"max_tries": min(spec.max_tries, _TRIES), "retry_seconds": min(spec.retry_seconds, _RETRY_S)}
        self._storage = Storage(spec.model_copy(update=limits))
        self._url = url
        self._bound = _bound(url, max_bytes, self._storage.spec)
        self._resume = self._resume_writing = 0.0
        self.counters = CacheCounters()

    def get(self, name: str, task: UnitTask) -> TokenisedUnit | None:
        """The unit of that name, as the task's; None where there is none, or none that can be used.

        Raises:
            UserError: nothing serves the URL.
        """
        if time.monotonic() < self._resume:
            return None
        url = self._bound.url_of(name)
        try:
            data = self._storage.read_bytes(url)
            unit = unpack(name, data, task)
        except FileNotFoundError:
            self.counters.misses += 1
            return None
        except BadEntryError as error:
            self.counters.corrupt += 1
            _log.warning("token cache: %s is cut or damaged (%s). Its unit is tokenised again", url, error)
            return None
        except (OSError, StorageError) as error:
            self._fault("read", error)
            self._resume = time.monotonic() + PAUSE_S
            return None
        self.counters.hits += 1
        self._note_use(name, data)
        return unit

    def _note_use(self, name: str, data: bytes) -> None:
        url = self._bound.url_of(name)
        if self._storage.is_local(url):
            with suppress(OSError):  # deleted since, or on a disk that is only read
                self._storage.refresh(url, LOCAL_USE_S)
        elif (now := int(time.time())) - written_at(data) > STORE_USE_S:
            self._write(name, rewritten(name, data, now))

    def put(self, name: str, unit: TokenisedUnit, task: UnitTask) -> None:
        """Keep a unit, if there may be room for it. One without an error only."""
        if time.monotonic() >= max(self._resume, self._resume_writing):
            data = pack(name, unit, task, int(time.time()))
            if data is not None and self._write(name, data):
                self.counters.written += 1

    def _write(self, name: str, data: bytes) -> bool:
        try:
            if self._bound.make_room(self._storage, name, len(data)):
                self._storage.write_bytes(self._bound.url_of(name), data, durable=False)
                return True
        except (OSError, StorageError) as error:
            self._fault("written to", error)
            self._resume_writing = time.monotonic() + PAUSE_S
        return False

    def _fault(self, what: str, error: Exception) -> None:
        self.counters.faults += 1
        _log.warning("token cache %s cannot be %s, and is left alone for %.0f s: %s", self._url, what, PAUSE_S, error)


class _Bound:
    """How full the sets are, as far as this process knows. Shared by its threads."""

    def __init__(self, url: str, max_bytes: int) -> None:
        self._url, self._most = url, max_bytes // SETS
        self._lock = threading.Lock()
        self._known: dict[str, int] = {}
        self._told = False

    def url_of(self, name: str) -> str:
        return join(self._url, "v1", name[0], name)

    def make_room(self, storage: Storage, name: str, size: int) -> bool:
        """Make room for an entry in its set; False where it is too large for any."""
        if size > self._most:
            self._tell(size)
            return False
        with self._lock:
            known = self._known.get(name[0])
            # Others write too. Names are even, so this is a draw that needs no generator.
            drawn = int(name[1:9], 16) * self._most * OTHERS < size << 32
            if known is None or known + size > self._most or drawn:
                known = self._sweep(storage, name[0], size)
            self._known[name[0]] = known + size
        return True

    def _sweep(self, storage: Storage, digit: str, room: int) -> int:
        """List a set, and if it has no room delete what was used longest ago. Returns the bytes that are left."""
        folder = join(self._url, "v1", digit)
        entries = sorted(storage.ages(folder), key=lambda entry: (entry.written_s, entry.name))
        total = sum(entry.size for entry in entries)
        if total + room > self._most:
            aim = max(0, int(self._most * FILLED) - room)
            for entry in entries:
                if total <= aim:
                    break
                storage.delete(join(folder, entry.name))
                total -= entry.size
        return total

    def _tell(self, size: int) -> None:
        if not self._told:
            self._told = True
            _log.warning(
                "token cache: a unit of %d bytes is not kept: none above a sixteenth of execution.token_cache_bytes is. Raise that, or"
                " lower unit_bytes",
                size,
            )


@functools.lru_cache(maxsize=16)
def _bound(url: str, max_bytes: int, spec: StorageSpec) -> _Bound:
    """One for all threads of a process."""
    del spec  # another endpoint is another store
    return _Bound(url, max_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """What lies in a cache."""

    entries: int
    size: int


def measure(url: str, spec: StorageSpec) -> CacheSize:
    """Count the entries of a cache and their bytes.

    Raises:
        StorageError: the store goes on failing.
    """
    storage, found = Storage(spec), CacheSize(entries=0, size=0)
    for digit in "0123456789abcdef":
        entries = storage.ages(join(url, "v1", digit))
        found = replace(found, entries=found.entries + len(entries), size=found.size + sum(entry.size for entry in entries))
    return found
