"""Texts that every machine with Python has: the source code of its standard library, and its documentation.

Files are read and parsed, never imported or run. What an installation lacks (some leave the tests out) is made up for with the code of
installed packages, and how much that was is told.
"""

from __future__ import annotations

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = frozenset({"site-packages", "dist-packages"})
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LEAST_DOCSTRING = 60
"""Characters; shorter ones are labels, not text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """One document and where it is from.

    Args:
        origin: as "json/decoder.py" or "json.decoder.JSONDecoder"; never a path of the machine.
        text: the document.
    """

    origin: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Documents in a fixed order.

    Args:
        documents: the documents.
        size: UTF-8 bytes of all.
        filled: UTF-8 bytes of those that come from installed packages.
    """

    documents: tuple[Text, ...]
    size: int
    filled: int


def code_texts(*, least: int, most: int | None = None) -> Texts:
    """Python files, whole: those of the standard library with its tests, and of installed packages where these are too few.

    Args:
        least: UTF-8 bytes at least, if the machine has them.
        most: stop when about so many bytes are there; None takes the whole library.
    """
    return _gathered(_files(_library()), _files(_installed(), "site-packages/"), least, most)


def prose_texts(*, least: int, most: int | None = None) -> Texts:
    """Documentation: the language's help topics, and the docstrings of all modules of the standard library that are no tests.

    Args:
        least: UTF-8 bytes at least, if the machine has them.
        most: stop when about so many bytes are there; None takes all.
    """
    modules = (text for text in _files(_library()) if not {"test", "tests"} & set(text.origin.split("/")[:-1]))
    return _gathered(_with_topics(_docstrings(modules)), _docstrings(_files(_installed(), "site-packages/")), least, most)


def _gathered(texts: Iterator[Text], more: Iterator[Text], least: int, most: int | None) -> Texts:
    documents, size, own = [], 0, 0
    for stage, (stream, enough) in enumerate(((texts, most), (more, least))):
        for document in stream if enough is None or size < enough else ():
            documents.append(document)
            size += len(document.text.encode())
            if enough is not None and size >= enough:
                break
        own = size if stage == 0 else own
    return Texts(documents=tuple(documents), size=size, filled=size - own)


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _installed() -> Path:
    return Path(sysconfig.get_path("purelib"))


def _files(root: Path, prefix: str = "") -> Iterator[Text]:
    """Python files below `root` in the order of their paths; those that are not UTF-8, or empty, are left out."""
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _PACKAGES]
        paths += [(Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    for path in sorted(paths):
        try:
            text = (root / path).read_bytes().decode()
        except (OSError, UnicodeDecodeError):  # tests of encodings are broken on purpose
            continue
        if text.strip():
            yield Text(origin=prefix + path, text=text)


def _with_topics(docstrings: Iterator[Text]) -> Iterator[Text]:
    from pydoc_data.topics import topics  # data, spelled as a module

    for name in sorted(topics):
        yield Text(origin=f"topic {name}", text=topics[name])
    yield from docstrings


def _docstrings(files: Iterator[Text]) -> Iterator[Text]:
    for file in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # escapes that Python frowns upon are the library's affair
                tree = ast.parse(file.text)
        except (SyntaxError, ValueError, RecursionError):  # files for tests of the parser
            continue
        module = file.origin.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        yield from _docstrings_below(tree, module)


def _docstrings_below(node: ast.AST, name: str) -> Iterator[Text]:
    if isinstance(node, _DOCUMENTED):
        text = ast.get_docstring(node)
        if text and len(text) >= _LEAST_DOCSTRING:
            yield Text(origin=name, text=text)
    for child in getattr(node, "body", ()):
        inner = getattr(child, "name", None)
        yield from _docstrings_below(child, f"{name}.{inner}" if inner else name)
