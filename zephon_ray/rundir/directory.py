"""`RunDirectory`: makes or opens a run's directory, and refuses one that belongs to another run or to something else."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from zephon_ray.errors import RunDirectoryError
from zephon_ray.hashing import canonical_json
from zephon_ray.ledger import Ledger, LedgerReader
from zephon_ray.manifest import Shard, SourceManifest
from zephon_ray.recipe import Recipe
from zephon_ray.rundir.audit import Audit
from zephon_ray.rundir.lock import Lock, changes, outside_identity, versions_now
from zephon_ray.rundir.readers import Readers, load_readers, save_readers
from zephon_ray.rundir.states import States
from zephon_ray.storage import Storage

_LOCK = "recipe.lock.yaml"
_READERS = "readers.json"
_OURS = ("manifests/", "audit/", "audit.jsonl")
"""What a run may have left that died before its lock was written, or whose lock another one is writing."""
_SHOWN = 8

_log = logging.getLogger(__name__)


class RunDirectory:
    """A run's directory that exists. Use `create_or_open` to run, `open` to look at one.

    Args:
        storage: opens URLs.
        url: the directory.
        lock: what its `recipe.lock.yaml` says.
    """

    def __init__(self, storage: Storage, url: str, lock: Lock) -> None:
        self.storage = storage
        self.url = url
        self.lock = lock
        self.states = States(storage, storage.join(url, "states"))
        self._audit = Audit(storage, url)

    @classmethod
    def create_or_open(
        cls,
        storage: Storage,
        url: str,
        recipe: Recipe,
        fingerprint: str,
        fields: Mapping[str, Any],
        manifests: Sequence[SourceManifest],
    ) -> RunDirectory:
        """The directory of this run, made if it is new; its audit trail says so.

        Args:
            storage: opens URLs.
            url: the directory; locally it is made so that only its owner may enter it.
            recipe: what is run.
            fingerprint: of recipe, tokenizer and data, 64 hex digits.
            fields: what the fingerprint is made of, as `recipe.fingerprint_fields` gives it.
            manifests: of each source.

        Raises:
            RunDirectoryError: it is the directory of another run (each field that differs is named, with both values), of no
                run, or damaged.
        """
        lock = Lock(fingerprint=fingerprint, fields=fields, versions=versions_now(), recipe=recipe)
        created = False
        if not storage.exists(storage.join(url, _LOCK)):
            _refuse_foreign(storage, url)
            created = _write_lock(storage, url, lock)
        directory = cls.open(storage, url)
        directory.check_same_run(fingerprint, fields, manifests)
        for name in ("manifests", "ledger", "states"):
            storage.makedirs(storage.join(url, name), private=True)
        directory._write_manifests(manifests)
        if created:
            directory.audit("created", fingerprint=fingerprint, versions=lock.versions)
        else:
            changed = changes(outside_identity(directory.lock.recipe, directory.lock.versions), outside_identity(recipe, lock.versions))
            directory.audit("opened", changed={name: list(values) for name, values in changed.items()})
        return directory

    @classmethod
    def open(cls, storage: Storage, url: str) -> RunDirectory:
        """A directory that exists, to look at; nothing is written.

        Raises:
            RunDirectoryError: it is not the directory of a run, or damaged.
        """
        place = storage.join(url, _LOCK)
        try:
            text = storage.read_bytes(place).decode()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RunDirectoryError(f"{url}: is not the directory of a run: it has no {_LOCK}. Give the DIR of `run --out DIR`.") from error
        except UnicodeDecodeError as error:
            raise RunDirectoryError(f"{place}: is damaged: not UTF-8 at byte {error.start}. Restore it from a copy.") from error
        return cls(storage, url, Lock.from_yaml(text, place))

    def check_same_run(self, fingerprint: str, fields: Mapping[str, Any], manifests: Sequence[SourceManifest]) -> None:
        """Refuse a recipe, a tokenizer or data that are not this run's.

        Args:
            fingerprint: of recipe, tokenizer and data, 64 hex digits.
            fields: what it is made of.
            manifests: of each source.

        Raises:
            RunDirectoryError: names each field that differs, with both values, and the shards.
        """
        if self.lock.fingerprint == fingerprint:
            return
        differing = changes(self.lock.fields, fields)
        lines = [f"  {name}: the directory has {recorded!r}, this run {now!r}" for name, (recorded, now) in differing.items()]
        for manifest in manifests:
            if f"sources[{manifest.source}].manifest" in differing:
                lines += [f"    {line}" for line in self._shards_that_differ(manifest)]
        raise RunDirectoryError(
            f"{self.url}: is the directory of another run. What differs:\n" + "\n".join(lines) + "\n"
            "Undo the change to go on with that run, or give another --out for a new one."
        )

    def open_ledger(self) -> Ledger:
        """Become the ledger's one writer; older ones are stopped."""
        return Ledger.open(self.storage, self.storage.join(self.url, "ledger"))

    def read_ledger(self) -> LedgerReader:
        """The ledger as it is now."""
        return LedgerReader.open(self.storage, self.storage.join(self.url, "ledger"))

    def manifest(self, source: int) -> SourceManifest:
        """The manifest of a source (its index in the recipe) as it was when the run began.

        Raises:
            RunDirectoryError: the file is missing or damaged.
        """
        place = self._manifest_place(source)
        try:
            manifest = SourceManifest.from_json(json.loads(self.storage.read_bytes(place)))
            recorded = self.lock.fields.get(f"sources[{source}].manifest", "")
            if manifest.digest() != recorded:
                raise ValueError(f"its digest is {manifest.digest()}, the lock says {recorded}")
        except (FileNotFoundError, ValueError, TypeError, KeyError) as error:
            raise RunDirectoryError(f"{place}: the manifest is missing or damaged ({error}). Restore it from a copy.") from error
        return manifest

    def readers(self) -> Readers | None:
        """The ranks that the feed of this run let in last; None for a run that was never fed."""
        return load_readers(self.storage, self.storage.join(self.url, _READERS))

    def save_readers(self, readers: Readers) -> None:
        """Remember them, for a feed that is started again."""
        save_readers(self.storage, self.storage.join(self.url, _READERS), readers)

    def audit(self, event: str, **fields: Any) -> None:
        """Add to the audit trail that something happened, now, by this process.

        Args:
            event: what, as "resumed".
            fields: more about it, as JSON.
        """
        self._audit.record(event, fields)

    def verify_audit(self) -> list[dict[str, Any]]:
        """The audit trail, oldest first, proven by its chain of hashes.

        Raises:
            RunDirectoryError: an entry was edited, removed or moved.
        """
        return self._audit.entries()

    def _manifest_place(self, source: int) -> str:
        return self.storage.join(self.url, "manifests", f"{source:04d}.json")

    def _write_manifests(self, manifests: Sequence[SourceManifest]) -> None:
        """Write those that are missing; a run that died while it began left some out."""
        for manifest in manifests:
            place = self._manifest_place(manifest.source)
            if not self.storage.exists(place):
                self.storage.write_bytes(place, canonical_json(manifest.to_json()))

    def _shards_that_differ(self, now: SourceManifest) -> list[str]:
        try:
            recorded = {shard.path: _sizes(shard) for shard in self.manifest(now.source).shards}
        except RunDirectoryError as error:
            _log.warning("which shards of source %s differ is not known: %s", now.name, error)
            return []
        differing = changes(recorded, {shard.path: _sizes(shard) for shard in now.shards})
        lines = [
            f"shard {path}: {was or 'missing'} in the directory, {is_now or 'missing'} now" for path, (was, is_now) in differing.items()
        ]
        return lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} more shards"] if len(lines) > _SHOWN else [])


