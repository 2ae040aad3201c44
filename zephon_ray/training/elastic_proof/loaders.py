"""How a job's loader is named to the trainer, in a rank."""

from __future__ import annotations

from typing import Any

from zephon_ray.training.elastic_proof.jobs import Job


def loader_of(job: Job) -> tuple[Any, list[Any]]:
    """What the trainer is configured with as `dataloader`, and the overrides that stand on its command line.

    Ours comes by the override alone: the configuration is that of TorchTitan's own loader, and stays as it is.
    """
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    from zephon_ray.training import torchtitan

    if job.source == "stock":
        return _stock(job), []
    options: dict[str, Any] = {
        "threads": {"runner": "threads", "workers": 1},
        "ray": {"runner": "ray"},
        "host": {"out": str(job.folder / "feed")},
        "feed": {"feed": job.feed, "address": job.address},
    }[job.source]
    return HuggingFaceTextDataLoader.Config(), [(torchtitan.__name__, {"recipe": str(job.recipe), **options})]


def _stock(job: Job) -> Any:
    """TorchTitan's own loader, over JSON lines of this machine."""
    from datasets import load_dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

    DATASETS["proof"] = DatasetConfig(
        path=str(job.texts),
        loader=lambda path: load_dataset("json", data_files=path, split="train"),
        sample_processor=lambda sample: sample["text"],
    )
    return HuggingFaceTextDataLoader.Config(dataset="proof")
