"""One model trained with TorchTitan's stock loader and with ours, through changes of the number of ranks; and the figure of it in docs/.

    python -m tests.bench.stock_comparison --out DIR [--steps 240]    trains (minutes to an hour), and writes docs/elastic.json and .svg
    python -m tests.bench.stock_comparison --plot                     draws docs/elastic.svg again from docs/elastic.json

Each loader is compared with itself: with a run of the same length on four ranks that nothing interrupts. The stock loader refuses a
checkpoint of another number of ranks, so what its user can do is compared: `--checkpoint.exclude_from_loading dataloader`, with which the
data begins anew.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from zephon_ray.demo.texts import prose_texts
from zephon_ray.hashing import digest128
from zephon_ray.recipe_yaml import write_yaml
from zephon_ray.testing import write_lines
from zephon_ray.training.elastic_proof.jobs import Job, Mesh
from zephon_ray.training.elastic_proof.ranks import RankDied, run_ranks

DOCS = Path(__file__).parents[2] / "docs"
DATA, FIGURE = DOCS / "elastic.json", DOCS / "elastic.svg"
FOUR, TWO = Mesh(replicate=4), Mesh(replicate=2)
SEQUENCE_LENGTH, BATCH, VOCABULARY = 128, 16, 1024
LIMIT_S = 7200.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Steps of a run: losses, and digests of the rows."""

    losses: list[float]
    rows: list[list[str]]


