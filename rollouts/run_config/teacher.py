"""The teacher of a run: an engine that scores each episode when it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from renderers import TemplateRenderer
from rollouts.engines.protocol import Engine
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.engines import engine_factory
from rollouts.run_config.parts import make_renderer
from rollouts.run_config.sections import LocalEngineSection, RendererSection
from rollouts.scoring import check_teacher, score, with_scores
from rollouts.trajectory.tree import Trajectory


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the table `[teacher]` describes. `file` has its tables in the place of those of the run."""

    file: ConfigFile
    make_engine: Callable[[], Any]
    renderer: TemplateRenderer
    top_k: int

    async def scored(self, engine: Engine, episode: Trajectory) -> Trajectory:
        """The episode with the teacher's columns. Raises as `score`."""
        return with_scores(episode, await score(episode, engine, top_k=self.top_k, renderer=self.renderer))


def make_teacher(file: ConfigFile, renderer: TemplateRenderer | None, *, offline: bool) -> Teacher | None:
    """The teacher of a configuration, which opens no connection; None without one.

    Raises `RunConfigError`, also for a teacher that would read the tokens of `renderer` in another way.
    """
    section = file.config.teacher
    if section is None:
        return None
    if renderer is None:
        raise file.error(("teacher",), "the episodes of a chat endpoint have no tokens to score; remove the table")
    of_teacher = section.renderer
    if of_teacher is None and isinstance(section.engine, LocalEngineSection):
        of_teacher = RendererSection(model=section.engine.directory)
    if of_teacher is None:
        reason = "the table is missing; add [teacher.renderer] with the teacher's model, to compare it with the run's"
        raise file.error(("teacher", "renderer"), reason)
    config = file.config.model_copy(update={"engine": section.engine, "renderer": of_teacher})
    own = replace(file, config=config, prefix=("teacher",))
    make_engine = engine_factory(own, None)
    own_renderer = make_renderer(own, offline=offline)
    assert own_renderer is not None  # only a chat endpoint has none
    with own.naming("renderer"):
        check_teacher(renderer, own_renderer)
    return Teacher(own, make_engine, renderer, section.top_k)
