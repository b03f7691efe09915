"""The modules that declare the wire types of this distribution, so that a program need not import them to decode.

No module is imported because a message names it: the type name in a message is only a key of this table, and the
modules in the table are parts of the same installation. A name that is not in the table is known only after the program
has imported the module that declares it.

The names "renderers.CLASS" belong to classes of `renderers`, which does not import `transport`; `registry` registers
them when it first needs them. All other names are registered by `@wire_type` in the module of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# Strings, because `transport` imports nothing from `rollouts`.
DECLARED_IN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "renderers.ExpansionPiece": "renderers.media.item",
        "renderers.MediaItem": "renderers.media.item",
        "renderers.MultiModalData": "renderers.rendered",
        "renderers.PixelScale": "renderers.media.item",
        "renderers.PlaceholderRange": "renderers.rendered",
        "renderers.ProcessorOutput": "renderers.vision.processor_output",
        "renderers.StillPatches": "renderers.vision.patches",
        "renderers.TensorField": "renderers.media.item",
        "rollouts.AbsentSource": "rollouts.trajectory.packed_episodes",
        "rollouts.Announced": "rollouts.workers.link.messages",
        "rollouts.Bfloat16Array": "rollouts.bfloat16",
        "rollouts.CancelJob": "rollouts.workers.link.messages",
        "rollouts.ComparedTokens": "rollouts.training.mismatch.compared",
        "rollouts.EpisodeFailure": "rollouts.workers.episode_outcome",
        "rollouts.EpisodeJob": "rollouts.workers.episode_job",
        "rollouts.EpisodeLimits": "rollouts.episodes.limits",
        "rollouts.EpisodeOutcome": "rollouts.workers.episode_outcome",
        "rollouts.FinishReason": "rollouts.engines.protocol",
        "rollouts.Group": "rollouts.runner.group",
        "rollouts.JobFailed": "rollouts.workers.link.messages",
        "rollouts.JobTurn": "rollouts.workers.progress",
        "rollouts.JobWaiting": "rollouts.workers.progress",
        "rollouts.JournalAttempted": "rollouts.runner.journal.entries",
        "rollouts.JournalBegun": "rollouts.runner.journal.entries",
        "rollouts.JournalClosed": "rollouts.runner.journal.entries",
        "rollouts.JournalWeights": "rollouts.runner.journal.entries",
        "rollouts.JournalFinished": "rollouts.runner.journal.entries",
        "rollouts.JournalStarted": "rollouts.runner.journal.entries",
        "rollouts.MediaReference": "rollouts.trajectory.token_node",
        "rollouts.MismatchOutlier": "rollouts.training.mismatch.report",
        "rollouts.MismatchReport": "rollouts.training.mismatch.report",
        "rollouts.PackedEpisodes": "rollouts.trajectory.packed_episodes",
        "rollouts.PackedItem": "rollouts.trajectory.packed_episodes",
        "rollouts.Provenance": "rollouts.trajectory.provenance",
        "rollouts.RunEnded": "rollouts.workers.link.messages",
        "rollouts.SamplingParams": "rollouts.engines.protocol",
        "rollouts.SetUpdate": "rollouts.workers.link.messages",
        "rollouts.Task": "rollouts.task",
        "rollouts.TensorList": "rollouts.training.batch.tensor_list",
        "rollouts.TokenNode": "rollouts.trajectory.token_node",
        "rollouts.TrainingBatch": "rollouts.training.batch.training_batch",
        "rollouts.TrainingSample": "rollouts.training.samples",
        "rollouts.Trajectory": "rollouts.trajectory.tree",
        "rollouts.Turn": "rollouts.trajectory.turn",
        "rollouts.WeightSpan": "rollouts.engines.protocol",
        "rollouts.WorkerHello": "rollouts.workers.link.messages",
        "rollouts.WorkerLeaves": "rollouts.workers.link.messages",
        "rollouts.demo.Failed": "rollouts.demo.trainer_process",
        "rollouts.demo.Learn": "rollouts.demo.messages",
        "rollouts.demo.Learned": "rollouts.demo.messages",
        "rollouts.demo.WarmStart": "rollouts.demo.messages",
        "transport.ShortenedMedia": "transport.interop.step_media",
    }
)
