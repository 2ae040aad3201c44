"""Peers: other loaders as they are shipped, on the same documents, with the same tokenizer, rows and mixture.

Each is a function that gives batches of ids endlessly. They are imported only where they are asked for, in a process of their own; nothing
of this package depends on them. They read JSON lines, which all of them can, written out of the recipe's sources first.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zephon_ray.benchmark.parts import texts_of
from zephon_ray.errors import UserError
from zephon_ray.recipe import Recipe
from zephon_ray.storage import Storage
from zephon_ray.telemetry import CpuMeter

EXPORT_BYTES = 64 << 20
"""Text that is written for them, of all sources together. They read it again when it is over."""
FILE_BYTES = 8 << 20
WARM_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a peer is to give.

    Args:
        folder: holds `tokenizer.json` and a folder of JSON lines for each source.
        sources: their names.
        weights: of each.
        eos: token put after each document.
        sequence: ids of a row.
        batch: rows of a batch.
    """

    folder: str
    sources: tuple[str, ...]
    weights: tuple[float, ...]
    eos: str
    sequence: int
    batch: int

    def files(self, source: int) -> list[str]:
        return sorted(map(str, (Path(self.folder) / str(source)).glob("*.jsonl")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A loader to compare with.

    Args:
        title: what it is called, with the version that the adapter was written for.
        module: that must be there.
        pip: what to install.
        batches: its batches, as anything with a `size` or `numel`.
    """

    title: str
    module: str
    pip: str
    batches: Callable[[Shape], Iterator[Any]]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


def export(recipe: Recipe, folder: Path) -> Shape:
    """Write texts of a recipe's sources, as many of each as the mixture takes, with its tokenizer.

    Raises:
        UserError: the recipe has no eos, which all peers put after each document.
    """
    if recipe.tokenizer.eos is None:
        raise UserError("--compare: the recipe has no tokenizer.eos, and the others put one after each document. Name one")
    (folder / "tokenizer.json").write_bytes(Storage(recipe.execution.storage).read_bytes(recipe.tokenizer_url))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": recipe.tokenizer.eos,
        "pad_token": recipe.tokenizer.eos,
    }
    config |= {"add_eos_token": True, "add_bos_token": False, "model_max_length": 10**12}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    written = 0
    for task, read in texts_of(recipe):
        of_source = folder / str(task.group.source)
        of_source.mkdir(exist_ok=True)
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in read.texts.strings())
        with (of_source / f"{written // FILE_BYTES:04}.jsonl").open("a", encoding="utf-8") as file:
            file.write(lines)
        written += read.texts.nbytes
        if written > EXPORT_BYTES:
            break
    return Shape(
        folder=str(folder),
        sources=tuple(source.name for source in recipe.sources),
        weights=tuple(share / sum(recipe.shares()) for share in recipe.shares()),
        eos=recipe.tokenizer.eos,
        sequence=recipe.sequence_length,
        batch=recipe.global_batch_size,
    )


def measure_peer(*, spawned: float, name: str, shape: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Take batches of a peer for some seconds.

    Args:
        spawned: when this process was started, in seconds since 1970.
        name: of the peer.
        shape: fields of `Shape`.
        seconds: that are measured, after `WARM_S`.

    Returns:
        tokens, seconds, cpu_seconds, first_batch_s.
    """
    meter = CpuMeter()
    batches = PEERS[name].batches(Shape(**{**shape, "sources": tuple(shape["sources"]), "weights": tuple(shape["weights"])}))
    next(batches)
    first_batch_s = time.time() - spawned
    ready = time.monotonic() + WARM_S
    while time.monotonic() < ready:
        next(batches)
        meter.look()
    cpu_s, began, tokens = meter.seconds(), time.monotonic(), 0
    while time.monotonic() - began < seconds:
        tokens += _size(next(batches))
        meter.look()
    wall_s = time.monotonic() - began
    return {"tokens": tokens, "seconds": wall_s, "cpu_seconds": meter.seconds() - cpu_s, "first_batch_s": first_batch_s}


def _size(batch: Any) -> int:
    return int(batch.numel() if hasattr(batch, "numel") else np.size(batch))


def _torchtitan(shape: Shape) -> Iterator[Any]:
    """Its interleaved text loader over `datasets`, streaming, without worker processes: the cheapest of its ways in CPU a token."""
    datasets = importlib.import_module("datasets")
    text = importlib.import_module("torchtitan.hf_datasets.text_datasets")
    tokenizer = importlib.import_module("torchtitan.components.tokenizer").HuggingFaceTokenizer
    entry = importlib.import_module("torchtitan.hf_datasets").DatasetConfig

    def loader(source: int) -> Callable[[str], Any]:
        return lambda _: datasets.load_dataset(
            "json", data_files=shape.files(source), split="train", streaming=True, cache_dir=str(Path(shape.folder) / "cache")
        )

    for number, name in enumerate(shape.sources):
        text.DATASETS[name] = entry(path=name, loader=loader(number), sample_processor=lambda sample: sample["text"])
    kind = text.InterleavedHuggingFaceTextDataLoader
    config = kind.Config(sources=[text.HFDataSource(dataset=n, weight=w) for n, w in zip(shape.sources, shape.weights, strict=True)])
    made = kind(
        config, dp_world_size=1, dp_rank=0, tokenizer=tokenizer(tokenizer.Config(), tokenizer_path=shape.folder), seq_len=shape.sequence,
        local_batch_size=shape.batch,
    )  # fmt: skip
    for inputs, _ in made:
        yield inputs["input"]


def _zephon(shape: Shape) -> Iterator[Any]:
    """Threads, with two workers and `wrap` packing."""
    zephon = importlib.import_module("zephon")
    dataset = importlib.import_module("zephon.io").Dataset
    work = importlib.import_module("zephon.work").StaticMixtureWorkSource
    sets = [dataset.from_path(name, str(Path(shape.folder) / str(number))) for number, name in enumerate(shape.sources)]
    source = work(
        datasets=sets, mixture=dict(zip(shape.sources, shape.weights, strict=True)), seed=42, shuffle_within_shard=True, chunk_size=256,
        exhausted_policy="repeat",
    )  # fmt: skip
    pipeline = (
        zephon.Pipeline(source)
        .decode_text()
        .tokenize(
            tokenizer_id=shape.folder, field="text", special_tokens="eos", add_attention_mask=False, return_tensors="np", parallelism=2
        )
        .pack_flat(max_length=shape.sequence, algorithm="wrap")
        .batch(microbatch_size=shape.batch)
        .options(runner="threads", world_size=1, global_rank=0, auto_validation="off", shutdown_mode="hard")
    )
    for batch in pipeline:
        yield batch.to_training()["input_ids"]


def _grain(shape: Shape) -> Iterator[Any]:
    """A map dataset of lines in two threads, tokenised by Hugging Face's library, concatenated and split."""
    grain = importlib.import_module("grain")
    split = importlib.import_module("grain.experimental").ConcatThenSplitIterDataset
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(Path(shape.folder) / "tokenizer.json"))
    eos = tokenizer.token_to_id(shape.eos)

    def encoded(line: bytes) -> dict[str, Any]:
        ids = tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
        ids.append(eos)
        return {"ids": np.array(ids, np.int32), "positions": np.arange(len(ids), dtype=np.int32)}

    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=64)
    parts = []
    for number in range(len(shape.sources)):
        read = grain.MapDataset.source(_Lines(shape.files(number))).seed(number).shuffle().repeat().map(encoded).to_iter_dataset(options)
        parts.append(split(read, length_struct={"ids": shape.sequence, "positions": shape.sequence}))
    for batch in grain.IterDataset.mix(parts, weights=list(shape.weights)).batch(shape.batch, drop_remainder=True):
        yield batch["ids"]


class _Lines:
    """Lines of files by number."""

    def __init__(self, files: list[str]) -> None:
        self._places: list[tuple[str, int, int]] = []
        for path in files:
            at = 0
            with Path(path).open("rb") as file:
                for line in file:
                    self._places.append((path, at, len(line)))
                    at += len(line)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> bytes:
        path, at, size = self._places[number]
        with Path(path).open("rb") as file:
            file.seek(at)
            return file.read(size)


PEERS = {
    "zephon": Peer(title="Zephon 0.2.0, threads", module="zephon", pip="zephon==0.2.0 transformers", batches=_zephon),
    "torchtitan": Peer(title="TorchTitan 0.3.0, stock", module="torchtitan", pip="torchtitan==0.3.0 datasets", batches=_torchtitan),
    "grain": Peer(title="Grain 0.2.18, 2 threads", module="grain", pip="grain==0.2.18", batches=_grain),
}
"""By name, with the versions that the adapters were written for."""
