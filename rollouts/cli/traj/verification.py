"""Checks a trajectory file: checksums, digests and the invariants of each episode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollouts.cli.trajectory_file.episodes import UnreadableRecord, open_reader, read_episodes
from rollouts.error_texts import quoted
from rollouts.trajectory.pixel_forms import AbsentSource
from rollouts.trajectory.step_lists import is_step_source


@dataclass(slots=True)
class Verification:
    """Checks a file in one pass; the counts are complete when `failures` has ended."""

    path: Path
    records: int = 0
    episodes: int = 0
    media: set[str] = field(default_factory=set)

    def failures(self) -> Iterator[str]:
        """A line for each failure, with record and episode. Raises `CommandFileError`.

        Checked are the checksum of each record, the digest of each medium, and the invariants of each episode.
        """
        with open_reader(self.path) as reader:
            self.records = len(reader)
            for found in read_episodes(reader):
                if isinstance(found, UnreadableRecord):
                    yield found.reason
                    continue
                self.episodes += 1
                if found.violation is not None:
                    yield f"{found.name}: {found.violation}"
                    continue
                for reference in found.trajectory.all_media():
                    source = reference.source
                    if isinstance(source, AbsentSource):
                        continue
                    self.media.add(source.digest)
                    if reference.mm_hash.partition("-")[0] != source.digest and not is_step_source(source):
                        yield (
                            f"{found.name}: {reference.modality} {quoted(reference.mm_hash)} has the source "
                            f"{source.digest}, and its name begins with another digest"
                        )
            if reader.truncated_bytes:
                yield f"the last {reader.truncated_bytes} bytes are an incomplete record"
