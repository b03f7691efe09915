"""Is everything in a trajectory file what was written, and is each episode a tree?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollouts.cli.trajectory_file.episodes import UnreadableRecord, open_file
from rollouts.trajectory.pixel_forms import AbsentSource


@dataclass(slots=True)
class Verification:
    """Goes through a file once, by `findings`; the counts are right when that has ended."""

    path: Path
    records: int = 0
    episodes: int = 0
    failures: int = 0
    media: set[str] = field(default_factory=set)

    def findings(self) -> Iterator[str]:
        """What is wrong, naming record and episode. Each record's checksum, the digest of each medium that it refers
        to, and the invariants of each episode are checked. Raises `TrajectoryFileError`.
        """
        for words in self._findings():
            self.failures += 1
            yield words

    def _findings(self) -> Iterator[str]:
        with open_file(self.path) as file:
            self.records = file.records
            for found in file:
                if isinstance(found, UnreadableRecord):
                    yield found.reason
                    continue
                self.episodes += 1
                for violation in found.violations:
                    yield f"{found.name}: {violation}"
                if not found.violations:
                    references = found.trajectory.all_media()
                    self.media |= {one.source.digest for one in references if not isinstance(one.source, AbsentSource)}
            if file.unfinished:
                yield f"the last {file.unfinished} bytes are a record that its writer did not finish"
