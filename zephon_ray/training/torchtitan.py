"""TorchTitan: the loader that its trainer builds, and the overrides that put it into an unchanged command line.

    --override.imports 'zephon_ray.training.torchtitan={"recipe": "recipe.yaml"}'
    --override.imports 'zephon_ray.training.torchtitan.validation={"recipe": "validation.yaml"}'

Nothing is connected before the first batch is asked for, so that a checkpoint is loaded first. This is the only module that imports
TorchTitan. See docs/torchtitan.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from torchtitan.config.override import override

from zephon_ray.errors import StateError, UserError
from zephon_ray.loader import STATE_KEY, bytes_of
from zephon_ray.recipe import Recipe, load_recipe
from zephon_ray.state import place_in
from zephon_ray.training import sources
from zephon_ray.training.contracts import form_of, sizes_of
from zephon_ray.training.fit import check_fit, check_validation
from zephon_ray.training.microbatches import MicroBatches
from zephon_ray.training.sources import RunnerName, SourceOptions, StreamName
from zephon_ray.training.tokenizers import check_tokenizer, tokenizer_digest


def _modules(package: str, *names: str) -> dict[str, ModuleType]:
    """Those that there are."""
    found = {}
    for name in names:
        with suppress(ImportError):
            found[name] = importlib.import_module(f"{package}.{name}")
    return found


_DATA = _modules("torchtitan.components.data", "loader", "collators", "types")
_BASE = _DATA["loader"] if "loader" in _DATA else importlib.import_module("torchtitan.components.dataloader")
_STEPS = _modules("torchtitan.observability", "structured_logger").get("structured_logger")

BaseDataLoader: Any = _BASE.BaseDataLoader


def _trainer_step() -> int | None:
    """How many steps the trainer of this process has begun; None where it does not say."""
    tell: Callable[[], int | None] | None = getattr(_STEPS, "get_relative_step", None)
    return None if tell is None else tell()


class ZephonRayDataLoader(BaseDataLoader):  # type: ignore[misc]
    """One rank's micro-batches, in the form of the TorchTitan that is installed.

    Args:
        config: where they come from.
        dp_world_size: R.
        dp_rank: in [0, R); peers that share it (tensor, context, pipeline parallel) get the same.
        tokenizer: the trainer's.
        built: what else this version of TorchTitan builds a loader with.

    Raises:
        RecipeError: recipe and trainer do not fit; lists all that does not.
        UserError: options contradict each other. When first iterated, further what a loader or feed raises.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        recipe: str | None = None
        """Path of the recipe. With a feed it may be left out; given, it must be the one that the feed was served with."""

        feed: str | None = None
        """Name of a feed that is served (`zephon-ray serve`). Without one the ranks of a host share one that they start."""

        address: str | None = None
        """host:port of the feed's Ray cluster; by default that of RAY_ADDRESS."""

        stream: StreamName = "train"
        """"validation" for a validator's loader: from its beginning each time it is built."""

        runner: RunnerName | None = None
        """"threads", "processes" or "inline" in every rank instead of a shared feed: each rank repeats all work. "ray" is a shared feed
        too, and for a single rank Ray in its process."""

        workers: int | None = None
        """Of "threads" or "processes", at most."""

        out: str | None = None
        """Run directory of the feed that the ranks of a host share; by default one below outputs/zephon_ray."""

        infinite: bool = False
        """Set by the validator: begin again at the end."""

        repeat: bool = False
        """The same, in newer versions of TorchTitan."""

        incarnation: str | None = None
        """RUN_ID:COUNT of this start, where torchrun does not tell it."""

        takeover: bool = False
        """Push out the ranks of another run that reads the feed."""

        token_file: str | None = None
        """Holds the feed's token."""

        allow_duplicate_work: bool = False
        """Let every rank of several hosts run its own `runner`."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, tokenizer: object = None, **built: object) -> None:
        self._sizes = sizes_of(dp_rank, dp_world_size, built)
        self._form = form_of(built, _DATA)
        self._tokenizer = tokenizer
        self._validates = config.stream == "validation"
        self._again = config.infinite or config.repeat
        self._options = _options_of(config)
        if self._options.recipe is not None:
            self._check(self._options.recipe, tokenizer_digest(self._options.recipe))
        self._state: bytes | None = None
        self._batches: MicroBatches | None = None
        self._tells_steps = False

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            self._batches = self._open()
            self._tells_steps = not self._validates and _trainer_step() == 1
        return self._formed()

    def _formed(self) -> Iterator[Any]:
        while self._batches is not None:
            yield from map(self._form, self._batches)
            if not self._again:
                return
            self._batches.close()
            self._state = None
            self._batches = self._open()

    def _open(self) -> MicroBatches:
        sizes = self._sizes
        loader = sources.open_loader(self._options, sizes.dp_rank, sizes.dp_world_size, self._state)
        if self._options.recipe is None:
            try:
                self._check(loader.recipe, loader.identity.fields["tokenizer.sha256"])
            except BaseException:
                loader.close()
                raise
        return MicroBatches(loader, sizes.local_batch_size)

    def _check(self, recipe: Recipe, tokenizer_sha256: str) -> None:
        check_fit(recipe, self._sizes)
        check_tokenizer(self._tokenizer, recipe.tokenizer_url, tokenizer_sha256)
        if self._validates:
            check_validation(recipe, again=self._again)

    def state_dict(self) -> dict[str, bytes]:
        """The state after the last step, whatever was read ahead: one key, the same bytes on every rank; none before the first step.

        Raises:
            RecipeError: the trainer does not train on `global_batch_size` rows a step.
        """
        if self._batches is None:
            return {STATE_KEY: self._state or b""}
        return self._batches.state_dict(_trainer_step() if self._tells_steps else None)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of any number of ranks.

        Raises:
            StateError: it is none of ours, or damaged; when first iterated also, it is of another run.
        """
        state = _state_in(state_dict)
        self._state, self._tells_steps = state or None, False
        if self._batches is not None:
            self._batches.close()
            self._batches = self._open()

    def close(self) -> None:
        """Leave the feed, or end the runner. A feed that the ranks of this host share ends with their processes."""
        if self._batches is not None:
            self._batches.close()


