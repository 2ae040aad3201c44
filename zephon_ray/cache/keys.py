"""Keys: the names of entries. Equal names, equal ids.

Everything that the ids of a unit depend on is in its name, and the state of its shard stands for the text; or the text itself, where
nothing tells a shard's states apart. Which engine encodes is not, for none may change an id; but who asks for the reference alone
(`engine: hf`), after another one failed perhaps, takes only what was made by it. `on_bad_record` is not either: units with a bad record
are not taken where one is to stop the run.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from zephon_ray.errors import StorageError
from zephon_ray.hashing import canonical_json, sha256_hex
from zephon_ray.manifest import ShardFile
from zephon_ray.plan.windows import UnitTask
from zephon_ray.recipe import CONTRACT_VERSION
from zephon_ray.stages.texts import Texts
from zephon_ray.stages.tokenise import Options
from zephon_ray.stages.unit import SCHEMA
from zephon_ray.storage import FileVersion, Storage, is_local

FORMAT = 1
"""Of entries and their names. A change of the bytes of either is another number."""
TRUST_S = 300.0
"""How long the version of an object in a store is taken as it was last seen. That of a local file is looked at each time."""
_MOST_SHARDS = 1 << 16


class Names:
    """Names entries for one tokenizer and one set of document options.

    Args:
        options: of the run.
    """

    def __init__(self, options: Options) -> None:
        self._common: dict[str, Any] = {
            "format": FORMAT,
            "schema": SCHEMA.to_string(),
            "contract": CONTRACT_VERSION,
            "tokenizer": options.tokenizer_sha256,
            "bos": options.bos,
            "eos": options.eos,
            "encode_special_tokens": options.encode_special_tokens,
            "reference": options.engine == "hf",
        }
        self._max_document_bytes = options.max_document_bytes
        self._store = options.storage.endpoint_url

    def of_unit(self, task: UnitTask, tag: str) -> str:
        """The name, 64 hex digits, of a unit of a shard that is in a state.

        Args:
            task: the unit.
            tag: of the shard's version (`storage.FileVersion`).
        """
        group, shard = task.group, task.group.shard
        return self._name(
            shard=[None if is_local(shard.url) else self._store, shard.url, shard.size, tag, shard.format, shard.compression],
            unit=[group.ordinal, group.unit_bytes, task.unit],
            text_field=group.text_field,
            max_document_bytes=self._max_document_bytes,
        )

    def of_texts(self, texts: Texts) -> str:
        """The name of what a unit's texts are as ids, wherever they were read."""
        return self._name(texts=[texts.digest(), texts.nbytes, len(texts)])

    def _name(self, **parts: Any) -> str:
        return sha256_hex(canonical_json({**self._common, **parts}))


@dataclass(slots=True)
class _Seen:
    """A shard as it was first seen (`tag`; None: it can never be told from another state), and when it was last looked at."""

    tag: str | None
    looked: float


class Versions:
    """The states of shards, as one worker has seen them.

    The worker's reader may hold a file open, so what it reads is of the state that was seen first. A shard that was seen in two states,
    or in one that may have changed without a trace, has none any more.

    Args:
        storage: where they lie.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    def tag(self, shard: ShardFile, *, anew: bool = False) -> str | None:
        """What tells the state of a shard; None where nothing does, or it cannot be found out.

        Args:
            shard: the shard. Its size must be the manifest's.
            anew: ask the store, however lately it was asked.
        """
        seen = self._seen.get(shard.url)
        if seen is None:
            version = self._version(shard)
            good = version is not None and version.settled and version.size == shard.size
            seen = self._seen[shard.url] = _Seen(tag=version.tag if version and good else None, looked=time.monotonic())
            if len(self._seen) > _MOST_SHARDS:
                self._seen.popitem(last=False)
        elif seen.tag is not None and (anew or self._is_stale(shard, seen)):
            version = self._version(shard)
            seen.looked = time.monotonic()
            if version is None or (version.tag, version.size) != (seen.tag, shard.size):
                seen.tag = None
        self._seen.move_to_end(shard.url)
        return seen.tag

    def _is_stale(self, shard: ShardFile, seen: _Seen) -> bool:
        return is_local(shard.url) or time.monotonic() - seen.looked > TRUST_S

    def _version(self, shard: ShardFile) -> FileVersion | None:
        with suppress(OSError, StorageError):  # whoever reads the shard tells of it
            return self._storage.version(shard.url)
        return None
