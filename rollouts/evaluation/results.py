"""The results of an evaluation, and their file `results.json`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollouts.errors import CommandFileError, validation_errors
from rollouts.evaluation.statistics import Estimate
from rollouts.files import replaced_file
from rollouts.terminal.text import counted

#: The version of the form of `results.json`. A reader refuses any other.
RESULTS_VERSION: Final = 1
RESULTS_FILE: Final = "results.json"
_MOST_BYTES: Final = 16 << 20

#: How failed episodes count: with a reward of 0, which is no success, or not at all.
FailedEpisodes = Literal["zero", "exclude"]


class ErrorCount(BaseModel):
    """The failed episodes with one kind of error, and the first text of it, shortened to 1,000 characters."""

    episodes: int
    example: str


class EvaluationResults(BaseModel):
    """What is known after an evaluation; `results.json` has these fields.

    Every `Estimate` has a `value`, its `standard_error`, and the ends `low` and `high` of its 95 % interval,
    all clustered by task (`rollouts.evaluation.statistics`), and the number of `tasks` that it is of. None
    where there is no task to estimate from.

    - `version`: of this form.
    - `complete`: whether every task was evaluated.
    - `tasks`, `samples`, `episodes`: tasks with results, episodes that each has, and all episodes.
    - `failed`, `failed_episodes`: the episodes that ended with an error, and how they count ("zero" or
      "exclude").
    - `threshold`: an episode succeeds if its total reward is at least this.
    - `total_reward`, `environment_reward`, `group_reward`: means; the first is the sum of the others.
    - `reward_parts`: the mean of each named reward, without its weight.
    - `pass_at_k`, `pass_hat_k`: by k, the probability that at least one of k samples succeeds, and that all
      do.
    - `truncated`: the share of episodes that a limit ended.
    - `turns`, `length_stops`: all turns, and those that were cut before the model had ended them.
    - `tokens`, `sampled_tokens`, `images`, `sounds`: totals, as in `metrics.jsonl`.
    - `errors`: the most frequent kinds of errors.
    - `configuration`: what was evaluated and how, as far as it is known.
    - `warnings`: what a reader has to know before using the numbers.
    """

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = RESULTS_VERSION
    complete: bool
    tasks: int
    samples: int
    episodes: int
    failed: int
    failed_episodes: FailedEpisodes
    threshold: float
    total_reward: Estimate | None
    environment_reward: Estimate | None
    group_reward: Estimate | None
    reward_parts: dict[str, Estimate]
    pass_at_k: dict[int, Estimate]
    pass_hat_k: dict[int, Estimate]
    truncated: Estimate | None
    turns: int
    length_stops: int
    tokens: int
    sampled_tokens: int
    images: int
    sounds: int = 0
    errors: dict[str, ErrorCount]
    configuration: dict[str, Any] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)

    def estimates(self) -> Iterator[tuple[str, Estimate]]:
        """The estimates with their names, in the order of a table; those without a task, and of no news, are left out.

        pass^1 is pass@1; without group rewards, the environment reward is the total reward.
        """
        rewards: list[tuple[str, Estimate | None]] = [("total reward", self.total_reward)]
        if self.group_reward is not None and (self.group_reward.value or self.group_reward.standard_error):
            rewards += [("environment reward", self.environment_reward), ("group reward", self.group_reward)]
        parts = self.reward_parts
        if len(parts) > 1 or self.total_reward not in parts.values():  # one part is often the whole reward
            rewards += [(f"reward part {name}", estimate) for name, estimate in parts.items()]
        rewards += [(f"pass@{k}", estimate) for k, estimate in self.pass_at_k.items()]
        rewards += [(f"pass^{k}", estimate) for k, estimate in self.pass_hat_k.items() if k > 1]
        for name, estimate in [*rewards, ("truncated", self.truncated)]:
            if estimate is not None:
                yield name, estimate

    def sentences(self) -> tuple[str, str]:
        """What the estimates are of, and what they leave open: for above and below a table of them."""
        counts = "count as 0" if self.failed_episodes == "zero" else "do not count"
        return (
            f"{counted(self.tasks, 'task')} x {counted(self.samples, 'sample')}, 95 % intervals clustered by task; an "
            f"episode succeeds with a total reward of at least {self.threshold:g}",
            f"{self.failed:,} of {counted(self.episodes, 'episode')} failed ({counts}); {self.length_stops:,} of "
            f"{counted(self.turns, 'turn')} were cut",
        )

    def write(self, path: Path) -> None:
        """Write `results.json`; an earlier file stays until the new one is complete. Raises `OSError`."""
        with replaced_file(path) as file:
            file.write(self.model_dump_json(indent=2).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read `results.json`, or that of an output directory.

        Raises `CommandFileError` for any other file, and for one of another version.
        """
        path = path / RESULTS_FILE if path.is_dir() else path
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        try:
            if len(content) > _MOST_BYTES:
                raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
            return cls.model_validate_json(content)
        except ValueError as error:
            problem = str(error)
            if isinstance(error, ValidationError):  # without the values
                first = validation_errors(error)[0]
                problem = ": ".join([*map(str, first["loc"]), first["msg"]])
            cure = "`rollouts eval ... --resume` on the directory writes it anew from metrics.jsonl"
            raise CommandFileError(path, f"no results of an evaluation ({problem}); {cure}") from error
