"""The demo's corpus: code in Parquet, prose in compressed JSON lines, a tokenizer trained on both, and a recipe for them.

It is made once. A stamp says what it was made with and what its files are; while all of that is equal it is used again.
"""

from __future__ import annotations

import io
import itertools
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

from zephon_ray.demo.texts import Text, code_texts, prose_texts
from zephon_ray.hashing import canonical_json, digest128
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.storage import Storage

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BUILDER = 1
"""Raised when the builder gives other files for the same texts."""

_STAMP = "corpus.json"
_CODE_FILES, _PROSE_FILES = 4, 6
_ROW_GROUP_DOCUMENTS = 48
_SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")

_RECIPE = """\
# Made by `zephon-ray demo`, which makes it again whenever it differs: copy it before you change it.
schema: 1
name: demo
seed: 42
lanes: 8
sequence_length: {sequence_length}
global_batch_size: {global_batch_size}       # 1, 2, 4, 8 ... ranks can share it
tokenizer: {{path: tokenizer.json, bos: "<|bos|>", eos: "<|eos|>", pad: "<|pad|>"}}
sources:
  - {{name: code,  uri: data/code,  weight: 0.7}}     # Python's standard library
  - {{name: prose, uri: data/prose, weight: 0.3}}     # its documentation
unit_bytes: 65536             # small units, so that a short run crosses many windows
execution: {{runner: ray, workers: {{min: 1, max: 4}}}}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSize:
    """How large a corpus is.

    Args:
        code_bytes, prose_bytes: UTF-8 bytes of text at least, if the machine has them.
        whole: take all of the standard library; False stops at the bytes above.
        vocabulary: ids of the tokenizer, at least 512.
        sample_bytes: of text that the tokenizer is trained on.
        sequence_length, global_batch_size: of the recipe; the latter a multiple of 8.
    """

    code_bytes: int = 10_000_000
    prose_bytes: int = 2_000_000
    whole: bool = True
    vocabulary: int = 8192
    sample_bytes: int = 3_000_000
    sequence_length: int = 1024
    global_batch_size: int = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A corpus that is complete.

    Args:
        folder: holds all of it.
        recipe: path of its recipe.
        documents, sizes: of each source: documents, and UTF-8 bytes of their texts.
        filled: of each source, the bytes that come from installed packages because the standard library has too few.
        made: it was made just now, not found.
    """

    folder: Path
    recipe: Path
    documents: dict[str, int]
    sizes: dict[str, int]
    filled: dict[str, int]
    made: bool


def build_corpus(folder: Path, size: CorpusSize | None = None, say: Callable[[str], None] = lambda _: None) -> Corpus:
    """Find the corpus in a folder, or make it there.

    Args:
        folder: made if need be; files of the same names are replaced.
        size: None for that of the demo.
        say: told in a sentence what is being done.

    Raises:
        OSError: the folder cannot be written.
    """
    size = size or CorpusSize()
    made_with = {
        "builder": BUILDER,
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "recipe": _recipe(size).decode(),
        "size": {name: getattr(size, name) for name in CorpusSize.__dataclass_fields__},
    }
    stamp = _stamp(folder)
    made = not (stamp.get("made_with") == made_with and _whole(folder, stamp["files"]))
    if made:
        stamp = {"made_with": made_with, **_build(folder, size, say)}
        _write(folder, _STAMP, canonical_json(stamp))
    return Corpus(
        folder=folder, recipe=folder / "recipe.yaml", made=made, **{name: stamp[name] for name in ("documents", "sizes", "filled")}
    )


def _stamp(folder: Path) -> dict[str, Any]:
    """What the stamp says; empty where there is none that can be read, so that everything is made again."""
    try:
        stamp = json.loads((folder / _STAMP).read_bytes())
    except (OSError, ValueError):
        return {}
    keys = {"made_with", "files", "documents", "sizes", "filled"}
    return stamp if isinstance(stamp, dict) and stamp.keys() >= keys else {}


def _whole(folder: Path, files: dict[str, str]) -> bool:
    """Whether every file is there with the content it was made with, and no other shard beside them."""
    try:
        there = {path.relative_to(folder).as_posix() for path in (folder / "data").rglob("*") if path.is_file()}
        named = {name for name in files if name.startswith("data/")}
        return there == named and all(digest128((folder / name).read_bytes()).hex() == digest for name, digest in files.items())
    except OSError:
        return False


def _build(folder: Path, size: CorpusSize, say: Callable[[str], None]) -> dict[str, Any]:
    (folder / _STAMP).unlink(missing_ok=True)
    for leftover in (path for path in (folder / "data").rglob("*") if path.is_file()):
        leftover.unlink()
    say("reading the source code of Python's standard library")
    code = code_texts(least=size.code_bytes, most=None if size.whole else size.code_bytes)
    say("reading its documentation")
    prose = prose_texts(least=size.prose_bytes, most=None if size.whole else size.prose_bytes)
    files = {f"data/code/part-{i}.parquet": _parquet(part) for i, part in enumerate(_parts(code.documents, _CODE_FILES))}
    files |= {f"data/prose/part-{i}.jsonl.zst": _json_lines(part) for i, part in enumerate(_parts(prose.documents, _PROSE_FILES))}
    say(f"training a tokenizer of {size.vocabulary} ids")
    sample = [*_sample(code.documents, size.sample_bytes * 2 // 3), *_sample(prose.documents, size.sample_bytes // 3)]
    files["tokenizer.json"] = _tokenizer(sample, size.vocabulary)
    files["recipe.yaml"] = _recipe(size)
    for name, data in files.items():
        _write(folder, name, data)
    sources = {"code": code, "prose": prose}
    return {
        "files": {name: digest128(data).hex() for name, data in files.items()},
        "documents": {name: len(texts.documents) for name, texts in sources.items()},
        "sizes": {name: texts.size for name, texts in sources.items()},
        "filled": {name: texts.filled for name, texts in sources.items()},
    }


def _recipe(size: CorpusSize) -> bytes:
    return _RECIPE.format(sequence_length=size.sequence_length, global_batch_size=size.global_batch_size).encode()


def _write(folder: Path, name: str, data: bytes) -> None:
    Storage(StorageSpec()).write_bytes(str(folder.absolute() / name), data)


def _parts(documents: Sequence[Text], count: int) -> list[Sequence[Text]]:
    edges = [i * len(documents) // count for i in range(count + 1)]
    return [documents[a:b] for a, b in itertools.pairwise(edges)]


def _parquet(documents: Sequence[Text]) -> bytes:
    table = pa.table({"path": [d.origin for d in documents], "text": [d.text for d in documents]})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=_ROW_GROUP_DOCUMENTS, compression="zstd", use_dictionary=False)
    return sink.getvalue()


def _json_lines(documents: Sequence[Text]) -> bytes:
    return zstd.compress(b"".join(canonical_json({"name": d.origin, "text": d.text}) + b"\n" for d in documents), 3)


def _sample(documents: Sequence[Text], size: int) -> list[str]:
    """About `size` bytes of documents, from all places."""
    total = sum(len(d.text) for d in documents)
    stride = max(1, -(-total // max(1, size)))
    return [d.text for d in documents[::stride]]


def _tokenizer(texts: Sequence[str], vocabulary: int) -> bytes:
    """A byte-level BPE tokenizer with special tokens, as tokenizer.json. Equal texts give equal bytes."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(_SPECIALS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str().encode()
