"""What is wrong with a recipe, in sentences: the faults that pydantic finds in single fields, and those of fields together.

Each sentence starts with the path of a field as a recipe's author would write it, shows the value, and says how to mend it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from decimal import ROUND_UP, Context, Decimal
from fractions import Fraction
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from zephon_ray.recipe_fields import MAX_SOURCES, SCHEMA_VERSION, Fields, RecipeFields, decimal_text, exact_weight, keys_of, model_of

MIN_SHARE = Fraction(1, 1 << 14)
"""The least weight, as a part of the sum of all: below it the integer shares would be off by more than 1 %."""

Loc = tuple[int | str, ...]


def dotted(loc: Sequence[int | str]) -> str:
    """("sources", 0, "weight") as "sources[0].weight"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def shown(value: object) -> str:
    """A value as YAML would spell it, cut short; never what a mapping or list holds, which may be long or secret."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list | tuple):
        return "{...}" if isinstance(value, dict) else "[...]" if value else "[]"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"(an integer of {value.bit_length()} bits)"
    text = decimal_text(value) if isinstance(value, Decimal) and value.is_finite() else str(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"' if isinstance(value, str) else text


# ------------------------------------------------------------------ single fields


def field_problems(error: ValidationError) -> tuple[list[str], set[Loc]]:
    """What pydantic found, as sentences, and the places of single fields that are not usable for it."""
    sentences: list[str] = []
    faults: set[Loc] = set()
    for fault in error.errors(include_url=False):
        if fault["type"] == "recipe_joint":
            sentences += fault["ctx"]["problems"]
        else:
            sentences.append(_sentence(fault))
            faults.add(fault["loc"])
    return sentences, faults


def _sentence(fault: ErrorDetails) -> str:
    kind, loc, value = fault["type"], fault["loc"], fault["input"]
    path = dotted(loc)
    if kind == "extra_forbidden":
        return _unknown_key(loc, value)
    if kind == "missing":
        return f"{path} is missing. {_how_to_add(loc)}"
    if kind == "recipe_secret":
        return f"{path} {fault['ctx']['sentence']}"
    if kind == "invalid_key":
        return f"{dotted(loc[:-1]) or 'the recipe'} has the key {shown(value)}, which YAML does not read as text. Put it in quotes"
    return f"{path}={shown(value)} {_fault(kind, fault, value)}"


_FAULTS: dict[str, str] = {
    "recipe": "{sentence}",
    "int_type": "is {kind}, not a whole number. {whole}",
    "bool_type": "is {kind}, not a boolean. Write true or false without quotes",
    "string_type": "is {kind}, not text. Put the value in quotes",
    "string_unicode": "is not text that UTF-8 can hold. Remove the escapes \\ud800 to \\udfff",
    "string_too_short": "is empty. Write a text, or leave the field out if it has a default",
    "model_type": "is {kind}, not a mapping. Write its fields below it, or leave it out if all of them have defaults",
    "tuple_type": 'is {kind}, not a list. Begin each entry with "- "',
    "too_short": "is empty. Write at least one entry",
    "too_long": f"is too long. At most {MAX_SOURCES} sources can each have a weight of 2^-14 of the sum",
    "literal_error": "is not one of its values. Write {expected}{near}",
    "greater_than_equal": "is too small. Write at least {ge}",
    "less_than": "is too large. Write at most {most}",
}
"""By pydantic's type of the fault: what is wrong and how to mend it; follows "path=value "."""

_KINDS = {
    type(None): "empty (null)",
    bool: "a boolean",
    int: "a whole number",
    float: "a decimal number",
    str: "text",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
}


def _fault(kind: str, fault: ErrorDetails, value: object) -> str:
    ctx: dict[str, Any] = dict(fault.get("ctx", {}))
    ctx["kind"] = _KINDS.get(type(value), f"a {type(value).__name__}")
    ctx["whole"] = _as_whole_number(value)
    ctx["near"] = _near(value, str(ctx.get("expected", "")))
    ctx["most"] = ctx.get("lt", 0) - 1
    return _FAULTS.get(kind, "is not valid: {message}").format(**ctx, message=fault["msg"])


