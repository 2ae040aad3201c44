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
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_WIDEST = 100_000
"""No line is longer."""


def show(*parts: Any, file: IO[str] | None = None) -> None:
    """Print tables and lines on stdout, or on another file. Strings are taken as they stand, not as markup.

    Tables are as wide as they need, so that no number is ever broken; facts are wrapped where a terminal ends.
    """
    file = file or sys.stdout
    terminal = shutil.get_terminal_size().columns if file.isatty() else _WIDEST
    out = Console(file=file, width=_WIDEST, highlight=False)
    with out.capture() as captured:
        for part in parts:
            if isinstance(part, str):
                out.print(Text(part), soft_wrap=True)
            else:
                needed = Measurement.get(out, out.options, part).maximum
                out.print(part, width=needed if part.show_header else min(needed, terminal))
    # Not through the console, which pads lines to their width and ends the process with 1 (here: a difference) on a closed pipe.
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
    """A table; the columns in `words` are words, the others numbers."""
    made = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="left" if number in words else "right")
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
        console=Console(file=sys.stderr, highlight=False), transient=True,
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
