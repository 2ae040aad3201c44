"""The text column of a Parquet or Arrow file: where it stands in the schema, and whether its type can hold text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from zephon_ray.errors import SourceError

_NAMES_SHOWN = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class TextColumn:
    """A column of text, perhaps within structs.

    Args:
        path: names from the top-level column down.
        index: place of the top-level column.
        leaf: number of the column among a Parquet file's leaf columns.
    """

    path: tuple[str, ...]
    index: int
    leaf: int

    def of(self, batch: pa.RecordBatch) -> pa.Array:
        """The column's values in a batch that holds at least this column; a null struct has a null text."""
        values = _storage(batch.column(self.path[0]))
        for name in self.path[1:]:
            values = _storage(pc.struct_field(values, [values.type.get_field_index(name)]))
        return values


def locate(schema: pa.Schema, field: str, where: str) -> TextColumn:
    """Find the text column of a file: the column of that very name, else the one at that dotted path.

    Args:
        schema: of the file.
        field: name or dotted path.
        where: source and shard, for messages.

    Raises:
        SourceError: no such column, one that is there twice, or one of a type that holds no text.
    """
    for path in dict.fromkeys(((field,), tuple(field.split(".")))):
        found = _descend(schema, path)
        if found is None:
            continue
        index, kind, leaf = found
        if not _is_text(kind):
            inner = f" Within it are {_names(schema, prefix=field + '.')}." if pa.types.is_struct(kind) else ""
            raise SourceError(f"{where}: column {field!r} is {kind}, where a text is needed.{inner} Set text_field to a column of strings.")
        return TextColumn(path=path, index=index, leaf=leaf)
    if schema.names.count(field) > 1:
        raise SourceError(f"{where}: column {field!r} is there {schema.names.count(field)} times. Write the file with different names.")
    raise SourceError(f"{where}: no column {field!r}. It has {_names(schema)}. Set text_field to one of them.")


def _descend(schema: pa.Schema, path: tuple[str, ...]) -> tuple[int, pa.DataType, int] | None:
    """(place of the top-level column, type, leaf number) of a column; None where the path leads nowhere or is not unique."""
    parent: Any = pa.struct(list(schema))
    leaf = 0
    for name in path:
        at = parent.get_field_index(name) if pa.types.is_struct(parent) else -1
        if at < 0:
            return None
        leaf += sum(_leaves(parent.field(i).type) for i in range(at))
        parent = _storage_type(parent.field(at).type)
    return schema.get_field_index(path[0]), parent, leaf


def _leaves(kind: pa.DataType) -> int:
    """How many leaf columns a type takes in a Parquet file."""
    kind = _storage_type(kind)
    if pa.types.is_nested(kind):
        return sum(_leaves(kind.field(i).type) for i in range(kind.num_fields))
    return 1


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (
        pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary, pa.types.is_large_binary,
        pa.types.is_binary_view, pa.types.is_null,
    )  # fmt: skip
    return any(test(kind) for test in tests)


def _storage_type(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _storage(values: pa.Array) -> pa.Array:
    return values.storage if isinstance(values, pa.ExtensionArray) else values


def _names(schema: pa.Schema, prefix: str = "") -> str:
    """The names that could be meant, as a message shows them."""
    names = [name for name in _dotted(pa.struct(list(schema)), "") if name.startswith(prefix)]
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    return (shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")) or "no columns"


def _dotted(kind: Any, prefix: str) -> Iterator[str]:
    for i in range(kind.num_fields):
        field = kind.field(i)
        inner = _storage_type(field.type)
        if pa.types.is_struct(inner):
            yield from _dotted(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name
