"""The page of the viewer beside a report: the episodes that the report links to, and others as far as there is room."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from renderers import TemplateRenderer
from rollouts.report.figures import Collected, EpisodeFigures
from rollouts.report.run_files import RunFiles
from rollouts.trajectory.tree import Trajectory
from rollouts.view import write_html
from rollouts.view.trainer_logprobs import TrainerLogprobs

#: Bounds of the page, about 25 MB.
MAX_EPISODES: Final = 500
MAX_TOKENS: Final = 3_000_000


@dataclass(frozen=True, slots=True)
class ViewerPage:
    """The written page. `places` maps the number of an episode to its number on the page."""

    name: str = ""
    places: Mapping[int, int] = field(default_factory=dict)

    def link(self, number: int) -> str:
        """The relative address of an episode on the page; empty where it is not there."""
        return f"{self.name}#e={self.places[number]}" if number in self.places else ""


def write_viewer_page(
    path: Path,
    files: RunFiles,
    collected: Collected,
    linked: Sequence[EpisodeFigures],
    *,
    renderer: TemplateRenderer | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    deadline: float | None = None,
) -> ViewerPage:
    """Write the page with the episodes `linked` first of all; it has no episodes after `deadline`. Raises `OSError`."""
    chosen = choose_episodes(collected.episodes, linked)
    if not chosen:
        return ViewerPage()
    places: dict[int, int] = {}
    records: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for episode in chosen:
        records[episode.record][episode.place] = episode.number

    def trajectories() -> Iterator[Trajectory]:
        for number, trajectory in files.chosen_episodes(records):
            if deadline is not None and time.monotonic() > deadline and places:
                return
            places[number] = len(places)
            yield trajectory

    total = len(collected.episodes)
    title = f"{collected.title}: {len(chosen)} of {total} episodes" if len(chosen) < total else collected.title
    compared = TrainerLogprobs({episode.episode_id for episode in chosen})
    for step, _ in files.mismatches([]):  # `collect` has named what cannot be read
        compared.add(step)
    trainer = compared if compared.unused else None
    write_html(trajectories(), path, renderer=renderer, tools=tools, compared=trainer, title=title)
    return ViewerPage(path.name, places)


def choose_episodes(episodes: Sequence[EpisodeFigures], linked: Sequence[EpisodeFigures]) -> list[EpisodeFigures]:
    """The linked ones, then others at equal distances, within the bounds; in order."""
    count = min(len(episodes), MAX_EPISODES)
    spread = [episodes[int(at)] for at in np.linspace(0, len(episodes) - 1, count)] if count else []
    chosen: dict[int, EpisodeFigures] = {}
    tokens = 0
    for episode in (*linked, *spread):
        if episode.number in chosen:
            continue
        tokens += episode.tokens
        if len(chosen) == MAX_EPISODES or (tokens > MAX_TOKENS and chosen):
            break
        chosen[episode.number] = episode
    return [chosen[number] for number in sorted(chosen)]
