"""The proof: one checkpoint, resumed in many ways by TorchTitan's trainer, and every row that it trained on compared.

No trainer is trusted with the comparison: ranks write down the digests of the tensors that reach the model, and the digests of global
batches are made of these.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from zephon_ray.training.elastic_proof.cases import Cases
from zephon_ray.training.elastic_proof.outcomes import Outcome
from zephon_ray.training.elastic_proof.reference import make_reference
from zephon_ray.training.elastic_proof.setting import Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What was found.

    Args:
        setting: it was found in.
        outcomes: of all cases.
        checkpoints: that were read.
        state_bytes: of the loader's state in the last of them.
        left_out: cases that the recipe does not allow, and why.
        seconds: that it took.
    """

    setting: Setting
    outcomes: tuple[Outcome, ...]
    checkpoints: int
    state_bytes: int
    left_out: tuple[str, ...]
    seconds: float

    @property
    def good(self) -> bool:
        return all(outcome.good for outcome in self.outcomes)


def prove(setting: Setting, say: Callable[[str], None]) -> Proof:
    """Run all cases.

    Args:
        setting: of the proof.
        say: told in a sentence what is being done.

    Raises:
        DifferenceError: peers trained on different rows, or a checkpoint holds something else than the state after its step.
        RunnerError: a rank failed.
        UserError, RecipeError, SourceError, StorageError: as `make_reference`.
    """
    began = time.monotonic()
    say(f"steps 1 to {setting.last} on one rank, without a trainer: the reference")
    cases = Cases(setting, make_reference(setting.recipe, setting.last), say)
    cases.save()
    cases.resume_on_all()
    cases.change_in_a_chain()
    cases.kill()
    cases.save_while_training()
    if not setting.short:
        cases.feed()
    state_bytes = cases.read_checkpoints()
    return Proof(
        setting=setting, outcomes=tuple(cases.outcomes), checkpoints=len(cases.saved), state_bytes=state_bytes,
        left_out=tuple(cases.left_out), seconds=time.monotonic() - began,
    )  # fmt: skip