def corpus(folder: Path, text_bytes: int) -> Path:
    """Python's documentation as JSON lines, mixed, a tokenizer, and a recipe of them. Returns the recipe's path."""
    texts = [text.text for text in prose_texts(least=text_bytes, most=text_bytes).documents]
    texts.sort(key=lambda text: digest128(text.encode()))  # the stock loader reads in the order of the file
    write_lines(folder / "texts" / "prose.jsonl", texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    recipe = {
        "schema": 1, "name": "prose", "seed": 1, "lanes": 8, "sequence_length": SEQUENCE_LENGTH, "global_batch_size": BATCH,
        "unit_bytes": 65536, "tokenizer": {"path": "tokenizer.json", "bos": "<bos>", "eos": "<eos>"},
        "sources": [{"name": "prose", "uri": "texts"}],
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(write_yaml(recipe), encoding="utf-8")
    return path


def train(job: Job) -> Trained:
    """Run a job, and read what its ranks wrote."""
    print(f"{job.name}: {job.mesh}, to step {job.steps}: {run_ranks(job, limit_s=LIMIT_S):.0f} s", flush=True)
    ranks = [[json.loads(line) for line in job.record(rank).read_text().splitlines()] for rank in range(job.mesh.ranks)]
    steps = list(zip(*ranks, strict=True))
    return Trained(losses=[step[0]["loss"] for step in steps], rows=[[row for rank in step for row in rank["rows"]] for step in steps])


def compare(folder: Path, steps: int) -> dict[str, Any]:
    """Train all runs, and say what each trained on. `steps` is a multiple of 3: the number of ranks changes after each third."""
    third = steps // 3
    recipe = corpus(folder, 8 * steps * BATCH * SEQUENCE_LENGTH)
    found: dict[str, Any] = {"steps": steps, "change_after": [third, 2 * third], "ranks": [4, 2, 4]}
    for source in ("ours", "stock"):
        first = Job(
            name=f"{source}-whole", folder=folder / f"{source}-whole", recipe=recipe, tokenizer=recipe.parent, vocabulary=VOCABULARY,
            sequence_length=SEQUENCE_LENGTH, global_batch_size=BATCH, local_batch_size=4, mesh=FOUR, steps=steps, save_every=third,
            source="stock" if source == "stock" else "threads", texts=recipe.parent / "texts" / "prose.jsonl", width=64,
            learning_rate=3e-3,
        )  # fmt: skip
        whole = train(first)
        anew = {"skip_data_state": source == "stock"}
        second = replace(
            first, name=f"{source}-2", folder=folder / f"{source}-2", mesh=TWO, steps=2 * third, load=first.checkpoint(third), **anew
        )
        if source == "stock":
            found["stock_refuses"] = refusal(replace(second, name="stock-refused", folder=folder / "stock-refused", skip_data_state=False))
        middle = train(second)
        load = second.checkpoint(2 * third)
        end = train(replace(first, name=f"{source}-3", folder=folder / f"{source}-3", load=load, **anew))
        parts = [Trained(losses=whole.losses[:third], rows=whole.rows[:third]), middle, end]
        found[source] = {"whole": account([whole]), "changed": account(parts)}
        equal = [sorted(a) == sorted(b) for a, b in zip(whole.rows, [rows for part in parts for rows in part.rows], strict=True)]
        found[source]["steps_of_other_rows"] = equal.count(False)
    return found


def refusal(job: Job) -> str:
    """What the stock loader says to a checkpoint of another number of ranks."""
    try:
        run_ranks(job, limit_s=LIMIT_S)
    except RankDied:
        lines = [line for rank in range(job.mesh.ranks) for line in job.log(rank).read_text().splitlines()]
        return next(line.strip() for line in lines if "dp_degree is inconsistent" in line or "Missing key" in line)
    raise AssertionError("the stock loader went on from a checkpoint of another number of ranks: say so in docs/elastic.md")


def account(parts: list[Trained]) -> dict[str, Any]:
    """Losses, and of each step how many of its rows had been trained on before, bit for bit."""
    before: set[str] = set()
    repeated = []
    for rows in (step for part in parts for step in part.rows):
        repeated.append(sum(row in before for row in rows))
        before.update(rows)
    return {"losses": [round(loss, 6) for part in parts for loss in part.losses], "repeated": repeated}


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw losses, their differences and repeated rows of both loaders."""
    import matplotlib
    import numpy as np

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "zephon_ray"  # the same data, the same file
    from matplotlib import pyplot as plt

    def smooth(values: Any, width: int = 8) -> Any:
        return np.convolve(values, np.ones(width) / width, mode="valid")

    steps = np.arange(1, found["steps"] + 1)
    figure, axes = plt.subplots(3, 2, figsize=(11, 8), sharex=True, sharey="row", layout="constrained")
    titles = {"stock": "TorchTitan's stock loader (data begins anew)", "ours": "zephon_ray"}
    for column, (source, title) in enumerate(titles.items()):
        whole, changed = (np.array(found[source][run]["losses"]) for run in ("whole", "changed"))
        top, middle, bottom = axes[:, column]
        top.set_title(title)
        top.plot(smooth(steps), smooth(whole), color="black", linewidth=3, alpha=0.35, label="4 ranks, uninterrupted")
        top.plot(smooth(steps), smooth(changed), color="tab:red", linewidth=1, label="4 → 2 → 4 ranks")
        middle.plot(steps, changed - whole, color="tab:red", linewidth=0.8)
        bottom.plot(steps, 100 / BATCH * np.array(found[source]["changed"]["repeated"]), color="tab:blue", linewidth=1)
        for axis in (top, middle, bottom):
            for change in found["change_after"]:
                axis.axvline(change + 0.5, color="grey", linestyle=":", linewidth=1)
        bottom.set_xlabel("step")
        top.legend(frameon=False)
    axes[0, 0].set_ylabel("loss (mean of 8 steps)")
    axes[1, 0].set_ylabel("loss less that of the\nuninterrupted run")
    axes[2, 0].set_ylabel("rows trained on before, %")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240, help="a multiple of 3, 24 at least")
    parser.add_argument("--out", type=Path, help="an empty folder for corpus, logs and checkpoints")
    parser.add_argument("--plot", action="store_true", help="only draw again")
    options = parser.parse_args()
    if not options.plot:
        if options.out is None or options.steps % 3 or options.steps < 24:
            parser.error("--out DIR is needed to train, and --steps is a multiple of 3, 24 at least")
        found = compare(options.out.absolute(), options.steps)
        DATA.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    plot(json.loads(DATA.read_text(encoding="utf-8")), FIGURE)


if __name__ == "__main__":
    main()
