"""Rows of Hugging Face `datasets`: a sample as columns of plain values, and record files as a streamed dataset."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from renderers import MediaItem, MediaSource, PlaceholderRange
from renderers.errors import MissingExtraError
from renderers.media.samples import is_raw_audio, raw_samples, wav_bytes
from renderers.messages import Modality
from renderers.vision.processor import MediaProcessor
from rollouts.engines.protocol import TopLogprobs, WeightSpan
from rollouts.errors import ArgumentError, short_repr
from rollouts.training.adapters.arguments import AdapterError, checked_samples, image_file
from rollouts.training.samples import TrainingSample
from rollouts.training.trajectory_samples import Advantage, samples_from_trajectory
from rollouts.trajectory.media_reference import MediaReference
from rollouts.trajectory.token_node import TEACHER_COLUMNS, TEACHER_TOP_IDS
from rollouts.trajectory.tree import Trajectory
from transport import read_records

_ROW = "row of a dataset"
_FILES: Mapping[Modality, str] = {"image": "images", "audio": "sounds"}

EpisodeAdvantage = Advantage | Callable[[Trajectory], Advantage | None]
"""The advantage of an episode as `samples_from_trajectory` takes it, or a function that computes it; None: left out."""


def record_dataset(paths: Sequence[str | os.PathLike[str]], *, advantage: EpisodeAdvantage = 1.0) -> Any:
    """A streamed `datasets.IterableDataset` of the samples in record files, with the columns of `row_features`.

    The records are trajectories or lists of them. Each file is a shard, which is read by one worker of a torch
    `DataLoader`, so pass at least as many files as workers. Neither pixels nor features are computed: a row has
    the files of its images and sounds, and `sample_from_row` computes them in the worker. `advantage` is that of
    `samples_from_trajectory`, or a function from the trajectory to it, None to leave the episode out.

    Raises `ArgumentError` for `paths` that is no list of paths, and while reading `AdapterError` for another record.
    """
    if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Sequence) or not paths:
        raise ArgumentError("paths", paths, "pass a list of at least one path")
    datasets = _datasets()
    return datasets.IterableDataset.from_generator(
        _rows,
        features=row_features(),
        gen_kwargs={"paths": [os.fspath(path) for path in paths], "advantage": advantage},
    )


def row_features() -> Any:
    """The `datasets.Features` of the rows. `images` and `sounds` are files, not decoded; cast a column to decode it."""
    datasets = _datasets()
    value, column = datasets.Value, datasets.List
    return datasets.Features(
        {
            "name": value("string"),
            "token_ids": column(value("int32")),
            "loss_mask": column(value("bool")),
            "logprobs": column(value("float32")),
            "advantages": column(value("float32")),
            "weight_spans": column({"version": value("string"), "start": value("int64"), "end": value("int64")}),
            "routed_experts": column(column(column(value("int32")))),
            "top_ids": column(column(value("int32"))),
            "top_logprobs": column(column(value("float32"))),
            "teacher_logprobs": column(value("float32")),
            "teacher_top_ids": column(column(value("int32"))),
            "teacher_top_logprobs": column(column(value("float32"))),
            "images": column(datasets.Image(decode=False)),
            # As `datasets.Audio` stores files, which needs torchcodec to write them.
            "sounds": column({"bytes": value("binary"), "path": value("string")}),
            "placeholders": column(
                {
                    "modality": value("string"),
                    "mm_hash": value("string"),
                    "offset": value("int64"),
                    "length": value("int64"),
                    "embed_runs": column(column(value("int64"))),
                    "whole": value("bool"),
                }
            ),
        }
    )


def dataset_row(sample: TrainingSample) -> dict[str, Any]:
    """A sample as a row with the columns of `row_features`, for `datasets.Dataset.from_list(rows, features=...)`.

    `images` are PNG and JPEG files (see `image_file`), `sounds` the files that were given or WAV files of arrays, and
    `placeholders` their ranges in the tokens, with the hash of what a processor makes of each file; pixels and features
    are left out. An image or sound that was an array becomes a new file: its item has another source and `mm_hash` in
    the sample that `sample_from_row` makes, so `==` of the items, and of batches of the samples, is False, although
    ids, columns, ranges and tensors are equal. Routed experts come back as int32. Raises `AdapterError` for a video.
    """
    (sample,) = checked_samples([sample], takes_teacher=True)
    files: dict[str, list[dict[str, Any]]] = {column: [] for column in _FILES.values()}
    placeholders = []
    for item, placeholder in sample.media:
        if item.modality not in _FILES:
            raise AdapterError(
                _ROW,
                sample,
                "media",
                f"{item.modality} {item.mm_hash[:12]}: rows have images and sounds only. "
                "Read the record file itself (transport.read_records)",
            )
        data = _sound_file(item.source) if item.modality == "audio" else image_file(item.source)[0]
        files[_FILES[item.modality]].append({"bytes": data, "path": None})
        placeholders.append(
            {
                "modality": item.modality,
                "mm_hash": f"{hashlib.sha256(data).hexdigest()}-{item.mm_hash.rpartition('-')[2]}",
                "offset": placeholder.offset,
                "length": placeholder.length,
                "embed_runs": None if placeholder.embed_runs is None else [list(run) for run in placeholder.embed_runs],
                "whole": placeholder.whole,
            }
        )
    top = sample.top_logprobs
    return {
        "name": sample.name,
        "token_ids": sample.token_ids.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "logprobs": sample.logprobs.tolist(),
        "advantages": sample.advantages.tolist(),
        "weight_spans": [
            {"version": span.version, "start": span.start, "end": span.end} for span in sample.weight_spans
        ],
        "routed_experts": None if sample.routed_experts is None else sample.routed_experts.tolist(),
        "top_ids": None if top is None else top.token_ids.tolist(),
        "top_logprobs": None if top is None else top.logprobs.tolist(),
        **{name: None if (column := getattr(sample, name)) is None else column.tolist() for name in TEACHER_COLUMNS},
        **files,
        "placeholders": placeholders,
    }


def _sound_file(source: MediaSource) -> bytes:
    return wav_bytes(*raw_samples(source)) if is_raw_audio(source.data) else bytes(source.data)


def sample_from_row(row: Mapping[str, Any], processors: Mapping[Modality, MediaProcessor]) -> TrainingSample:
    """The sample of a row, with pixels and features computed from its files by a renderer's `processors`.

    Raises `AdapterError` for a row without its files and for decoded ones, `PixelMismatchError` where the pixels or
    features are not those that the sampler saw, and `SampleError` for columns that contradict each other.
    """
    for modality, column in _FILES.items():
        if (ranges := [place["modality"] for place in row["placeholders"]].count(modality)) != len(row[column]):
            raise AdapterError(
                _ROW,
                f"sample {row['name']}",
                "placeholders",
                f"{ranges} ranges for {len(row[column])} {column}. Keep the rows as dataset_row makes them",
            )
    remaining = {modality: iter(row[column]) for modality, column in _FILES.items()}
    media = []
    for place in row["placeholders"]:
        modality = place["modality"]
        file = next(remaining[modality])
        if not isinstance(file, Mapping) or not isinstance(file.get("bytes"), bytes):
            raise AdapterError(
                _ROW,
                f"sample {row['name']}",
                _FILES[modality],
                f"{short_repr(file)} is not a file with bytes. "
                f"Cast the column to datasets.List(datasets.{modality.capitalize()}(decode=False))",
            )
        runs = place["embed_runs"]
        placeholder = PlaceholderRange(
            place["offset"],
            place["length"],
            None if runs is None else tuple((start, end) for start, end in runs),
            place["whole"],
        )
        reference = MediaReference(modality, place["mm_hash"], MediaSource.of(file["bytes"]), placeholder)
        media.append((reference.derive(processors), placeholder))
    return TrainingSample(
        token_ids=np.array(row["token_ids"], dtype=np.int32),
        loss_mask=np.array(row["loss_mask"], dtype=bool),
        logprobs=np.array(row["logprobs"], dtype=np.float32),
        advantages=np.array(row["advantages"], dtype=np.float32),
        media=tuple(media),
        weight_spans=tuple(WeightSpan(span["version"], span["start"], span["end"]) for span in row["weight_spans"]),
        name=row["name"],
        routed_experts=None if row["routed_experts"] is None else np.array(row["routed_experts"], dtype=np.int32),
        top_logprobs=None
        if row.get("top_ids") is None
        else TopLogprobs(np.array(row["top_ids"], np.int32), np.array(row["top_logprobs"], np.float32)),
        **{
            name: np.array(row[name], np.int32 if name == TEACHER_TOP_IDS else np.float32)
            for name in TEACHER_COLUMNS
            if row.get(name) is not None
        },
    )


def _rows(paths: list[str], advantage: EpisodeAdvantage) -> Iterator[dict[str, Any]]:
    """`datasets` divides the list among the workers: each shard has one path."""
    for path in paths:
        for number, record in enumerate(read_records(path)):
            for trajectory in record if isinstance(record, list) else [record]:
                if not isinstance(trajectory, Trajectory):
                    raise AdapterError(
                        _ROW,
                        f"record {number} of {path}",
                        "record",
                        f"a {type(trajectory).__name__} is no Trajectory. "
                        "Pass files that RecordWriter has written trajectories to",
                    )
                yield from _trajectory_rows(trajectory, advantage)


def _trajectory_rows(trajectory: Trajectory, advantage: EpisodeAdvantage) -> Iterator[dict[str, Any]]:
    values = advantage(trajectory) if callable(advantage) else advantage
    if values is not None:
        processor: Any = _SourceItems({one.source.digest: one for one in trajectory.all_media()})
        processors: dict[Modality, MediaProcessor] = dict.fromkeys(get_args(Modality), processor)
        for sample in samples_from_trajectory(trajectory, advantage=values, processors=processors):
            yield dataset_row(sample)


@dataclass
class _SourceItems:
    """A `MediaProcessor` for rows, which have no pixels: it makes items without tensors of the references."""

    references: Mapping[str, MediaReference]

    def process(self, source: MediaSource) -> MediaItem:
        reference = self.references[source.digest]
        num_tokens = reference.placeholder.num_embeds
        return MediaItem(reference.modality, reference.mm_hash, source, {}, num_tokens, scale=None)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("a dataset of records", "trainers", "datasets") from error
    return datasets
