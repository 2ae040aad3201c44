"""The state of a stream after a step: everything that a restore needs, in canonical JSON with a checksum.

    {"checksum": sha256 of the canonical JSON of "state", "state": {...}}

where "sources" holds one list a field, each with one value a source: numbers of the source itself, lists of numbers a lane, and
for its slots runs of equal places, each three numbers (how many slots, ordinal, unit).

It holds integers and hashes only, never token data, is equal for every rank, and does not depend on what was read
ahead. At most 2 KB and 64 bytes a lane and source, and about 8 a slot where neighbours differ; equal neighbours are counted once.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_ray.errors import StateError
from zephon_ray.hashing import canonical_json, sha256_hex
from zephon_ray.lane_blocks import LanesState
from zephon_ray.plan.dealing import SourceStart
from zephon_ray.plan.windows import Position
from zephon_ray.recipe import CONTRACT_VERSION

FORMAT = 1
"""Version of the layout of the bytes."""

_FIELD_BYTES = 3
_MOST_PAIRS = 1 << 43
"""A lane's mixing count stays below it: 8.8 T pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a state belongs to.

    Args:
        fingerprint: 64 hex digits.
        fields: each identity field's path -> its value; fields of sources come last.
    """

    fingerprint: str
    fields: Mapping[str, Any]

    def field_digests(self) -> str:
        """Three bytes of sha256 a field, base64: enough to name the fields that differ, while the fingerprint decides."""
        digests = (hashlib.sha256(canonical_json(v)).digest()[:_FIELD_BYTES] for v in self.fields.values())
        return base64.b64encode(b"".join(digests)).decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """A stream after `step` (0: before the first).

    Args:
        step: the last one that was taken.
        chain: 16 bytes, all zero at step 0.
        lanes: where the lanes stand.
    """

    step: int
    chain: bytes
    lanes: LanesState


def to_bytes(state: StreamState, identity: Identity) -> bytes:
    """The state as bytes; equal states give equal bytes."""
    body = {
        "chain": state.chain.hex(),
        "contract": CONTRACT_VERSION,
        "fields": identity.field_digests(),
        "fingerprint": identity.fingerprint,
        "format": FORMAT,
        "open_source": state.lanes.open_source.tolist(),
        "open_used": state.lanes.open_used.tolist(),
        "sources": _sources_json(state.lanes.sources),
        "step": state.step,
    }
    return canonical_json({"checksum": sha256_hex(canonical_json(body)), "state": body})


def _sources_json(sources: Sequence[SourceStart]) -> dict[str, Any]:
    runs = [[(len(list(same)), *place) for place, same in groupby(s.position.places)] for s in sources]
    return {
        "counts": [s.counts.tolist() for s in sources],
        "dealt": [s.dealt.tolist() for s in sources],
        "epoch": [s.position.epoch for s in sources],
        "indices": [s.indices.tolist() for s in sources],
        "slots": [[number for run in of_source for number in run] for of_source in runs],
        "window": [s.position.window for s in sources],
        "windows": [s.windows.tolist() for s in sources],
    }


def from_bytes(data: bytes, identity: Identity) -> StreamState:
    """Read a state and check that it belongs to this run.

    Args:
        data: what `to_bytes` gave.
        identity: of this run.

    Raises:
        StateError: the bytes are damaged, of another version, or of a run with another recipe, tokenizer or data
            (every field that differs is named).
    """
    body = _open(data)
    _check_identity(body, identity)
    lanes, sources = int(identity.fields["lanes"]), _sources_in(list(identity.fields))
    columns = body.get("sources")
    if not isinstance(columns, dict) or any(not isinstance(c, list) or len(c) != sources for c in columns.values()):
        raise StateError(_damaged("sources"))
    step, chain = _place(body)
    state = StreamState(
        step=step,
        chain=chain,
        lanes=LanesState.of(
            [_source_from({name: c[i] for name, c in columns.items()}, i, identity) for i in range(sources)],
            open_source=_numbers(body.get("open_source"), "open_source", lanes, least=-1, limit=sources),
            open_used=_numbers(body.get("open_used"), "open_used", lanes, limit=_most_open(identity)),
        ),
    )
    _check_open(state.lanes, identity)
    if to_bytes(state, identity) != bytes(data):
        raise StateError(_damaged("its form"))
    return state


def place_in(data: bytes) -> tuple[int, bytes]:
    """The step and the chain of a state, whatever run it belongs to.

    Raises:
        StateError: the bytes are damaged or of another version.
    """
    return _place(_open(data))


def _place(body: Mapping[str, Any]) -> tuple[int, bytes]:
    chain = body.get("chain")
    if not isinstance(chain, str) or not re.fullmatch("[0-9a-f]{32}", chain):
        raise StateError(_damaged("chain"))
    return _number(body.get("step"), "step"), bytes.fromhex(chain)


def _source_from(value: Mapping[str, Any], source: int, identity: Identity) -> SourceStart:
    path, lanes = f"sources[{source}]", int(identity.fields["lanes"])
    flat = value.get("slots")
    runs = _numbers(flat, f"{path}.slots", len(flat) // 3 * 3 if isinstance(flat, list) else 0).reshape(-1, 3).tolist()
    if sum(run[0] for run in runs) > int(identity.fields[f"{path}.window_groups"]):
        raise StateError(_damaged(f"{path}.slots"))
    start = SourceStart(
        position=Position(
            epoch=_number(value.get("epoch"), f"{path}.epoch"),
            window=_number(value.get("window"), f"{path}.window"),
            places=tuple((ordinal, unit) for n, ordinal, unit in runs for _ in range(n)),
        ),
        dealt=_numbers(value.get("dealt"), f"{path}.dealt", lanes, limit=int(identity.fields["packing.max_document_tokens"]) + 1),
        windows=_numbers(value.get("windows"), f"{path}.windows", lanes),
        indices=_numbers(value.get("indices"), f"{path}.indices", lanes),
        counts=_numbers(value.get("counts"), f"{path}.counts", lanes, limit=_MOST_PAIRS),
    )
    if start.dealt.min() or start.windows.min():
        raise StateError(_damaged(f"{path}: the least of dealt and windows"))
    return start


def _most_open(identity: Identity) -> int:
    """More than the pairs that can be used of an open piece, or the rows that can be given of an open fill."""
    fields = identity.fields
    return int(fields["packing.max_document_tokens" if fields["packing.algorithm"] == "wrap" else "packing.buffer"])


def _check_open(lanes: LanesState, identity: Identity) -> None:
    """`wrap`: pairs are used of a piece exactly where a source has one open; `best_fit`: no piece is ever open."""
    wraps = identity.fields["packing.algorithm"] == "wrap"
    open_piece = lanes.open_source >= 0
    if (open_piece != (lanes.open_used > 0)).any() if wraps else open_piece.any():
        raise StateError(_damaged("open_source"))


def _open(data: bytes) -> dict[str, Any]:
    """The inner part, once versions and checksum are found right."""
    try:
        outer = json.loads(bytes(data).decode())
        body: dict[str, Any] = outer["state"]
        checksum = outer["checksum"]
        intact = isinstance(body, dict) and sha256_hex(canonical_json(body)) == checksum
    except (TypeError, ValueError, KeyError, RecursionError) as e:
        raise StateError(f"the state is damaged: {len(data)} bytes that are no state of zephon_ray ({e}). Use an older checkpoint") from e
    if not intact:
        raise StateError("the state is damaged: its checksum does not fit its content. Use an older checkpoint")
    found = (body.get("contract"), body.get("format"))
    if found != (CONTRACT_VERSION, FORMAT):
        raise StateError(
            f"the state is of contract {found[0]}, format {found[1]}; this version of zephon_ray reads contract {CONTRACT_VERSION},"
            f" format {FORMAT}."
            " Resume with the version that saved it"
        )
    return body


def _check_identity(body: dict[str, Any], identity: Identity) -> None:
    if body.get("fingerprint") == identity.fingerprint:
        return
    try:
        then = base64.b64decode(str(body.get("fields", "")), validate=True)
    except ValueError as e:
        raise StateError(_damaged("fields")) from e
    now = base64.b64decode(identity.field_digests())
    names = list(identity.fields)
    size = _FIELD_BYTES
    differ = [n for i, n in enumerate(names) if then[i * size : i * size + size] != now[i * size : i * size + size]]
    if len(then) != len(now):
        columns = body.get("sources")
        epochs = columns.get("epoch") if isinstance(columns, dict) else None
        count = f"sources (now {_sources_in(names)} of them, {len(epochs) if isinstance(epochs, list) else 'none'} in the state)"
        differ = [*(n for n in differ if not n.startswith("sources[")), count]
    values = identity.fields
    told = "; ".join(f"{n} (now {values[n]!r})" if n in values else n for n in differ) or "none that can be named"
    raise StateError(
        f"the state belongs to another run. Fields that differ: {told}."
        " Resume with the recipe, tokenizer and data that it was saved with, or start a new run"
    )


def _sources_in(names: list[str]) -> int:
    return len({n.split(".")[0] for n in names if n.startswith("sources[")})


def _damaged(path: str) -> str:
    return f"the state is damaged: {path} is missing or no such value as it should be. Use an older checkpoint"


def _number(value: Any, path: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise StateError(_damaged(path))
    return value


def _numbers(value: Any, path: str, n: int, least: int = 0, limit: int = 1 << 62) -> npt.NDArray[np.int64]:
    if not isinstance(value, list) or len(value) != n or not all(type(x) is int and least <= x < limit for x in value):
        raise StateError(_damaged(path))
    return np.array(value, np.int64)
