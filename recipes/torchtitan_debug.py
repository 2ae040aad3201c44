"""A whole TorchTitan configuration that trains on a recipe: a small Llama on what `make demo` leaves in `.demo`.

    torchrun --nproc_per_node 2 -m torchtitan.train --module recipes.torchtitan_debug --config debug

Copy it, and change the three names below. Everything that trainer and recipe have to agree on is taken from the recipe.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from zephon_ray import load_recipe
from zephon_ray.training.torchtitan import ZephonRayDataLoader

RECIPE = ".demo/recipe.yaml"
STEPS = 100
ROWS_AT_A_TIME = 4  # of each GPU; has to divide its global_batch_size / GPUs rows


def debug() -> Trainer.Config:
    """The configuration that `--config debug` names."""
    recipe = load_recipe(RECIPE)
    tokenizer = Path(recipe.tokenizer_url)
    model = small_llama(Tokenizer.from_file(str(tokenizer)).get_vocab_size())
    return Trainer.Config(
        model_spec=model,
        hf_assets_path=str(tokenizer.parent),  # the trainer's tokenizer has to be the recipe's
        dataloader=ZephonRayDataLoader.Config(recipe=RECIPE),
        training=TrainingConfig(
            seq_len=recipe.sequence_length,
            global_batch_size=recipe.global_batch_size,
            local_batch_size=ROWS_AT_A_TIME,
            steps=STEPS,
        ),
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval=20,
            last_save_model_only=False,  # or the last checkpoint holds no state of the data, and training cannot go on from it
        ),
        loss=CrossEntropyLoss.Config(global_vocab_size=model.model.vocab_size),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=5),
        metrics=MetricsProcessor.Config(log_freq=1),
    )


def small_llama(vocabulary: int) -> ModelSpec:
    """TorchTitan's debug model for a vocabulary of so many ids."""
    spec = model_registry("debugmodel")
    spec.model.vocab_size = spec.model.tok_embeddings.num_embeddings = spec.model.lm_head.out_features = vocabulary
    return spec
