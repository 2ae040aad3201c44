"""A ledger line: what one step of a run was, in integers and hex. It knows nothing of files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zephon_ray.hashing import canonical_json, chain_digest

LeftOutCounts = tuple[int, int, int]
"""(bad records, empty texts, documents of fewer than two ids)."""

UnitDigests = Mapping[tuple[int, int], int]
"""(group, unit) -> 64-bit digest of the unit's text."""

Recorded = Mapping[tuple[int, int, int], UnitDigests]
"""(source, epoch, window) -> the digests of the window's units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowUse:
    """A window at the step that first used it.

    Args:
        epoch: epoch of the source, >= 0.
        window: window of the epoch, >= 0.
        units: (group, unit, digest of the unit's text in [0, 2^64)) of each unit of the window, in slot order.
    """

    epoch: int
    window: int
    units: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerLine:
    """One step.

    Args:
        step: the step, from 1.
        digest: digest of the global batch, 32 lower-case hex digits.
        chain: chain digest after this step, 32 lower-case hex digits.
        pairs: for each source the pairs of all pieces begun since the run began.
        padding: padding pairs of this step's batch.
        left_out: source -> the records left out of the windows that this step is the first to use; sources without any are
            left out.
        windows: source -> the windows that this step is the first to use, ascending by (epoch, window), also across steps
            (`Ledger.unit_digests` relies on it); sources without any are left out.
    """

    step: int
    digest: str
    chain: str
    pairs: tuple[int, ...]
    padding: int = 0
    left_out: Mapping[int, LeftOutCounts] = field(default_factory=dict)
    windows: Mapping[int, tuple[WindowUse, ...]] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Canonical JSON, one line without its end. A unit's digest is 16 hex digits, for 64 bits do not fit a JSON number."""
        return canonical_json(
            {
                "step": self.step,
                "digest": self.digest,
                "chain": self.chain,
                "pairs": self.pairs,
                "padding": self.padding,
                "left_out": {str(source): counts for source, counts in self.left_out.items()},
                "windows": {
                    str(source): [[use.epoch, use.window, [(g, u, f"{digest:016x}") for g, u, digest in use.units]] for use in uses]
                    for source, uses in self.windows.items()
                },
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> LedgerLine:
        """The line that `to_json` wrote.

        Raises:
            ValueError: `data` is not exactly what `to_json` writes of some line.
        """
        try:
            fields = json.loads(data)
            line = cls(
                step=fields["step"],
                digest=fields["digest"],
                chain=fields["chain"],
                pairs=tuple(fields["pairs"]),
                padding=fields["padding"],
                left_out={int(source): (bad, empty, short) for source, (bad, empty, short) in fields["left_out"].items()},
                windows={int(source): tuple(_window_use(use) for use in uses) for source, uses in fields["windows"].items()},
            )
            same = line.to_json() == data
        except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
            raise ValueError(f"not a ledger line ({error}): {data[:200]!r}") from error
        if not same:
            raise ValueError(f"not a ledger line in canonical form: {data[:200]!r}")
        return line


def _window_use(value: Any) -> WindowUse:
    epoch, window, units = value
    return WindowUse(epoch=epoch, window=window, units=tuple((group, unit, int(digest, 16)) for group, unit, digest in units))


NO_CHAIN = bytes(16).hex()
"""chain[0] of the contract."""


def folds(line: LedgerLine, previous: str) -> bool:
    """Whether `line.chain` follows from `previous`, the chain of the step before (32 hex digits)."""
    try:
        return chain_digest(bytes.fromhex(previous), line.step, bytes.fromhex(line.digest)).hex() == line.chain
    except ValueError:
        return False


def differing_fields(recorded: LedgerLine, made: LedgerLine) -> dict[str, tuple[Any, Any]]:
    """What two lines disagree about.

    Returns:
        field -> (its value in `recorded`, its value in `made`), None for what one of them lacks; empty if they are equal.
        Fields within fields are named one by one, as "pairs[1]" or "windows[0] epoch 2 window 5 group 7 unit 3".
    """
    if recorded == made:
        return {}
    one, other = dict(_flat(recorded)), dict(_flat(made))
    differing = {name: (one.get(name), other.get(name)) for name in one | other if one.get(name) != other.get(name)}
    return differing or {"order within windows": (recorded.to_json().decode(), made.to_json().decode())}


def describe(differing: Mapping[str, tuple[Any, Any]], recorded: str, made: str, limit: int = 8) -> str:
    """The first `limit` fields of `differing_fields` in words: "digest: RECORDED 'ab', MADE 'cd'; ..."."""
    shown = [f"{name}: {recorded} {one!r}, {made} {other!r}" for name, (one, other) in list(differing.items())[:limit]]
    more = [f"and {len(differing) - limit} more"] if len(differing) > limit else []
    return "; ".join(shown + more)


def _flat(line: LedgerLine) -> Iterator[tuple[str, Any]]:
    for name in ("step", "digest", "chain", "padding"):
        yield name, getattr(line, name)
    for source, pairs in enumerate(line.pairs):
        yield f"pairs[{source}]", pairs
    for source, counts in sorted(line.left_out.items()):
        for what, count in zip(("bad", "empty", "short"), counts, strict=True):
            yield f"left_out[{source}].{what}", count
    for source, uses in sorted(line.windows.items()):
        for use in uses:
            where = f"windows[{source}] epoch {use.epoch} window {use.window}"
            yield where, "used"
            for group, unit, digest in use.units:
                yield f"{where} group {group} unit {unit}", f"{digest:016x}"
