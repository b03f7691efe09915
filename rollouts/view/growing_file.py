"""The episodes of a trajectory file that another process may still be writing."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from renderers import MediaSource
from renderers.messages import Modality
from rollouts.errors import RolloutsError
from rollouts.trajectory.tree import Trajectory
from rollouts.trajectory_files import Episode, episodes_of_record, open_reader, title_of_file
from rollouts.view.display_json import display_json
from rollouts.view.episode_data import summary
from transport import TransportError


class GrowingFile:
    """Reads new records on a thread of its own, and keeps a line of the list for each episode, not the episode.

    Its methods are called from several threads. Raises the errors of `open_reader`. `close` ends the thread.
    """

    def __init__(self, path: Path) -> None:
        self.title = title_of_file(path)
        self._path = path
        self._reader = open_reader(path)
        self._places: list[tuple[int, int]] = []  # of each episode its record, and its place there
        self._rows: list[dict[str, Any]] = []
        self._media: dict[tuple[Modality, str], int] = {}  # modality and digest -> the first episode that has it
        self._problems: list[str] = []
        self._lost = ""
        self._records = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"reading {path.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._reader.close()

    def rows(self, start: int, count: int) -> Sequence[dict[str, Any]]:
        """The lines of the list (`episode_data.summary`) from episode `start` on, as far as they are known."""
        return self._rows[start : start + count]

    def problems(self) -> Sequence[str]:
        """What of the file cannot be shown, a line each."""
        return [*self._problems, *([self._lost] if self._lost else [])]

    def episode(self, number: int) -> Trajectory:
        """Raises `RolloutsError`, and `TransportError` for a record that cannot be read."""
        try:
            record, place = self._places[number]
            return self._episodes(record, [])[place].trajectory
        except IndexError:
            raise RolloutsError(f"episode {number}: {self._path} does not have it") from None

    def search(self, wanted: Sequence[str], start: int, seconds: float) -> tuple[list[int], int]:
        """The episodes from number `start` on whose messages have all texts, and the first one that was not read."""
        deadline = time.monotonic() + seconds
        found: list[int] = []
        number, count = start, len(self._places)
        while number < count and (number == start or time.monotonic() < deadline):
            record, _ = self._places[number]
            episodes: Sequence[Episode] = []
            with contextlib.suppress(TransportError):  # opening one of them says that it cannot be read any more
                episodes = self._episodes(record, [])
            while number < count and self._places[number][0] == record:
                place = self._places[number][1]
                if place < len(episodes) and has_texts(episodes[place].trajectory, wanted):
                    found.append(number)
                number += 1
        return found, max(number, start)

    def medium(self, modality: Modality, digest: str) -> MediaSource:
        """Raises `RolloutsError`, and `TransportError` for a record that cannot be read."""
        number = self._media.get((modality, digest))
        if number is not None:
            for reference in self.episode(number).all_media():
                if (reference.modality, reference.source.digest) == (modality, digest):
                    return reference.source
        raise RolloutsError(f"the source {digest}: no episode of {self._path} has it")

    def _follow(self) -> None:
        while not self._ended.is_set():
            while self._records < len(self._reader) and not self._ended.is_set():
                self._read_record(self._records)
                self._records += 1
            try:
                self._reader.refresh()
            except (TransportError, OSError) as error:
                self._lost = f"the file is no longer followed: {error}"
                return
            if self._records == len(self._reader):
                self._ended.wait(1.0)

    def _read_record(self, record: int) -> None:
        try:
            for place, episode in enumerate(self._episodes(record, self._problems)):
                self._add((record, place), episode.trajectory)
        except TransportError as error:
            self._problems.append(f"record {record}: {error}")
        except RecursionError:
            self._problems.append(f"record {record}: a value is nested too deep")

    def _episodes(self, record: int, problems: list[str]) -> Sequence[Episode]:
        return episodes_of_record(self._reader, record, 0, problems)[1]

    def _add(self, place: tuple[int, int], trajectory: Trajectory) -> None:
        number = len(self._places)
        row = summary(trajectory, number)
        for reference in trajectory.all_media():
            self._media.setdefault((reference.modality, reference.source.digest), number)
        self._places.append(place)  # before the row: the page asks for the episodes of rows
        self._rows.append(row)


def has_texts(trajectory: Trajectory, wanted: Sequence[str]) -> bool:
    """Whether each of `wanted` is a part of a text of the messages. Upper and lower case are equal."""
    messages = [message for node in trajectory.nodes for message in node.messages]
    text = "\n".join(_texts(display_json([*messages, *(turn.message for turn in trajectory.turns)]))).lower()
    return all(each.lower() in text for each in wanted)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for member in value:
            yield from _texts(member)
    elif isinstance(value, dict):
        for name, member in value.items():
            # Names and digests that a reader does not see as text; the page leaves out the same
            # (frontend/src/message_texts.ts).
            if name not in {"role", "type", "$source"}:
                yield from _texts(member)
