"""The rewards of a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.rewards import GroupReward, Reward
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.errors import KeyPath
from rollouts.run_config.import_paths import check_call, imported_function
from rollouts.run_config.sections import RewardSection


def make_rewards(
    file: ConfigFile, key: KeyPath, sections: Sequence[RewardSection], arguments: Sequence[str]
) -> list[Reward]:
    """The rewards in the array of tables `key`, whose functions get `arguments`. Raises `RunConfigError`."""
    rewards: list[Reward] = []
    for index, section in enumerate(sections):
        if any(section.name == earlier.name for earlier in rewards):
            reason = f"two rewards have the name {section.name!r}; give each its own"
            raise file.error((*key, index, "name"), reason)
        function_key = (*key, index, "function")
        function = imported_function(file, function_key, section.function)
        check_call(file, function_key, function, arguments)
        rewards.append(Reward(section.name, section.weight, function, section.threaded))
    return rewards


def make_group_rewards(file: ConfigFile) -> list[GroupReward]:
    """The rewards of whole groups. Raises `RunConfigError`."""
    of_episodes = {"environment", *(section.name for section in getattr(file.config.environment, "rewards", ()))}
    for index, section in enumerate(file.config.group_rewards):
        if section.name in of_episodes:
            reason = f"the rewards of the episodes have the name {section.name!r}; give the group reward another one"
            raise file.error(("group_rewards", index, "name"), reason)
    rewards = make_rewards(file, ("group_rewards",), file.config.group_rewards, ["episodes"])
    return [GroupReward(reward.name, reward.weight, reward.function, reward.threaded) for reward in rewards]
