"""The fields of a recipe: one frozen pydantic model for each of its mappings, with types and ranges of single fields.

What concerns several fields at once stands in `recipe_checks`; paths, shares and the canonical form stand in `recipe`.
Nothing here does I/O or knows another module, so that the layers below the recipe (storage) can take their options from here.
"""

from __future__ import annotations

import re
from decimal import Decimal
from math import isfinite
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

SCHEMA_VERSION = 1
MAX_SOURCES = 1 << 14
"""More sources than this cannot all have a weight of 2^-14 of the sum."""

Problem = Literal["recipe", "recipe_secret"]


def _refuse(sentence: str, kind: Problem = "recipe") -> PydanticCustomError:
    """A fault that pydantic has no type for: `sentence` follows "path=value ". A "recipe_secret" hides the value."""
    return PydanticCustomError(kind, "{sentence}", {"sentence": sentence})


def decimal_text(value: Decimal) -> str:
    """A finite decimal without exponent and without zeros that say nothing: 2, 2.0 and 2.00 are all "2"."""
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def exact_weight(value: object) -> Decimal:
    """The exact decimal of a weight: for a float the one that its `repr` prints, since that is what the user wrote.

    Args:
        value: an int or float above 0, or a decimal that this function returned.

    Raises:
        PydanticCustomError: not a number, not finite, or not above 0.
    """
    if isinstance(value, str):
        raise _refuse(_weight_as_text(value))
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _refuse("is not a number. Write one above 0, such as 0.5 or 2; weights count against one another and need not add up to 1")
    if not (value.is_finite() if isinstance(value, Decimal) else isinstance(value, int) or isfinite(value)):
        raise _refuse("is not finite. Write a number above 0, such as 0.5 or 2")
    if value <= 0:
        raise _refuse("is not above 0. Write a number above 0, or leave the source out if nothing is to be read from it")
    exact = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    return Decimal(decimal_text(exact))


def _weight_as_text(text: str) -> str:
    """What to say of a weight in quotes, or in a notation that YAML 1.1 takes for text (1e-3, 5e6)."""
    if re.fullmatch(r"\d{1,20}(\.\d{1,20})?([eE][+-]?\d{1,2})?", text) and Decimal(text) > 0:
        return f"is text, not a number (YAML reads 1e-3, and whatever stands in quotes, as text). Write {decimal_text(Decimal(text))}"
    return "is text, not a number. Write a number above 0 without quotes, such as 0.5 or 2"


def _schema(value: object) -> object:
    # A Literal[1] would take true and 1.0, which equal 1.
    if type(value) is not int or value != SCHEMA_VERSION:
        raise _refuse(f"is no schema that this version reads. It reads schema: {SCHEMA_VERSION} only; mend it or use another release")
    return value


def _name(value: str) -> str:
    if "/" in value or any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise _refuse("holds a slash or a control character. Names stand in paths and messages: use letters, digits, '-', '_' and '.'")
    return value


def _location(value: str) -> str:
    """A local path, a glob, or a URL of any scheme."""
    if "\0" in value:
        raise _refuse("holds a zero byte, which no path can. Remove it")
    if "://" not in value:
        return value
    scheme, rest = value.split("://", 1)
    if scheme == "file" and not rest.startswith("/"):
        raise _refuse("is no absolute file URL. Write file:///folder/file, or a path without a scheme (relative to the recipe's folder)")
    if not rest.strip("/"):
        raise _refuse(f"names nothing after {scheme}://. Write the bucket or host and the path within it")
    if ":" in rest.split("/", 1)[0].rpartition("@")[0]:
        raise _refuse("holds credentials. Take them out: they come from the environment, never from a recipe", "recipe_secret")
    return value


def _endpoint(value: str) -> str:
    try:
        parts = urlsplit(value)
        port_is_sound = parts.port is None or parts.port > 0
    except ValueError:
        port_is_sound = False
    if not port_is_sound or parts.scheme not in ("http", "https") or not parts.hostname:
        raise _refuse("is no http or https address. Write one such as https://objects.example.com:9000")
    if "@" in parts.netloc:
        raise _refuse("holds credentials. Take them out: they come from the environment, never from a recipe", "recipe_secret")
    return value


