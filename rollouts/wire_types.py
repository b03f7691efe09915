"""The modules that declare the wire types of `rollouts`, so that a program need not import them to decode.

`transport` finds the table by the entry point `transport.wire_types` of this distribution.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

DECLARED_IN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "rollouts.AbsentSource": "rollouts.trajectory.packed_episodes",
        "rollouts.ComparedTokens": "rollouts.compared_tokens",
        "rollouts.EpisodeFailure": "rollouts.episodes.errors",
        "rollouts.EpisodeJob": "rollouts.workers.episode_worker",
        "rollouts.EpisodeLimits": "rollouts.episodes.limits",
        "rollouts.EpisodeOutcome": "rollouts.workers.episode_worker",
        "rollouts.FinishReason": "rollouts.engines.protocol",
        "rollouts.Group": "rollouts.runner.group",
        "rollouts.MediaReference": "rollouts.trajectory.media_reference",
        "rollouts.MismatchOutlier": "rollouts.training.mismatch.report",
        "rollouts.MismatchReport": "rollouts.training.mismatch.report",
        "rollouts.PackedEpisodes": "rollouts.trajectory.packed_episodes",
        "rollouts.Provenance": "rollouts.trajectory.provenance",
        "rollouts.SamplingParams": "rollouts.engines.protocol",
        "rollouts.Task": "rollouts.task",
        "rollouts.TokenNode": "rollouts.trajectory.token_node",
        "rollouts.TopLogprobs": "rollouts.engines.protocol",
        "rollouts.TrainingBatch": "rollouts.training.batch",
        "rollouts.TrainingSample": "rollouts.training.samples",
        "rollouts.Trajectory": "rollouts.trajectory.tree",
        "rollouts.Turn": "rollouts.trajectory.turn",
        "rollouts.WeightSpan": "rollouts.engines.protocol",
    }
)
