"""Checks a trajectory file: checksums, digests and the invariants of each episode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollouts.cli.trajectory_file.episodes import UnreadableRecord, open_file
from rollouts.error_texts import quoted
from rollouts.trajectory.pixel_forms import AbsentSource
from rollouts.trajectory.step_lists import is_step_source


@dataclass(slots=True)
class Verification:
    """Checks a file in one pass; the counts are complete when `check` has ended."""

    path: Path
    records: int = 0
    episodes: int = 0
    failures: int = 0
    media: set[str] = field(default_factory=set)

    def check(self) -> Iterator[str]:
        """A line for each failure, with record and episode. Raises `TrajectoryFileError`.

        Checked are the checksum of each record, the digest of each medium, and the invariants of each episode.
        """
        for failure in self._failures():
            self.failures += 1
            yield failure

    def _failures(self) -> Iterator[str]:
        with open_file(self.path) as file:
            self.records = file.records
            for found in file:
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
            if file.unfinished:
                yield f"the last {file.unfinished} bytes are an incomplete record"
