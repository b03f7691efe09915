"""Images and sounds of episodes as files: unchanged where they were files, pixels as a PNG, samples as a WAV."""

import io
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from renderers import MediaSource
from renderers.errors import MediaError
from renderers.media.decoding import raw_to_image
from renderers.media.samples import raw_samples, wav_bytes
from renderers.media.sniffing import sniff
from renderers.messages import Modality
from rollouts.trajectory.packed_episodes import AbsentSource
from rollouts.trajectory.token_node import TokenNode

#: The columns of files, and what `datasets` reads of a Parquet file to know what they hold.
FILE_COLUMNS: Final[Mapping[Modality, str]] = {"image": "image_files", "audio": "audio_files"}

#: By media type; of the others the suffix is the subtype.
_SUFFIXES: Final = {
    "image/jpeg": "jpg",
    "image/tiff": "tif",
    "image/x-icon": "ico",
    "image/x-portable-anymap": "ppm",
    "audio/mpeg": "mp3",
    "audio/basic": "au",
    "audio/x-caf": "caf",
}


class FileColumns:
    """Media as `{"bytes", "path"}`, which `datasets` reads. `problems` has each that is left out, once."""

    def __init__(self, modalities: Collection[Modality], problems: list[str]) -> None:
        self._modalities = modalities
        self._problems = problems
        self._left_out: set[str] = set()

    def of(self, nodes: Sequence[TokenNode]) -> dict[str, list[dict[str, Any]]]:
        """The media that nodes introduce, in prompt order, a column for each modality."""
        return {FILE_COLUMNS[modality]: self._files(nodes, modality) for modality in self._modalities}

    def _files(self, nodes: Sequence[TokenNode], modality: Modality) -> list[dict[str, Any]]:
        files = []
        for reference in (each for node in nodes for each in node.media if each.modality == modality):
            source = reference.source
            try:
                if isinstance(source, AbsentSource):
                    raise MediaError("its bytes are not in this file")
                suffix, data = file_contents(source)
                files.append({"bytes": bytes(data), "path": f"{source.digest[:16]}.{suffix}"})
            except MediaError as error:
                if source.digest not in self._left_out:
                    self._left_out.add(source.digest)
                    self._problems.append(f"{modality} {source.digest[:16]}: {error}")
        return files


def file_contents(source: MediaSource) -> tuple[str, bytes | memoryview]:
    """The suffix and the bytes of a file: the source, or a PNG or WAV of raw pixels or samples. Raises `MediaError`."""
    if source.raw_modality == "audio":
        return "wav", wav_bytes(*raw_samples(source))
    if source.raw_modality == "image":
        file = io.BytesIO()
        raw_to_image(source.data).save(file, "PNG")
        return "png", file.getvalue()
    media_type = sniff(source.data) or ""
    subtype = media_type.partition("/")[2]
    return _SUFFIXES.get(media_type, subtype if subtype.isalnum() else "bin"), source.data
