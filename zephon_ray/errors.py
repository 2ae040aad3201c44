"""Every error that the package raises on purpose, one class per decision a caller can make.

ZephonError
├── UserError              exit 2: mend the input and try again
│   ├── RecipeError        the recipe is wrong; `problems` lists everything that is
│   ├── SourceError        a source cannot be read as the recipe says (no shard, no document, broken file)
│   │   └── BadRecordError one record is bad and the recipe says `on_bad_record: fail` (or too many are)
│   ├── StateError         a state (checkpoint) is damaged, or belongs to another run
│   ├── RunDirectoryError  a run's directory cannot be continued as it is
│   └── RefusedError       a feed does not take us: another run reads it, or we do not fit it
├── DifferenceError        exit 1: something that must be equal is not
│   ├── ReplayError        a step made again differs from the ledger
│   └── DataChangedError   a unit's text is not what it was when the ledger recorded it
└── SystemFault            exit 3: the machine, not the user
    ├── StorageError       a store goes on refusing after all retries
    ├── RunnerError        workers go on dying, or gave nothing in time
    │   └── WorkerLost     a lane worker is gone with what it held: go on from the last state with others
    └── FeedError          a feed is not there, or does not come back
        └── FencedError    a newer incarnation of this run reads the feed: end this process
"""

from __future__ import annotations

from collections.abc import Sequence


class ZephonError(Exception):
    """Root of the tree. `exit_code` is what a command ends with."""

    exit_code = 3


class UserError(ZephonError):
    exit_code = 2


class RecipeError(UserError):
    """All problems of a recipe at once.

    Args:
        problems: one sentence each, starting with the path of the field ("sources[1].weight=0 ...").
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[RecipeError], tuple[list[str]]]:
        return type(self), (self.problems,)


class SourceError(UserError):
    """A source cannot be read as the recipe says."""


class BadRecordError(SourceError):
    """A record that the contract calls bad, where the recipe does not skip it."""


class StateError(UserError):
    """A state is damaged, of another version, or belongs to another recipe, tokenizer or data."""


class RunDirectoryError(UserError):
    """A run's directory cannot be used as asked."""


class RefusedError(UserError):
    """A feed does not take this client: another run's ranks read it, or size, state, recipe, protocol or token do not fit."""


class DifferenceError(ZephonError):
    exit_code = 1


class ReplayError(DifferenceError):
    """A step that was produced again is not the one that the ledger holds."""


class DataChangedError(DifferenceError):
    """Data was changed in place under a run."""


class SystemFault(ZephonError):
    exit_code = 3


class StorageError(SystemFault):
    """A store could not be reached, or went on refusing after all retries."""


class RunnerError(SystemFault):
    """Workers went on dying, or gave nothing within the limit."""


class FeedError(SystemFault):
    """A feed is not there, or did not come back in time."""


class FencedError(FeedError):
    """A newer incarnation of the run reads the feed, so this process has to end."""


class WorkerLost(RunnerError):
    """A lane worker, or blocks that it was to be given, are gone. The stream goes on from its last state, with other workers."""