def _as_tuple(value: object) -> object:
    """YAML gives lists; a strict tuple takes none."""
    return tuple(value) if isinstance(value, list) else value


Count = Annotated[int, Field(ge=1, lt=1 << 31)]
"""How many rows, lanes, places: small enough to be listed, and for positions to be int32."""
Size = Annotated[int, Field(ge=1, lt=1 << 63)]
"""Bytes and epochs: kept as 64-bit integers."""
Text = Annotated[str, Field(min_length=1)]
Location = Annotated[str, Field(min_length=1), AfterValidator(_location)]


class Fields(BaseModel):
    """What all mappings of a recipe have in common: frozen, strict, and no key that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class TokenizerSpec(Fields):
    """The tokenizer.json and the special tokens that are put round each document.

    Attributes:
        path: file or URL of a Hugging Face tokenizer.json; relative to the recipe's folder.
        bos: token put before each document, if any.
        eos: token put after each document, if any.
        pad: token that fills rows up; needed by `best_fit`.
        special_tokens_in_text: "plain": a control token spelled out in a document is ordinary text; "control": it is the control token.
    """

    path: Location
    bos: Text | None = None
    eos: Text | None = None
    pad: Text | None = None
    special_tokens_in_text: Literal["plain", "control"] = "plain"


class SourceSpec(Fields):
    """One source of the mixture.

    Attributes:
        name: unique in the recipe; stands in messages and the ledger.
        uri: file, folder, glob or URL; relative to the recipe's folder.
        format: of all shards; by default each shard's by the ending of its name.
        text_field: the field or column, or a dotted path to it.
        weight: share of the *tokens*, relative to the other weights; exact.
        epochs: how often it is read; None: for ever.
        unit_bytes: overrides the recipe's.
        window_groups: overrides that of `shuffle`.
        max_bad_records: how many bad records are skipped in one epoch, counted since the process started, before the run stops;
            None: any number. Only with `on_bad_record: skip`.
    """

    name: Annotated[Text, AfterValidator(_name)]
    uri: Location
    format: Literal["jsonl", "parquet", "arrow"] | None = None
    text_field: Text = "text"
    weight: Annotated[Decimal, BeforeValidator(exact_weight)] = Decimal(1)
    epochs: Size | None = None
    unit_bytes: Size | None = None
    window_groups: Count | None = None
    max_bad_records: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None


class ShuffleSpec(Fields):
    """Attributes:
    groups: whether each epoch reads the groups of a source in an order of its own; False: file order.
    documents: whether the pieces of a window are shuffled.
    window_groups: how many groups of a source are read side by side, and so mixed in a window.
    """

    groups: bool = True
    documents: bool = True
    window_groups: Count = 16


class PackingSpec(Fields):
    """Attributes:
    algorithm: "wrap": pieces end to end, no padding; "best_fit": no piece is cut by a row's end, rows are padded.
    max_document_tokens: pairs of the longest piece, in [1, 2^34); None: 8 sequences (with `best_fit` never more than one).
    buffer: pieces that `best_fit` places at a time; None: 65536 div lanes, at least 32, at most 1024.
    """

    algorithm: Literal["wrap", "best_fit"] = "wrap"
    max_document_tokens: Annotated[int, Field(ge=1, lt=1 << 34)] | None = None
    buffer: Count | None = None


class WorkersSpec(Fields):
    """How many workers read and tokenise: from `min` to `max`, as the runner needs them; and what each takes on a Ray cluster.

    Attributes:
        min: workers kept while the consumer is slow.
        max: workers at most.
        num_cpus: CPUs of a worker.
        resources: custom resources of a worker, name -> amount.
        labels: of the nodes that workers may be on, name -> value.
    """

    min: Count = 1
    max: Count = 8
    num_cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    resources: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {}
    labels: dict[str, str] = {}

    def __hash__(self) -> int:  # pydantic's own cannot take the dicts; it orders nothing
        return hash((self.min, self.max, self.num_cpus, *sorted(self.resources.items()), *sorted(self.labels.items())))

    def describe(self) -> str:
        """What one takes, for messages."""
        extra = [f"{amount:g} {name}" for name, amount in self.resources.items()] + [f"{k}={v}" for k, v in self.labels.items()]
        return ", ".join([f"{self.num_cpus:g} CPU", *extra])


class StorageSpec(Fields):
    """How object stores are reached. Credentials come from the environment, never from a recipe.

    Attributes:
        endpoint_url: of an S3-compatible store; None: that of the environment.
        region: of an S3 bucket; None: that of the environment.
        anonymous: read public buckets without credentials.
        max_tries: how often a request is made before it counts as failed.
        retry_seconds: no try is begun later than this after the first one; 0: a single try.
    """

    endpoint_url: Annotated[str, AfterValidator(_endpoint)] | None = None
    region: Text | None = None
    anonymous: bool = False
    max_tries: Annotated[int, Field(ge=1, le=1000)] = 12
    retry_seconds: Annotated[int, Field(ge=0, le=86400)] = 120


class ExecutionSpec(Fields):
    """How a recipe is executed. Nothing in it can change a byte of any batch, so it is no part of the identity.

    Attributes:
        runner: who reads and tokenises.
        engine: what makes ids of texts: "auto": the fast one where it gives the reference's ids in every check, else the reference;
            "hf": the reference, Hugging Face's tokenizers; "fast": the fast one, or an error.
        workers: how many of them.
        lane_workers: actors that hold the lanes on Ray.
        prefetch_steps: global batches made ahead of the trainer, at least 0.
        hot_replay_bytes: bytes kept for a quick resume; None: 30 % of the object store.
        token_cache: folder or URL of the token cache; None: no cache.
        token_cache_bytes: bytes of the cache's entries, about; what was used longest ago is deleted for what is new.
        storage: how object stores are reached.
        stall_seconds: without a unit from Ray before its execution is given up and opened again.
    """

    runner: Literal["ray", "processes", "threads", "inline"] = "ray"
    engine: Literal["auto", "hf", "fast"] = "auto"
    workers: WorkersSpec = WorkersSpec()
    lane_workers: Count = 1
    prefetch_steps: Annotated[int, Field(ge=0, lt=1 << 31)] = 8
    hot_replay_bytes: Size | None = None
    token_cache: Location | None = None
    token_cache_bytes: Size = 64 << 30
    storage: StorageSpec = StorageSpec()
    stall_seconds: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 60.0


class RecipeFields(Fields):
    """Every field of a recipe file, in the file's order. Their meaning together is the determinism contract's."""

    schema_version: Annotated[int, BeforeValidator(_schema), Field(alias="schema")]
    name: Text
    seed: Annotated[int, Field(ge=0, lt=1 << 64)]
    lanes: Count
    sequence_length: Count
    global_batch_size: Count
    tokenizer: TokenizerSpec
    sources: Annotated[tuple[SourceSpec, ...], BeforeValidator(_as_tuple), Field(min_length=1, max_length=MAX_SOURCES)]
    shuffle: ShuffleSpec = ShuffleSpec()
    packing: PackingSpec = PackingSpec()
    unit_bytes: Size = 1 << 20
    max_document_bytes: Size = 64 << 20
    on_exhausted: Literal["stop", "continue"] = "stop"
    final_batch: Literal["drop", "pad"] = "drop"
    on_bad_record: Literal["fail", "skip"] = "fail"
    execution: ExecutionSpec = ExecutionSpec()


def is_url(location: str) -> bool:
    """Whether a location names its own scheme (`file://` too)."""
    return "://" in location


def model_of(annotation: Any) -> type[Fields] | None:
    """The model that a field holds, itself or in a tuple; None for a plain field."""
    if isinstance(annotation, type) and issubclass(annotation, Fields):
        return annotation
    return next((found for part in getattr(annotation, "__args__", ()) if (found := model_of(part))), None)


def keys_of(model: type[Fields]) -> dict[str, str]:
    """The keys of a mapping as a recipe file spells them, with the attributes that hold them."""
    return {field.alias or name: name for name, field in model.model_fields.items()}
