"""Rendering: tables and numbers for people, JSON for scripts, progress for a terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_WIDTH = 140
"""Of output that does not go to a terminal."""


def console(file: IO[str]) -> Console:
    """A console on a file; lines are of one width where that is no terminal."""
    wide = not file.isatty() and "COLUMNS" not in os.environ
    return Console(file=file, width=_WIDTH if wide else None, highlight=False, soft_wrap=False)


def show(*parts: Any, file: IO[str] | None = None) -> None:
    """Print tables and lines on stdout, or on another file. Strings are taken as they stand, not as markup."""
    file = file or sys.stdout
    out = console(file)
    with out.capture() as captured:
        for part in parts:
            out.print(Text(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))
    # Not through the console, which pads lines to its width and ends the process with 1 (here: a difference) on a closed pipe.
    file.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))
    file.flush()


def say(sentence: str) -> None:
    """Tell on stderr what goes on."""
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()


def emit(value: Any) -> None:
    """One JSON value on a line of stdout, flushed."""
    sys.stdout.write(json.dumps(plain(value), allow_nan=False) + "\n")
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """Dataclasses as dictionaries, also within others."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, words: Container[int] = (0,)) -> Table:
    """A table; the columns in `words` are words, the others numbers. Cells are never cut."""
    made = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="left" if number in words else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def pairs_of(facts: Iterable[tuple[str, str]]) -> Table:
    """Names with their values, without lines."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in facts:
        made.add_row(Text(name), Text(value))
    return made


def size(count: float) -> str:
    """Bytes in powers of 1000."""
    return f"{count:.0f} B" if count < 1000 else number(count) + "B"


def number(count: float) -> str:
    """A number in three digits and a power of 1000, with a blank before the power."""
    if abs(count) < 1000:
        return f"{count:.0f}" if float(count).is_integer() or abs(count) >= 100 else f"{count:.1f}"
    steps = min(4, (len(str(round(abs(count)))) - 1) // 3)
    count /= 1000**steps
    digits = 2 if abs(count) < 10 else 1 if abs(count) < 100 else 0
    return f"{count:.{digits}f} {'kMGT'[steps - 1]}"


def percent(part: float) -> str:
    return f"{100 * part:.2f} %"


def mixture(names: Sequence[str], pairs: Sequence[int], targets: Sequence[float]) -> str:
    """Realised against wanted parts of the mixture."""
    total = max(1, sum(pairs))
    parts = (f"{n} {percent(p / total)} (target {percent(t)})" for n, p, t in zip(names, pairs, targets, strict=True))
    return ", ".join(parts)


@contextmanager
def progress(*, wanted: bool, columns: Sequence[str]) -> Iterator[Progress | None]:
    """A progress line on stderr; None where that is no terminal or none is wanted.

    Args:
        wanted: by the user.
        columns: of text, as rich formats them, after the bar.
    """
    if not (wanted and sys.stderr.isatty()):
        yield None
        return
    texts = [TextColumn(column) for column in columns]
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *texts, TimeElapsedColumn(),
        console=console(sys.stderr), transient=True,
    ) as bar:  # fmt: skip
        yield bar


def program() -> str:
    """How the reader can call this program from where he stands."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return "python -m zephon_ray"
    found = shutil.which(called.name)
    if found and Path(found).resolve() == called.resolve():
        return called.name
    return os.path.relpath(called) if called.exists() and called.name == "zephon-ray" else "zephon-ray"
