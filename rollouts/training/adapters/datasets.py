"""Rows of Hugging Face `datasets`: a sample as columns of plain values."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from renderers import MediaSource, PlaceholderRange
from renderers.media.samples import raw_samples, wav_bytes
from renderers.messages import Modality
from renderers.vision.processor import MediaProcessor
from rollouts.engines.protocol import TopLogprobs, WeightSpan
from rollouts.training.adapters.checks import AdapterError, Violations, check_samples, trainer_module
from rollouts.training.adapters.image_file import image_file
from rollouts.training.samples import COLUMNS, TrainingSample
from rollouts.trajectory.media_reference import MediaReference

ROW: Final = "row of a dataset"
#: The dtype of each column of tokens, and its number of dimensions.
_COLUMNS: Mapping[str, tuple[npt.DTypeLike, int]] = {
    "token_ids": (np.int32, 1),
    "loss_mask": (np.bool_, 1),
    "logprobs": (np.float32, 1),
    "advantages": (np.float32, 1),
    "routed_experts": (np.int32, 3),
    "sampling_mask": (np.int32, 2),
    "top_ids": (np.int32, 2),
    "top_logprobs": (np.float32, 2),
    "teacher_logprobs": (np.float32, 1),
    "teacher_top_ids": (np.int32, 2),
    "teacher_top_logprobs": (np.float32, 2),
}
_FILES: Mapping[Modality, str] = {"image": "images", "audio": "sounds"}


def row_features() -> Any:
    """The `datasets.Features` of the rows. `images` and `sounds` are files, not decoded; cast a column to decode it."""
    datasets = trainer_module("datasets")
    value, column = datasets.Value, datasets.List
    features: dict[str, Any] = {}
    for name, (dtype, dimensions) in _COLUMNS.items():
        features[name] = value(np.dtype(dtype).name)
        for _ in range(dimensions):
            features[name] = column(features[name])
    placeholder = {"modality": "string", "mm_hash": "string", "offset": "int64", "length": "int64", "whole": "bool"}
    runs = column(column(value("int64")))
    spans = {"version": value("string"), "start": value("int64"), "end": value("int64")}
    return datasets.Features(
        {
            "name": value("string"),
            **features,
            "weight_spans": column(spans),
            "images": column(datasets.Image(decode=False)),
            # As `datasets.Audio` stores files, which needs torchcodec to write them.
            "sounds": column({"bytes": value("binary"), "path": value("string")}),
            "placeholders": column({**{name: value(kind) for name, kind in placeholder.items()}, "embed_runs": runs}),
        }
    )


def dataset_row(sample: TrainingSample) -> dict[str, Any]:
    """A sample as a row with the columns of `row_features`, for `datasets.Dataset.from_list(rows, features=...)`.

    `images` are PNG and JPEG files (see `image_file`), `sounds` the files that were given or WAV files of
    arrays, and `placeholders` their ranges in the tokens, with the hash of what a processor makes of each
    file; pixels and features are left out. An image or sound that was an array becomes a new file: its item
    has another source and `mm_hash` in the sample that `sample_from_row` makes, so `==` of the items, and of
    batches of the samples, is False, although ids, columns, ranges and tensors are equal. Routed experts come
    back as int32. Raises `AdapterError` for a video.
    """
    check_samples(ROW, [sample], _has_no_video, media_by_id=False, takes_teacher=True)
    files: dict[str, list[dict[str, Any]]] = {column: [] for column in _FILES.values()}
    placeholders = []
    for item, placeholder in sample.media:
        source = item.source
        if source.raw_modality == "audio":
            data = wav_bytes(*raw_samples(source))
        else:
            data = bytes(source.data) if item.modality == "audio" else image_file(source)[0]
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
    top_ids, top_logprobs = sample.top_logprobs or (None, None)
    columns = {name: getattr(sample, name) for name in COLUMNS}
    columns |= {"top_ids": top_ids, "top_logprobs": top_logprobs}
    return {
        "name": sample.name,
        **{name: None if column is None else column.tolist() for name, column in columns.items()},
        "weight_spans": [asdict(span) for span in sample.weight_spans],
        **files,
        "placeholders": placeholders,
    }


def _has_no_video(sample: TrainingSample) -> Violations:
    for item, _ in sample.media:
        if item.modality not in _FILES:
            cure = "Read the record file itself (transport.read_records)"
            yield "media", f"{item.modality} {item.mm_hash[:12]}: rows have images and sounds only. {cure}"


def sample_from_row(row: Mapping[str, Any], processors: Mapping[Modality, MediaProcessor]) -> TrainingSample:
    """The sample of a row, with pixels and features computed from its files by a renderer's `processors`.

    Raises `AdapterError` for a row without its files and for decoded ones, `PixelMismatchError` where the
    pixels or features are not those that the sampler saw, and `SampleError` for columns that contradict each
    other.
    """
    files: dict[Modality, Iterator[dict[str, bytes]]] = {}
    for modality, column in _FILES.items():
        ranges = [place["modality"] for place in row["placeholders"]].count(modality)
        are_files = all(isinstance(file, Mapping) and isinstance(file.get("bytes"), bytes) for file in row[column])
        if ranges != len(row[column]) or not are_files:
            cast = f"datasets.List(datasets.{modality.capitalize()}(decode=False))"
            raise AdapterError(
                ROW,
                f"sample {row['name']}",
                column,
                f"it is not a file with bytes for each of {ranges} ranges. Keep the rows as dataset_row makes them, "
                f"and cast the column to {cast}",
            )
        files[modality] = iter(row[column])
    media = []
    for place in row["placeholders"]:
        runs = place["embed_runs"]
        placeholder = PlaceholderRange(
            place["offset"],
            place["length"],
            None if runs is None else tuple((start, end) for start, end in runs),
            place["whole"],
        )
        source = MediaSource.of(next(files[place["modality"]])["bytes"])
        reference = MediaReference(place["modality"], place["mm_hash"], source, placeholder)
        media.append((reference.derive(processors), placeholder))
    columns: dict[str, Any] = {
        name: np.array(row[name], dtype) for name, (dtype, _) in _COLUMNS.items() if row.get(name) is not None
    }
    top_ids, top_logprobs = columns.pop("top_ids", None), columns.pop("top_logprobs", None)
    return TrainingSample(
        **columns,
        media=tuple(media),
        weight_spans=tuple(WeightSpan(**span) for span in row["weight_spans"]),
        name=row["name"],
        top_logprobs=None if top_ids is None else TopLogprobs(top_ids, top_logprobs),
    )
