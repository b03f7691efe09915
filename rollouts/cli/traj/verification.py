"""The check of a trajectory file: its checksums, the digests of its media, and the values of its episodes."""

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
    """Reads a file once, through `findings`; the counts are complete when `findings` has ended."""

    path: Path
    records: int = 0
    episodes: int = 0
    failures: int = 0
    media: set[str] = field(default_factory=set)

    def findings(self) -> Iterator[str]:
        """Sentences that name a record and what is wrong with it. Raises `TrajectoryFileError`."""
        for finding in self._findings():
            self.failures += 1
            yield finding

    def _findings(self) -> Iterator[str]:
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
                yield f"the last {file.unfinished} bytes are a record that its writer did not finish"