def _as_whole_number(value: object) -> str:
    """How to write what was probably meant, where it can be told."""
    try:
        number = Decimal(value if isinstance(value, str) else repr(value)) if isinstance(value, str | float) else None
        if number is not None and abs(number) < 1 << 64 and number == int(number):
            return f"Write {int(number)}, without quotes or decimal point"
    except (ArithmeticError, ValueError):
        pass  # no number at all: nothing can be told
    return "Write digits only, without quotes, decimal point or unit"


def _near(value: object, expected: str) -> str:
    """The value of a list such as "'wrap' or 'best_fit'" that was probably meant, if any."""
    if not isinstance(value, str):
        return ""
    close = difflib.get_close_matches(value.lower(), expected.replace("'", "").replace(" or ", ", ").split(", "), 1)
    return f' (did you mean "{close[0]}"?)' if close else ""


def _how_to_add(loc: Loc) -> str:
    if loc == ("schema",):
        return f"Write schema: {SCHEMA_VERSION}, which is what this version reads"
    return f"Add {loc[-1]}: ..." + (f" to {dotted(loc[:-1])}" if len(loc) > 1 else "")


def _model_at(loc: Loc) -> type[Fields]:
    """The model of the mapping at a place; of the nearest one round it for a place that is none."""
    model: type[Fields] = RecipeFields
    for part in loc:
        if isinstance(part, str) and part in keys_of(model):
            model = model_of(model.model_fields[keys_of(model)[part]].annotation) or model
    return model