def _sizes(shard: Shard) -> str:
    groups = f", {sum(rows for rows, _ in shard.row_groups)} rows in {len(shard.row_groups)} row groups" if shard.row_groups else ""
    return f"{shard.size} bytes{groups}"


def _refuse_foreign(storage: Storage, url: str) -> None:
    """Refuse a directory without a lock that holds anything but what a beginning run leaves."""
    try:
        names = [entry.path for entry in storage.list_files(url) if not entry.is_directory_mark]
    except FileNotFoundError:
        names = []
    except NotADirectoryError as error:
        raise RunDirectoryError(f"{url}: is a file, not a directory. Give another --out.") from error
    foreign = sorted(name for name in names if not name.startswith(_OURS) and not name.rpartition("/")[2].startswith(".zephon-"))
    if foreign:
        shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise RunDirectoryError(f"{url}: holds something else ({shown}) and no {_LOCK}. Give an empty or new directory as --out.")


def _write_lock(storage: Storage, url: str, lock: Lock) -> bool:
    """Whether this process was the one that made it."""
    try:
        storage.makedirs(url, private=True)
        storage.write_bytes(storage.join(url, _LOCK), lock.to_yaml().encode(), exclusive=True)
    except FileExistsError:
        return False
    except (PermissionError, NotADirectoryError) as error:
        raise RunDirectoryError(f"{url}: cannot be made: {error.strerror}. Give a --out that can be written.") from error
    return True
