"""The teacher of a run: an engine that scores each episode when it has ended."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from renderers import TemplateRenderer
from rollouts.engines.protocol import ChatEngine, Engine, GenerateRequest, SamplingParams
from rollouts.engines.result_checks import check_result
from rollouts.errors import EngineError
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.engines import engine_factory
from rollouts.run_config.parts import make_renderer
from rollouts.run_config.sections import LocalEngineSection, RendererSection
from rollouts.scoring import score, with_scores
from rollouts.teacher import check_teacher
from rollouts.trajectory.tree import Trajectory


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the table `[teacher]` describes. `file` has its tables in the place of those of the run."""

    file: ConfigFile
    make_engine: Callable[[], Any]
    renderer: TemplateRenderer
    top_k: int
    adapter: str | None

    async def check(self, engine: Engine, sampler: Engine | ChatEngine | None) -> None:
        """Raise `RunConfigError` unless the engine, which is connected, can score what the run may sample.

        A short row is scored, because servers do not report how many of the likeliest tokens they give. Of
        the longest row are known the limits, the context of `sampler` (None: of other processes), and the
        tokens of all turns.
        """
        row = self.renderer.tokenizer.encode_run("Which of the two?").ids
        tried: list[tuple[str, dict[str, Any], str]] = [
            ("engine", {}, "take an engine that gives log-probabilities of prompts")
        ]
        if self.adapter is not None:
            cure = "name one that the server has: vllm serve --enable-lora --lora-modules NAME=DIRECTORY"
            cure += ", or sglang serve --enable-lora --lora-paths NAME=DIRECTORY"
            tried.append(("adapter", {"adapter": self.adapter}, cure))
        if self.top_k:
            cure = f"{self.top_k} is too large: use a smaller one"
            tried.append(("top_k", {"prompt_top_logprobs": self.top_k}, cure))
        request = GenerateRequest(row, SamplingParams(max_tokens=1), prompt_logprobs=True)
        for key, option, cure in tried:  # one option more each time, so that the one that fails is known
            request = replace(request, **option)
            try:
                check_result(request, await engine.generate(request))
            except EngineError as error:
                raise self.file.error((key,), f"the teacher cannot score: {error}; {cure}") from error
        limits, max_tokens = self.file.config.limits, self.file.config.sampling.max_tokens
        of_turns = max_tokens * (limits.max_turns or 1) + 1  # and a prompt of one token at least
        of_sampler = await sampler.context_length() if isinstance(sampler, Engine) else None
        bounds = (of_turns, limits.max_tokens, of_sampler)
        longest, context = min(bound for bound in bounds if bound is not None), await engine.context_length()
        # A row has at most one token less than the context; with that of the sampler, an episode rarely fills it.
        if context is not None and context < longest + (longest != bounds[-1]):
            reason = (
                f"the teacher's context has {context} tokens, and an episode may have {longest} ([sampling] max_tokens "
                f"{max_tokens}, [limits] max_turns {limits.max_turns}): write max_tokens = {context - 1} into "
                "[limits], or take a teacher with a longer context"
            )
            raise self.file.error(("engine",), reason)

    async def scored(self, engine: Engine, episode: Trajectory) -> Trajectory:
        """The episode with the teacher's columns. Raises as `score`."""
        scores = await score(episode, engine, top_k=self.top_k, renderer=self.renderer, adapter=self.adapter)
        return with_scores(episode, scores)


def make_teacher(file: ConfigFile, renderer: TemplateRenderer | None, *, offline: bool) -> Teacher | None:
    """The teacher, unconnected; None without one. Raises `RunConfigError`, also for other token ids."""
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
    assert own_renderer is not None  # `of_teacher` is its table
    with own.naming("renderer"):
        check_teacher(renderer, own_renderer)
    return Teacher(own, make_engine, renderer, section.top_k, section.adapter)
