"""The configuration of a job's loader, in a rank."""

from __future__ import annotations

from typing import Any

from zephon_ray.training.elastic_proof.jobs import Job


def loader_config(job: Job) -> Any:
    """What the trainer is configured with as `dataloader`."""
    if job.source == "stock":
        return _stock(job)
    from zephon_ray.training.torchtitan import ZephonRayDataLoader

    options: dict[str, Any] = {
        "threads": {"runner": "threads", "workers": 1},
        "ray": {"runner": "ray"},
        "host": {"out": str(job.folder / "feed")},
        "feed": {"feed": job.feed, "address": job.address},
    }[job.source]
    return ZephonRayDataLoader.Config(recipe=str(job.recipe), **options)


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