def _options_of(config: ZephonRayDataLoader.Config) -> SourceOptions:
    for name in ("dataset", "dataset_path"):
        if getattr(config, name, None):
            raise UserError(f"dataloader.{name}={getattr(config, name)!r} is TorchTitan's own: sources stand in the recipe. Leave it out")
    if config.stream == "train" and (config.infinite or config.repeat):
        raise UserError(
            "the validator was given a loader of the stream 'train', or a loader that is trained on has infinite: its end is where its"
            " recipe says. Give a validator's loader stream='validation'"
        )
    options = SourceOptions(
        recipe=None if config.recipe is None else load_recipe(config.recipe),
        feed=config.feed, address=config.address, stream=config.stream, runner=config.runner, workers=config.workers, out=config.out,
        incarnation=config.incarnation, takeover=config.takeover, token_file=config.token_file,
        allow_duplicate_work=config.allow_duplicate_work,
    )  # fmt: skip
    sources.check(options)
    return options


def _state_in(state_dict: Mapping[str, Any]) -> bytes:
    """The bytes of a state; none for that before the first step."""
    mend = "Resume with the loader that saved it, or begin the data anew with --checkpoint.exclude_from_loading dataloader"
    if set(state_dict) != {STATE_KEY}:
        raise StateError(f"the checkpoint holds the state of another loader (keys {sorted(map(str, state_dict))}). {mend}")
    state = bytes_of(state_dict)
    if state:
        place_in(state)
    return state


def _replaced(config: Any, options: Mapping[str, Any]) -> ZephonRayDataLoader.Config:
    """Ours with further options, or ours in place of another's."""
    if isinstance(config, ZephonRayDataLoader.Config):
        return replace(config, **options)
    return ZephonRayDataLoader.Config(**options)


def _training(config: Any, **options: Any) -> ZephonRayDataLoader.Config:
    return _replaced(config, options)


# TorchTitan looks an override up by the module and the name of its function; by these it is found under this module's own name.
_training.__module__, _, _training.__name__ = __name__.rpartition(".")
override(target=BaseDataLoader.Config, fqns=["dataloader"], description="Train on a recipe of zephon_ray")(_training)


def validation(config: Any, **options: Any) -> ZephonRayDataLoader.Config:
    """The override of the validator's loader. Options are those of `ZephonRayDataLoader.Config`."""
    return _replaced(config, {"stream": "validation", **options})


override(target=BaseDataLoader.Config, fqns=["validator.dataloader"], description="Validate on a recipe of zephon_ray")(validation)
