"""Record files as a streamed dataset of Hugging Face `datasets`."""

import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, get_args

from renderers import MediaItem, MediaSource
from renderers.messages import Modality
from rollouts.errors import ArgumentError
from rollouts.training.adapters.checks import AdapterError, trainer_module
from rollouts.training.adapters.datasets import ROW, dataset_row, row_features
from rollouts.training.samples import TrainingSample
from rollouts.training.trajectory_samples import Advantage, samples_from_trajectory
from rollouts.trajectory.tree import Trajectory
from transport import read_records

EpisodeAdvantage = Advantage | Callable[[Trajectory], Advantage | None]
"""The advantage of an episode as `samples_from_trajectory` takes it, or a function that computes it; None:
left out."""


def record_dataset(paths: Sequence[str | os.PathLike[str]], *, advantage: EpisodeAdvantage = 1.0) -> Any:
    """A streamed `datasets.IterableDataset` of the samples in record files, with the columns of `row_features`.

    The records are trajectories or lists of them. Each file is a shard, which is read by one worker of a
    torch `DataLoader`, so pass at least as many files as workers. Neither pixels nor features are computed: a
    row has the files of its images and sounds, and `sample_from_row` computes them in the worker. `advantage`
    is that of `samples_from_trajectory`, or a function from the trajectory to it, None to leave the episode
    out.

    Raises `ArgumentError` for `paths` that is no list of paths, and while reading `AdapterError` for another
    record.
    """
    if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Sequence) or not paths:
        raise ArgumentError("paths", paths, "pass a list of at least one path")
    return trainer_module("datasets").IterableDataset.from_generator(
        _rows,
        features=row_features(),
        gen_kwargs={"paths": [os.fspath(path) for path in paths], "advantage": advantage},
    )


def _rows(paths: list[str], advantage: EpisodeAdvantage) -> Iterator[dict[str, Any]]:
    """`datasets` divides the list among the workers: each shard has one path."""
    for path in paths:
        for number, record in enumerate(read_records(path)):
            for trajectory in record if isinstance(record, list) else [record]:
                if not isinstance(trajectory, Trajectory):
                    cure = "Pass files that RecordWriter has written trajectories to"
                    reason = f"a {type(trajectory).__name__} is no Trajectory. {cure}"
                    raise AdapterError(ROW, f"record {number} of {path}", "record", reason)
                values = advantage(trajectory) if callable(advantage) else advantage
                if values is not None:
                    yield from map(dataset_row, _samples_of_sources(trajectory, values))


def _samples_of_sources(trajectory: Trajectory, advantage: Advantage) -> list[TrainingSample]:
    """The samples of an episode, whose media have no tensors: rows have files in place of pixels."""
    references = {reference.source.digest: reference for reference in trajectory.all_media()}

    def item(source: MediaSource) -> MediaItem:
        known = references[source.digest]
        return MediaItem(known.modality, known.mm_hash, source, {}, known.placeholder.num_embeds, scale=None)

    processor: Any = SimpleNamespace(process=item)
    processors = dict.fromkeys(get_args(Modality), processor)
    return samples_from_trajectory(trajectory, advantage=advantage, processors=processors)
