"""What a fresh process is told to measure, by name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zephon_ray.benchmark.parts import measure_engine, measure_parts
from zephon_ray.benchmark.peers import measure_peer
from zephon_ray.benchmark.whole import measure_whole
from zephon_ray.errors import UserError, ZephonError

_MEASUREMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "whole": measure_whole,
    "parts": measure_parts,
    "engine": measure_engine,
    "peer": measure_peer,
}


def main(answer: str) -> None:
    """Measure what stdin says, and write the result to a file, whole."""
    task = json.load(sys.stdin)
    try:
        result = _MEASUREMENTS[task["what"]](spawned=task["spawned"], **task["arguments"])
    except ZephonError as error:
        result = {"error": str(error), "is_users": isinstance(error, UserError)}
    part = Path(f"{answer}.part")
    part.write_text(json.dumps(result))
    part.replace(answer)
    os._exit(0)  # whatever threads of others may hold it up: the process has done what it was for
