"""The one place where the reference touches the product: its state, in the reference's own words."""

from __future__ import annotations

import json
from typing import Any


def state_as_plain(state: dict[str, Any] | bytes, *, best_fit: bool) -> dict[str, Any]:
    """The integers of the product's state in the form of `reference_state`, so that the two compare with `==`.

    It reads the bytes as `zephon_ray/state.py` documents them and trusts nothing else of the product.

    Args:
        state: what `Loader.state_dict()` returned (a mapping with the bytes as its one value of that type), or the bytes.
        best_fit: the recipe's packing, which the state does not repeat.
    """
    if isinstance(state, dict):
        (state,) = [value for value in state.values() if isinstance(value, bytes)]
    body = json.loads(state)["state"]
    columns, used = body["sources"], body["open_used"]
    sources = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    lanes = range(len(used))
    plain = {
        "step": body["step"],
        "chain": bytes.fromhex(body["chain"]),
        "sources": [
            {"epoch": s["epoch"], "window": s["window"], "places": _expand(s["slots"]), "dealt": list(s["dealt"])} for s in sources
        ],
        "places": [[(s["windows"][lane], s["indices"][lane]) for s in sources] for lane in lanes],
        "counts": [[s["counts"][lane] for s in sources] for lane in lanes],
    }
    if best_fit:
        assert set(body["open_source"]) == {-1}, "best_fit leaves no piece partly used"
        return plain | {"given": list(used)}
    pieces = list(zip(body["open_source"], used, strict=True))
    assert all((source == -1) == (pairs == 0) for source, pairs in pieces), "pairs used, and of no piece, or a piece of none"
    return plain | {"partial": [None if source == -1 else (source, pairs) for source, pairs in pieces]}


def _expand(slots: list[int]) -> list[tuple[int, int]]:
    """(ordinal, unit) of each slot, from runs of equal neighbours: count, ordinal, unit, count, ..."""
    runs = zip(slots[::3], slots[1::3], slots[2::3], strict=True)
    return [(ordinal, unit) for count, ordinal, unit in runs for _ in range(count)]
