"""Faults: how a command ends. An error is told in plain sentences on stderr, or under --json as one object on stdout.

Exit codes: 0 all is well; 1 something that must be equal is not; 2 the user's error; 3 a fault of the system; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from zephon_ray.errors import RecipeError, ZephonError

INTERRUPTED = 130
BROKEN_PIPE = 141
"""What shells report of a program that SIGPIPE ended."""

_USER, _SYSTEM = 2, 3
_USERS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)


def error_json(error: BaseException) -> dict[str, Any]:
    """An error as scripts read it: its kind, its message, and its single problems."""
    message = _message(error)
    problems = error.problems if isinstance(error, RecipeError) else [message]
    return {"kind": type(error).__name__, "message": message, "problems": problems}


def tell_error(error: BaseException, *, as_json: bool) -> int:
    """Tell of an error. Returns the exit code."""
    if os.environ.get("ZEPHON_RAY_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
    if as_json:
        sys.stdout.write(json.dumps({"error": error_json(error)}) + "\n")
        sys.stdout.flush()
    else:
        sys.stderr.write(sentences(error) + "\n")
    return exit_code(error)


def tell_usage(message: str, usage: str, *, as_json: bool) -> int:
    """Tell that the command line is wrong. Returns the exit code."""
    if as_json:
        sys.stdout.write(json.dumps({"error": {"kind": "UsageError", "message": message, "problems": [message]}}) + "\n")
        sys.stdout.flush()
    else:
        sys.stderr.write(f"{usage}\nzephon-ray: {message}\n" if usage else f"zephon-ray: {message}\n")
    return _USER


def exit_code(error: BaseException) -> int:
    """What a command ends with after an error."""
    if isinstance(error, ZephonError):
        return error.exit_code
    return _USER if isinstance(error, _USERS) else _SYSTEM


def sentences(error: BaseException) -> str:
    """The message for a terminal; several problems stand in a list."""
    if isinstance(error, RecipeError) and len(error.problems) > 1:
        return f"zephon-ray: {len(error.problems)} problems:\n" + "\n".join(f"  - {problem}" for problem in error.problems)
    return f"zephon-ray: {_message(error)}"


def _message(error: BaseException) -> str:
    if isinstance(error, ZephonError):
        return str(error)
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        mend = " Give a place that exists and that this user may use." if isinstance(error, _USERS) else ""
        return f"{place}{error.strerror or error}.{mend}"
    return f"a fault of zephon-ray itself: {type(error).__name__}: {error}. ZEPHON_RAY_DEBUG=1 shows where; please report it."


def mute_stdout() -> None:
    """Let nothing more be written to a pipe that nobody reads; else the interpreter complains of it when it ends."""
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
