"""What a comparison of runs holds, as objects and as JSON."""

from collections.abc import Iterator
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from rollouts.evaluation.results import FailedEpisodes
from rollouts.evaluation.statistics import (
    Difference,
    Estimate,
)

T = TypeVar("T")


class ByFigure(BaseModel, Generic[T]):
    """A value for each figure of runs; None where there is no task to have it from.

    `environment_reward` and `group_reward` are None, too, where no run has group rewards: the total reward is
    then that of the environment. `reward_parts` has the named rewards, without their weights.
    """

    model_config = ConfigDict(extra="forbid")

    total_reward: T | None = None
    environment_reward: T | None = None
    group_reward: T | None = None
    reward_parts: dict[str, T] = {}
    pass_at_k: dict[int, T] = {}

    def labelled(self) -> Iterator[tuple[str, T]]:
        """The figures that are known, with their names for a reader."""
        for name in ("total_reward", "environment_reward", "group_reward"):
            if (value := getattr(self, name)) is not None:
                yield name.replace("_", " "), value
        yield from ((f"reward part {name}", value) for name, value in self.reward_parts.items())
        yield from ((f"pass@{k}", value) for k, value in self.pass_at_k.items())


class ComparedRun(BaseModel):
    """A run by itself. Its `estimates` are over all of its tasks, with 95 % intervals clustered by task.

    - `name`: how the comparison names it; different for each run.
    - `directory`, `weight_version`: as they were given; the version is None where all groups are meant.
    - `complete`: whether all tasks were run; None where nothing says so.
    - `tasks`, `episodes`, `failed`: their numbers; `samples`: the smallest and the largest number of a task's
      episodes.
    - `notes`: what a reader has to know of it before using the numbers, a line each.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    directory: str
    weight_version: str | None
    complete: bool | None
    tasks: int
    samples: tuple[int, int]
    episodes: int
    failed: int
    estimates: ByFigure[Estimate]
    notes: list[str]


class ChangedTask(BaseModel):
    """A task with its mean total reward in the baseline and in the run."""

    model_config = ConfigDict(extra="forbid")

    task_id: str
    baseline: float
    run: float


class RunDifference(BaseModel):
    """A run against the baseline: everything is the run's minus the baseline's.

    - `name`: that of the run.
    - `paired`: whether the differences are those of shared tasks; else the means over the tasks of each are
      compared.
    - `shared_tasks`, `only_in_baseline`, `only_in_run`: numbers of tasks, by their ids.
    - `notes`: what differs between the two apart from their rewards, and what of that is not known, a line
      each.
    - `differences`: with 95 % intervals clustered by task, and p-values.
    - `increased`, `decreased`, `equal`: of the shared tasks, how many have a larger, a smaller, the same
      total reward.
    - `most_increased`, `most_decreased`: up to 10 tasks each, the largest change first, then the largest
      reward.

    The last two are empty without shared tasks.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    paired: bool
    shared_tasks: int
    only_in_baseline: int
    only_in_run: int
    notes: list[str]
    differences: ByFigure[Difference]
    increased: int = 0
    decreased: int = 0
    equal: int = 0
    most_increased: list[ChangedTask] = []
    most_decreased: list[ChangedTask] = []


class Comparison(BaseModel):
    """Runs beside each other; `model_dump_json` gives the JSON form, `model_validate_json` reads it.

    - `version`: of this form.
    - `threshold`: an episode succeeds if its total reward is at least this; `failed_episodes`: how they
      count.
    - `runs`: the first is the baseline. `against_baseline`: one for each other run, in their order.
    """

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    threshold: float
    failed_episodes: FailedEpisodes
    runs: list[ComparedRun]
    against_baseline: list[RunDifference]
