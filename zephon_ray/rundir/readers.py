"""Who reads a run's feed: remembered in its directory, since a feed that is started again knows nothing else of it."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass

from zephon_ray.hashing import canonical_json
from zephon_ray.storage import Storage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Readers:
    """The ranks that a feed let in last.

    Args:
        feed: the same for a feed that died and was started again, another for one that was served anew.
        generation: their number, from 1.
        incarnation: "RUN_ID:COUNT".
        dp_world_size: how many dp ranks they are.
        reading: they had not left, nor was the feed stopped, when this was written.
    """

    feed: str
    generation: int
    incarnation: str
    dp_world_size: int
    reading: bool


def save_readers(storage: Storage, place: str, readers: Readers) -> None:
    """Write them down, in place of those before.

    Raises:
        StorageError, OSError: the store cannot be written.
    """
    storage.write_bytes(place, canonical_json(asdict(readers)) + b"\n")


def load_readers(storage: Storage, place: str) -> Readers | None:
    """Those that were written down; None where none were. A damaged file is left aside with a warning: it only keeps old ranks out.

    Raises:
        StorageError, OSError: the store cannot be read.
    """
    try:
        data = storage.read_bytes(place)
    except FileNotFoundError:
        return None
    try:
        found = Readers(**json.loads(data))
        sound = canonical_json(asdict(found)) + b"\n" == data and ":" in found.incarnation and found.generation > 0
    except (ValueError, TypeError):
        sound = False
    if not sound:
        _log.warning("%s: is damaged (%d bytes), so which ranks read the feed last is not known", place, len(data))
        return None
    return found
