"""The configuration that is shipped, as TorchTitan's command line reads it."""

from __future__ import annotations

import importlib
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.training.loops import corpus

pytest.importorskip("torchtitan")

pytestmark = [pytest.mark.xdist_group("torch"), pytest.mark.long]
KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
"""Of TorchTitan: needs triton, which machines without a GPU do not have."""


@pytest.fixture
def _without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        importlib.import_module(KERNELS)
    except ImportError:
        stand_in = ModuleType(KERNELS)
        stand_in.__getattr__ = lambda name: None  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, KERNELS, stand_in)


@pytest.mark.usefixtures("_without_triton")
def test_the_shipped_configuration_fits_its_recipe_and_takes_changes_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = corpus(tmp_path / ".demo", sequence_length=64, global_batch_size=8)
    (tmp_path / "recipes").mkdir()
    shutil.copy(Path(__file__).parents[2] / "recipes" / "torchtitan_debug.py", tmp_path / "recipes" / "torchtitan_debug.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("recipes", "recipes.torchtitan_debug"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import apply_overrides

    words = ["--module", "recipes.torchtitan_debug", "--config", "debug", "--dataloader.runner", "ray"]
    words += ["--validator.enable", "--validator.steps", "-1", "--checkpoint.exclude_from_loading", "dataloader"]
    words += ["--checkpoint.enable", "--checkpoint.no_last_save_model_only", "--override.imports"]
    words += ['zephon_ray.training.torchtitan={"out": "runs/a"}', 'zephon_ray.training.torchtitan.validation={"recipe": "held_out.yaml"}']
    config = ConfigManager().parse_args(words)
    apply_overrides(config.override, config)
    assert config.checkpoint.exclude_from_loading == ["dataloader"]
    assert not config.checkpoint.last_save_model_only
    assert config.dataloader.out == "runs/a"
    assert (config.training.seq_len, config.training.global_batch_size) == (64, 8)
    assert (config.dataloader.recipe, config.dataloader.runner, config.dataloader.stream) == (".demo/recipe.yaml", "ray", "train")
    assert (config.validator.dataloader.recipe, config.validator.dataloader.stream) == ("held_out.yaml", "validation")
    assert config.model_spec.model.vocab_size == config.loss.global_vocab_size == config.model_spec.model.lm_head.out_features
    tokenizer = config.tokenizer.build(tokenizer_path=config.hf_assets_path)
    loader = replace(config.dataloader, runner="inline", out=None).build(
        dp_world_size=2, dp_rank=1, tokenizer=tokenizer, seq_len=config.training.seq_len, local_batch_size=config.training.local_batch_size
    )
    values, labels = next(iter(loader))
    assert labels.shape == (4, 64)
    assert int(values["input"].max()) < config.model_spec.model.vocab_size
    assert recipe.name == "tiny"