def _places(model: type[Fields] = RecipeFields, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, path) of every field: where a key that stands in the wrong mapping belongs."""
    for key, name in keys_of(model).items():
        field = model.model_fields[name]
        inner = model_of(field.annotation)
        yield key, prefix + key
        if inner is not None:
            yield from _places(inner, f"{prefix}{key}[...]." if key == "sources" else f"{prefix}{key}.")


def _unknown_key(loc: Loc, value: object) -> str:
    where, key = loc[:-1], str(loc[-1])
    known = list(keys_of(_model_at(where)))
    near = difflib.get_close_matches(key.lower(), known, 1)
    elsewhere = [path for name, path in _places() if name == key]
    if elsewhere and not near:
        mend = f"Did you mean {' or '.join(elsewhere)}?"
    else:
        mend = (f'Did you mean "{near[0]}"? ' if near else "") + f"The keys of {dotted(where) or 'a recipe'} are {', '.join(known)}"
    # What somebody writes here by mistake is often a credential: it is not repeated.
    stored = where == ("execution", "storage")
    secret = "; credentials come from the environment, never from a recipe" if stored else ""
    return f"{dotted(loc)}{'' if stored else '=' + shown(value)} is not a key that is known. {mend}{secret}"


# ------------------------------------------------------------------ fields together


class _UnusableError(Exception):
    """A field that a check needs has a fault of its own."""


class FieldReader:
    """The values of single fields, defaults filled in, whether or not the rest of the recipe is valid.

    Args:
        data: the mapping of a recipe file, or a validated recipe.
        faults: where the values are not usable.
    """

    def __init__(self, data: object, faults: set[Loc]) -> None:
        self._data, self._faults = data, faults

    def __call__(self, *loc: int | str) -> Any:
        """The value at a place.

        Raises:
            _UnusableError: it, or a mapping round it, has a fault.
        """
        if any(loc[: len(fault)] == fault for fault in self._faults):
            raise _UnusableError
        value: Any = self._data
        model: type[Fields] = RecipeFields
        for part in loc:
            if isinstance(part, int):
                value = value[part]
            else:
                value, model = _child(value, model, part)
        return value

    def sources(self, key: str) -> Iterator[tuple[int, Any]]:
        """(index, value) of a field of each source in which it is usable."""
        for index in range(len(self("sources"))):
            try:
                yield index, self("sources", index, key)
            except _UnusableError:
                continue


def _child(value: Any, model: type[Fields], key: str) -> tuple[Any, type[Fields]]:
    """One field of a mapping or of a validated model, with the model of what it holds."""
    name = keys_of(model)[key]
    field = model.model_fields[name]
    child = getattr(value, name) if isinstance(value, Fields) else value.get(key, field.default)
    if child is PydanticUndefined:
        raise _UnusableError
    return child, model_of(field.annotation) or model


def joint_problems(read: FieldReader) -> list[str]:
    """The faults of fields together, each looked for wherever the fields concerned are valid themselves."""
    problems: list[str] = []
    for check in _CHECKS:
        try:
            problems.extend(check(read))
        except _UnusableError:
            continue
    return problems


def _lanes_divide_batch(read: FieldReader) -> Iterator[str]:
    batch, lanes = read("global_batch_size"), read("lanes")
    if batch % lanes:
        batches = either(x for x in (batch // lanes * lanes, -(-batch // lanes) * lanes) if x)
        yield (
            f"global_batch_size={batch} is not a multiple of lanes={lanes}. Use global_batch_size {batches},"
            f" or lanes {either(nearest(lanes, divisors(batch)))} (lanes cannot change inside a run)"
        )


def _names_differ(read: FieldReader) -> Iterator[str]:
    first: dict[str, int] = {}
    for index, name in read.sources("name"):
        if first.setdefault(name, index) != index:
            yield f"sources[{index}].name={shown(name)} is the name of sources[{first[name]}] too. Give each source a name of its own"


def _weights_suffice(read: FieldReader) -> Iterator[str]:
    weights = [exact_weight(read("sources", index, "weight")) for index in range(len(read("sources")))]
    total = sum(map(Fraction, weights), Fraction(0))
    for index, weight in enumerate(weights):
        if Fraction(weight) < MIN_SHARE * total:
            least = (total - Fraction(weight)) * MIN_SHARE / (1 - MIN_SHARE)
            yield (
                f"sources[{index}].weight={shown(weight)} is less than 2^-14 (1/16384) of the sum of all weights, {_rounded_up(total)}."
                f" Use at least {_rounded_up(least)}, or leave the source out"
            )


def _best_fit_has_pad(read: FieldReader) -> Iterator[str]:
    if read("packing", "algorithm") == "best_fit" and read("tokenizer", "pad") is None:
        yield (
            'tokenizer.pad=null is no token, but packing.algorithm="best_fit" fills rows up with it. Name the tokenizer\'s pad token,'
            ' or use packing.algorithm "wrap"'
        )


def _wrap_has_no_buffer(read: FieldReader) -> Iterator[str]:
    buffer = read("packing", "buffer")
    if read("packing", "algorithm") == "wrap" and buffer is not None:
        yield f'packing.buffer={buffer} does nothing with packing.algorithm="wrap". Remove it, or use packing.algorithm "best_fit"'


def _fail_counts_nothing(read: FieldReader) -> Iterator[str]:
    if read("on_bad_record") == "fail":
        for index, limit in read.sources("max_bad_records"):
            if limit is not None:
                yield (
                    f'sources[{index}].max_bad_records={limit} does nothing with on_bad_record="fail", which stops at the first.'
                    " Remove it, or write on_bad_record: skip"
                )


def _workers_in_order(read: FieldReader) -> Iterator[str]:
    low, high = read("execution", "workers", "min"), read("execution", "workers", "max")
    if low > high:
        yield f"execution.workers.min={low} is above execution.workers.max={high}. Lower min to {high}, or raise max to {low}"


_CHECKS: tuple[Callable[[FieldReader], Iterator[str]], ...] = (
    _lanes_divide_batch,
    _names_differ,
    _weights_suffice,
    _best_fit_has_pad,
    _wrap_has_no_buffer,
    _fail_counts_nothing,
    _workers_in_order,
)


# ------------------------------------------------------------------ numbers in sentences


def divisors(number: int) -> list[int]:
    """All divisors of a number in [1, 2^31), ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest(number: int, choices: Sequence[int]) -> list[int]:
    """The greatest choice below a number and the least above it, where there are such. `choices` ascend."""
    below, above = [c for c in choices if c < number], [c for c in choices if c > number]
    return below[-1:] + above[:1]


def either(numbers: Iterator[int] | Sequence[int]) -> str:
    """[8, 12] as "8 or 12"."""
    return " or ".join(map(str, numbers))


def _rounded_up(number: Fraction) -> str:
    """A positive fraction to six digits, not below itself."""
    rounded = Context(prec=6, rounding=ROUND_UP).divide(Decimal(number.numerator), Decimal(number.denominator))
    return decimal_text(rounded) if -12 < rounded.adjusted() < 21 else str(rounded)
