"""JSON lines: the texts of a block of lines, each record read as Python's `json` reads it.

orjson is the quick way; what it refuses is given to Python's `json`, which takes more (NaN, huge numbers, lone surrogates). Nothing that
orjson takes is refused by Python. Two limits are fixed here because Python's own depend on its version and settings: 4300 digits of an
integer, and MAX_DEPTH levels of nesting.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import orjson

from zephon_ray.stages.lines import BLANKS, BOM, LineBlock
from zephon_ray.stages.texts import LeftOut

MAX_DEPTH = 1024
"""Deepest nesting that is read: orjson's limit."""
MAX_DIGITS = 4300
"""Longest integer that is read: Python's default limit."""

_UNREAD: Any = object()
_KEYS_SHOWN = 8
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_RECURSION = threading.Lock()


class _BadRecordError(ValueError):
    """Why a record is bad."""


def texts_of_lines(block: LineBlock, text_field: str, max_bytes: int, left_out: LeftOut) -> list[str]:
    """The texts of a unit's lines, in file order.

    Args:
        block: the lines.
        text_field: name or dotted path; a key that has the dotted name itself wins.
        max_bytes: longest line without its line end; a longer one is a bad record.
        left_out: takes what is left out.

    Raises:
        BadUnitError: a bad record, where `left_out` says that it ends the unit.
    """
    data, start = block.data, block.offset
    if start == 0 and data.startswith(BOM):
        data, start = data[len(BOM) :], len(BOM)
    lines = data.split(b"\n")
    path = text_field.split(".")
    loads, texts, empty = orjson.loads, [], 0
    for number, line in enumerate(lines):
        record = _UNREAD
        try:
            if len(line) <= max_bytes:
                record = loads(line)
                text = record[text_field]
                if type(text) is str and text:
                    texts.append(text)
                    continue
        except (ValueError, KeyError, TypeError):
            pass  # looked at again with care
        if not line.strip(BLANKS):
            continue
        try:
            text = _text_of(line, record, text_field, path, max_bytes)
        except _BadRecordError as reason:
            left_out.bad_record(_place(lines, number, start, block.line), str(reason))
            continue
        if text:
            texts.append(text)
        else:
            empty += 1
    left_out.empty += empty
    if block.too_long:
        left_out.bad_record(_place(lines, len(lines) - 1, start, block.line), f"longer than max_document_bytes={max_bytes}")
    return texts


def _place(lines: Sequence[bytes], number: int, start: int, first_line: int | None) -> str:
    offset = start + sum(map(len, lines[:number])) + number
    return f"at byte {offset}" if first_line is None else f"line {first_line + number} (byte {offset})"


def _text_of(line: bytes, record: object, text_field: str, path: Sequence[str], max_bytes: int) -> str | None:
    """The text of a record, None for null.

    Raises:
        _BadRecordError: the record is bad; says why.
    """
    if len(line) > max_bytes:
        raise _BadRecordError(f"{len(line)} bytes, longer than max_document_bytes={max_bytes}")
    if record is _UNREAD:
        record = _python_record(line)
    if not isinstance(record, dict):
        raise _BadRecordError(f"not a JSON object but {_kind(record)}")
    value: object = record
    for name in (text_field,) if text_field in record else path:
        if value is None:  # as in columns, where null has null within
            return None
        if not isinstance(value, dict) or name not in value:
            keys = ", ".join(repr(key) for key in list(record)[:_KEYS_SHOWN])
            more = ", ..." if len(record) > _KEYS_SHOWN else ""
            raise _BadRecordError(f"no field {text_field!r}; its keys are [{keys}{more}]")
        value = value[name]
    if value is None:
        return None
    if not isinstance(value, str):
        raise _BadRecordError(f"field {text_field!r} holds {_kind(value)}, not a text")
    if not _is_unicode(value):
        raise _BadRecordError(f"field {text_field!r} holds half of a surrogate pair, which is no character")
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _python_record(line: bytes) -> object:
    """A record that orjson refused, as Python's `json` gives it."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise _BadRecordError(f"not valid UTF-8: byte 0x{line[error.start]:02x} at {error.start} of the line") from None
    if text.count("[") + text.count("{") > MAX_DEPTH // 2 and _depth(text) > MAX_DEPTH:
        raise _BadRecordError(f"nested deeper than {MAX_DEPTH} levels")
    try:
        return _decode(text)
    except json.JSONDecodeError as error:
        raise _BadRecordError(f"not JSON: {error.msg} at character {error.pos} of the line") from None
    except ValueError as error:
        raise _BadRecordError(f"not JSON: {error}") from None


def _decode(text: str) -> object:
    """Python's own decoder, with room for MAX_DEPTH levels wherever it is called from."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        # Before Python 3.12 nesting counts as calls. The limit is the process's, so it is raised by one thread at a time.
        with _RECURSION:
            limit = sys.getrecursionlimit()
            sys.setrecursionlimit(limit + 4 * MAX_DEPTH)
            try:
                return _DECODER.decode(text)
            finally:
                sys.setrecursionlimit(limit)


def _integer(digits: str) -> int:
    """No integer of a record is ever used, and turning long ones into numbers takes quadratic time."""
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"an integer of more than {MAX_DIGITS} digits")
    return 0


_DECODER = json.JSONDecoder(parse_int=_integer)


def _depth(text: str) -> int:
    """How deep brackets are nested outside strings."""
    return max(accumulate(1 if c in "[{" else -1 for c in _STRING.sub("", text) if c in "[]{}"), default=0)


def _kind(value: object) -> str:
    """What JSON calls a value's type."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "null")
