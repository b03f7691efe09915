"""Advantages: the rewards of a group of episodes, compared with each other."""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from rollouts.errors import ArgumentError
from rollouts.values import check_choice

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["group", "batch", "none"]


@dataclass(frozen=True, slots=True)
class DegenerateGroup:
    """A group whose advantages are all 0: one episode, or equal rewards. `reward` is their mean."""

    group: Hashable
    episodes: int
    reward: float


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    *,
    baseline: Baseline = "mean",
    lengths: Sequence[int] | None = None,
    scale: Scale = "group",
) -> np.ndarray:
    """Each reward minus the baseline of its group, float32 (n,); 0 in a group in which all rewards are equal.

    `baseline` is the mean reward of the group ("mean"), or that of the group's other episodes
    ("leave_one_out", RLOO: Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740). With `lengths`, the
    trained tokens of each episode, the mean is weighted by them, as in OPO (Hao et al. 2025,
    arXiv:2505.23585).

    `scale` selects the standard deviation by which the difference is divided: "group", that of the group's
    rewards, as in GRPO (Shao et al. 2024, arXiv:2402.03300); "batch", that of all differences, so that a
    group with almost equal rewards weighs less (REINFORCE++, Hu et al. 2025, arXiv:2501.03262); "none", no
    division, as in Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) and RLOO. Standard deviations are those of
    the population (divided by n).

    Arrays and tensors (n,) count as lists of their values, and those without axes as their value.
    `degenerate_groups` lists the groups whose advantages are all 0. Raises `ArgumentError` unless there is
    one finite reward, one group whose hash is that of its value and one length of at least 1 for each
    episode.
    """
    check_choice("baseline", baseline, Baseline)
    check_choice("scale", scale, Scale)
    values = _finite_rewards(rewards)
    weights = np.ones(len(values)) if lengths is None else _checked_lengths(lengths, len(values))
    advantages = np.zeros(len(values))
    for _, indices in _grouped(groups, len(values)):
        group_rewards = values[indices]
        if _are_equal(group_rewards):
            continue
        difference = _minus_baseline(group_rewards, weights[indices], baseline)
        advantages[indices] = difference / group_rewards.std() if scale == "group" else difference
    if scale == "batch" and (spread := advantages.std()) > 0:
        advantages /= spread
    return advantages.astype(np.float32)


def degenerate_groups(rewards: Sequence[float], groups: Sequence[Hashable]) -> tuple[DegenerateGroup, ...]:
    """The groups that give no gradient, in order of appearance: one episode, or rewards equal to 1e-6 of the largest.

    Raises `ArgumentError` as `group_advantages` does.
    """
    values = _finite_rewards(rewards)
    return tuple(
        DegenerateGroup(group, len(indices), float(values[indices].mean()))
        for group, indices in _grouped(groups, len(values))
        if _are_equal(values[indices])
    )


def _minus_baseline(rewards: np.ndarray, weights: np.ndarray, baseline: Baseline) -> np.ndarray:
    """For two rewards or more. Rewards are centred first: the rest is exact for large equal parts of them."""
    centred = rewards - rewards.mean()
    weighted = centred * weights
    means: np.ndarray = np.average(centred, weights=weights)
    if baseline == "leave_one_out":
        means = (weighted.sum() - weighted) / (weights.sum() - weights)
    difference: np.ndarray = centred - means
    return difference


def _are_equal(rewards: np.ndarray) -> bool:
    # Rewards of a group that differ by less than this, relative to the largest, are equal: a smaller
    # difference is rounding, which a division by the standard deviation would turn into advantages of 1.
    # Differences of rewards below this are 0: the squares of smaller ones, of which the standard deviation is
    # made, are 0.
    return bool(np.ptp(rewards) <= max(1e-6 * np.abs(rewards).max(), 1e-30))


def _grouped(groups: Sequence[Hashable], count: int) -> Iterator[tuple[Hashable, list[int]]]:
    names = _as_value(groups)
    if isinstance(names, Set | Mapping) or not isinstance(names, Collection) or len(names) != count:
        raise ArgumentError("groups", groups, f"pass a list with the group of each of the {count} rewards")
    indices_by_group: dict[Hashable, list[int]] = {}
    for index, group in enumerate(names):
        indices_by_group.setdefault(_group_name(group, index), []).append(index)
    yield from indices_by_group.items()


def _as_value(value: Any) -> Any:
    """A tensor or an array as lists and numbers; other values as they are."""
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


def _as_list(values: Any) -> Any:
    """`_as_value` of the values and of each one in a list."""
    values = _as_value(values)
    return [_as_value(value) for value in values] if isinstance(values, list | tuple) else values


def _group_name(value: Any, index: int) -> Hashable:
    """The name of a group. Raises `ArgumentError` for one by which equal groups would not be found to be equal."""
    name: Hashable = _as_value(value)
    if isinstance(name, tuple):
        return tuple(_group_name(part, index) for part in name)
    hash_function: object = type(name).__hash__
    if (hash_function is object.__hash__ and name is not None) or name != name:
        rule = "pass a hashable value that the episodes of a group share, such as a group_id"
        raise ArgumentError(f"group {index}", value, f"its hash is its identity, or it equals no group; {rule}")
    return name


def _finite_rewards(rewards: Sequence[float]) -> np.ndarray:
    """The rewards as float64 (n,). They must be finite in float32, too, which advantages are."""
    values = np.asarray(_as_list(rewards), dtype=np.float64)
    if values.ndim != 1:
        raise ArgumentError("rewards", rewards, "pass one number for each episode")
    if len(wrong := np.flatnonzero(~(np.abs(values) <= _LARGEST))):
        rule = f"pass finite numbers from -{_LARGEST:g} to {_LARGEST:g}, and leave the other episodes out"
        raise ArgumentError(f"reward {wrong[0]}", float(values[wrong[0]]), rule)
    return values


#: Squares of larger rewards, of which the standard deviation is made, are not finite in float32.
_LARGEST = 1e18


def _checked_lengths(lengths: Sequence[int], count: int) -> np.ndarray:
    """The lengths as float64 (n,)."""
    values = np.asarray(_as_list(lengths))
    if values.shape != (count,) or (count and (values.dtype.kind not in "iu" or values.min() < 1)):
        rule = f"pass one number of tokens for each of {count} rewards, without episodes that have none"
        raise ArgumentError("lengths", lengths, rule)
    return values.astype(np.float64)
