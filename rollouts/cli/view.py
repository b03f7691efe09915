"""`rollouts view FILE`: the episodes of a file as a page, also while another process writes the file."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from renderers import MediaSource, TemplateRenderer, load_renderer
from renderers.messages import Modality
from rollouts.cli.render import read_tools
from rollouts.terminal.table import counted, exit_with_error, print_error, print_line, print_note
from rollouts.trajectory.tree import Trajectory
from rollouts.trajectory_files import Episode, episodes_of_record, open_reader, read_episodes, trajectory_file
from rollouts.view import write_html
from rollouts.view.episode_data import has_texts, summary
from rollouts.view.page import EpisodeReadError
from transport import RecordReader, TransportError

_POLL_SECONDS: Final = 1.0


class _Place(NamedTuple):
    """A record, and which of its episodes."""

    record: int
    position: int


class GrowingFile:
    """Reads new records on a thread of its own, and keeps a line of the list for each episode, not the episode.

    Raises the errors of `open_reader`. `close` ends the thread.
    """

    def __init__(self, path: Path) -> None:
        self.title = path.name
        self._path = path
        self._reader = open_reader(path)
        self._places: list[_Place] = []
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
        return self._rows[start : start + count]

    def problems(self) -> Sequence[str]:
        return [*self._problems, *([self._lost] if self._lost else [])]

    def episode(self, number: int) -> Trajectory:
        if number >= len(self._places):
            raise EpisodeReadError(f"episode {number}", f"{self._path} has {len(self._places)} episodes")
        place = self._places[number]
        try:
            found = next(islice(self._episodes(place.record, []), place.position, None), None)
        except TransportError as error:
            raise EpisodeReadError(f"episode {number}", str(error)) from error
        if found is None:
            raise EpisodeReadError(f"episode {number}", f"record {place.record} of {self._path} has changed")
        return found.trajectory

    def search(self, wanted: Sequence[str], start: int, seconds: float) -> tuple[list[int], int]:
        deadline = time.monotonic() + seconds
        found: list[int] = []
        number, count = start, len(self._places)
        while number < count and (number == start or time.monotonic() < deadline):
            record = self._places[number].record
            episodes = self._searched_episodes(record)
            while number < count and self._places[number].record == record:
                position = self._places[number].position
                if position < len(episodes) and has_texts(episodes[position].trajectory, wanted):
                    found.append(number)
                number += 1
        return found, max(number, start)

    def _searched_episodes(self, record: int) -> Sequence[Episode]:
        """The episodes of a record; none if it cannot be read any more, which opening one of them says."""
        try:
            return self._episodes(record, [])
        except TransportError:
            return []

    def medium(self, modality: Modality, digest: str) -> MediaSource:
        number = self._media.get((modality, digest))
        if number is not None:
            for reference in self.episode(number).all_media():
                if (reference.modality, reference.source.digest) == (modality, digest):
                    return reference.source
        raise EpisodeReadError(f"the source {digest}", f"no episode of {self._path} has it")

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
                self._ended.wait(_POLL_SECONDS)

    def _read_record(self, record: int) -> None:
        try:
            for position, episode in enumerate(self._episodes(record, self._problems)):
                self._add(_Place(record, position), episode)
        except TransportError as error:
            self._problems.append(f"record {record}: {error}")
        except RecursionError:
            self._problems.append(f"record {record}: a value is nested too deep")

    def _episodes(self, record: int, problems: list[str]) -> Sequence[Episode]:
        return list(episodes_of_record(self._reader, record, 0, problems))

    def _add(self, place: _Place, episode: Episode) -> None:
        if episode.violation is not None:
            self._problems.append(f"{episode.name}: {episode.violation}")
            return
        number = len(self._places)
        row = summary(episode.trajectory, number)
        for reference in episode.trajectory.all_media():
            self._media.setdefault((reference.modality, reference.source.digest), number)
        self._places.append(place)  # before the row: the page asks for the episodes of rows
        self._rows.append(row)


# `rollouts view FILE`: the episodes of a trajectory file as one HTML file, or served while the file grows.


def view(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A trajectory file (.mmr), or the directory of a run or demo.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="HTML_FILE", help="The HTML file, which is replaced if it exists; default: FILE.html."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model's directory or repository: adds token texts, owners, tool calls and drift.",
        ),
    ] = None,
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON list of the tools that the episodes had, for the drift.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the page on 127.0.0.1, and follow the file.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="With --serve; 0: any free one.")] = 0,
) -> None:
    """Look at episodes in a browser: messages with media, tokens with log-probabilities, branches, prompts, drift.

    Writes one HTML file that needs nothing else. With --serve, starts at once however large the file is, and shows
    the episodes that are written while it runs.
    """
    if tools is not None and model is None:
        exit_with_error("--tools is used by the full render only: pass --model, too")
    if serve and out is not None:
        exit_with_error("--serve writes no file: pass --out without it")
    path = trajectory_file(file)
    renderer = None if model is None else load_renderer(model)
    offered = None if tools is None else read_tools(tools)
    if serve:
        _serve(path, port, renderer, offered)
    else:
        _write(path, out or path.with_name(f"{path.name}.html"), renderer, offered)


def _serve(path: Path, port: int, renderer: TemplateRenderer | None, tools: list[Any] | None) -> None:
    """Serve until Ctrl-C."""
    from rollouts.view.server import new_secret, serve_viewer, viewer_app

    def report_ready(url: str) -> None:
        print_line(f"{path} at {url} (only from this machine; Ctrl-C ends it)")
        sys.stdout.flush()  # a program that started this one waits for the line

    store = GrowingFile(path)
    secret = new_secret()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            app = viewer_app(store, secret, renderer=renderer, tools=tools)
            asyncio.run(serve_viewer(app, secret, port, report_ready))
    finally:
        store.close()


def _write(path: Path, out: Path, renderer: TemplateRenderer | None, tools: list[Any] | None) -> None:
    problems: list[str] = []
    with open_reader(path) as reader:
        episodes = _trajectories(reader, problems)
        written = write_html(episodes, out, renderer=renderer, tools=tools, title=f"{path.name}", problems=problems)
    if not written and not problems:
        print_note(f"{path} holds no episodes yet")
    for problem in problems:
        print_error(f"not shown: {problem}")
    size = out.stat().st_size / 1e6
    print_line(f"{counted(written, 'episode')} in {out} ({size:.1f} MB); open it in a browser")


def _trajectories(reader: RecordReader, problems: list[str]) -> Iterator[Trajectory]:
    """The episodes that can be shown; `problems` gets a line for each other one."""
    for episode in read_episodes(reader, problems):
        if episode.violation is None:
            yield episode.trajectory
        else:
            problems.append(f"{episode.name}: {episode.violation}")
