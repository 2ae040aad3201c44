"""The text of a recipe: YAML read without its traps, `path=value` overrides, and numbers written exactly.

Knows where things stand in a text, not what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import yaml

from zephon_ray.recipe_fields import decimal_text

_OTHER_BASE = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""YAML 1.1 reads 010 as 8 and 1:30 as 90."""


class _Loader(yaml.SafeLoader):
    """A safe loader that lists what plain YAML takes silently: keys written twice, merged mappings, numbers in other bases."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.problems: list[str] = []

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.Mark] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                # PyYAML 6.0.4 gives a wrong value where a merged mapping has itself overridden a merged key.
                self.problems.append(f"<< on line {key.start_mark.line + 1} merges mappings, which a recipe may not. Write the fields out")
            elif isinstance(key, yaml.ScalarNode):
                mark = first.setdefault((key.tag, key.value), key.start_mark)
                if mark is not key.start_mark:
                    lines = f"on line {mark.line + 1} and on line {key.start_mark.line + 1}"
                    self.problems.append(f"{key.value} is written twice in one mapping, {lines}. Keep one of them")
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if node.tag.endswith((":int", ":float")) and _OTHER_BASE.fullmatch(node.value):
            self.problems.append(
                f"{node.value} on line {node.start_mark.line + 1} is a number in another base to YAML (010 is 8, 1:30 is 90)."
                " Write it in plain decimal digits, or in quotes if it is text"
            )
        return node


def read_yaml(text: str, where: str) -> tuple[Any, list[str]]:
    """Read one YAML document.

    Args:
        text: the document.
        where: what the text is, for problems ("recipe.yaml").

    Returns:
        The value, None where the text cannot be read at all, and the problems found. A value beside problems can still
        be looked at, to find everything that is wrong at once.
    """
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data(), loader.problems
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        said = ", ".join(filter(None, (error.context, error.problem)))
        return None, [f"{where}{place}: not YAML: {said}. Mend the syntax there (a value with special characters needs quotes)"]
    except yaml.reader.ReaderError as error:
        return None, [f"{where}: not YAML: the character #x{error.character:04x} at position {error.position} is not allowed. Remove it"]
    except (ValueError, RecursionError) as error:
        # A date such as 2024-13-01, an integer of thousands of digits, thousands of brackets.
        return None, [f"{where}: holds a value that cannot be read: {error}. Put it in quotes if it is text"]


def apply_overrides(data: Any, overrides: Sequence[str]) -> list[str]:
    """Set fields of a recipe's mapping, in order; of equal paths the last wins.

    Args:
        data: the mapping, changed in place.
        overrides: each "path=value", the value in YAML: "lanes=4", "sources[0].weight=0.5", "sources.web.weight=0.5".

    Returns:
        Problems; an override that has one changes nothing.
    """
    problems: list[str] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals:
            problems.append(f"{path} is an override without a value. Write path=value, such as lanes=4 or sources[0].weight=0.5")
            continue
        value, found = read_yaml(text, f"{path}: the value of the override,")
        problems.extend(found)
        if not found:
            try:
                _set(data, _steps(path.strip(), data), value)
            except LookupError as error:
                problems.append(f"{path} cannot be overridden: {error.args[0]}")
    return problems


def _steps(path: str, data: Any) -> list[str | int]:
    """A path as keys and indices; the name of a source (which may hold dots) becomes its index."""
    if path.startswith("sources."):
        path = _by_index(path.removeprefix("sources."), data.get("sources"))
    if not re.fullmatch(r"\w+(\[\d{1,9}\])*(\.\w+(\[\d{1,9}\])*)*", path, re.ASCII):
        raise LookupError("it is not a path. Write keys with dots between them and indices in brackets, such as sources[0].weight")
    return [int(step[1:-1]) if step.startswith("[") else step for step in re.findall(r"\w+|\[\d+\]", path)]


def _by_index(rest: str, sources: Any) -> str:
    entries = sources if isinstance(sources, list) else []
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in entries]
    fitting = [name for name in names if isinstance(name, str) and name and (rest + ".").startswith(name + ".")]
    if not fitting:
        known = ", ".join(str(name) for name in names if name is not None) or "none"
        raise LookupError(f"no source has that name. The names are: {known}")
    name = max(fitting, key=len)
    if names.count(name) > 1:
        raise LookupError(f"{names.count(name)} sources are named {name}. Use an index, such as sources[{names.index(name)}]")
    return f"sources[{names.index(name)}]{rest[len(name) :]}"


def _set(data: Any, steps: list[str | int], value: Any) -> None:
    """Set one place, making the mappings on the way; checks the whole way before it changes anything."""
    at = data
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if isinstance(step, int):
            if not isinstance(at, list) or step >= len(at):
                raise LookupError(f"there is no entry {step}. It has {len(at) if isinstance(at, list) else 0} entries, counted from 0")
        elif not isinstance(at, dict):
            raise LookupError(f"there is no mapping that could hold {step}. Write that part of the recipe first")
        if following is None:
            at[step] = value
            return
        if isinstance(step, str) and isinstance(following, str) and at.get(step) is None:
            at[step] = {}
        at = at[step] if isinstance(step, int) else at.get(step)


class _Dumper(yaml.SafeDumper):
    """Writes decimals as plain numbers, and no anchors: every field stands where it belongs."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_decimal(dumper: yaml.SafeDumper, value: Decimal) -> yaml.ScalarNode:
    text = decimal_text(value)
    return dumper.represent_scalar(f"tag:yaml.org,2002:{'float' if '.' in text else 'int'}", text)


_Dumper.add_representer(Decimal, _represent_decimal)


def write_yaml(data: Any) -> str:
    """A value of mappings, lists, text, integers, booleans, decimals and None as YAML that `read_yaml` gives back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)
