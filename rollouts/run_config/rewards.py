"""The rewards of a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.rewards import GroupReward, Reward
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.import_paths import imported_function
from rollouts.run_config.key_lines import KeyPath
from rollouts.run_config.sections import RewardSection


def make_rewards(file: ConfigFile, key: KeyPath, sections: Sequence[RewardSection]) -> list[Reward]:
    """The rewards in the array of tables `key`. Raises `RunConfigError`."""
    _check_names(file, key, sections)
    return [
        Reward(
            section.name,
            section.weight,
            imported_function(file, (*key, index, "function"), section.function),
            section.threaded,
        )
        for index, section in enumerate(sections)
    ]


def make_group_rewards(file: ConfigFile) -> list[GroupReward]:
    """The rewards of whole groups. Raises `RunConfigError`."""
    rewards = make_rewards(file, ("group_rewards",), file.config.group_rewards)
    return [GroupReward(reward.name, reward.weight, reward.function, reward.threaded) for reward in rewards]


def _check_names(file: ConfigFile, key: KeyPath, sections: Sequence[RewardSection]) -> None:
    names: set[str] = set()
    for index, section in enumerate(sections):
        if section.name in names:
            reason = f"two rewards have the name {section.name!r}; give each its own"
            raise file.error((*key, index, "name"), reason)
        names.add(section.name)
