"""`rollouts run --dry-run`: the first prompt of a run, as its engine would receive it, without an engine."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from renderers import MediaPolicy, Message, RenderedTokens, RendererPool, TemplateRenderer
from renderers.messages import PLURALS, is_media_part, media_value, part_kind
from rollouts.cli.render.token_cells import token_cells
from rollouts.cli.render.token_lines import print_tokens
from rollouts.engines.protocol import ChatAnswer, ChatEngine, Engine, GenerateRequest, GenerateResult, TokenListener
from rollouts.episodes.errors import EpisodeLimitError
from rollouts.errors import RolloutsError
from rollouts.run_config.engines import media_policy
from rollouts.run_config.run_parts import RunParts
from rollouts.run_config.sections import EndpointEngineSection
from rollouts.run_config.tasks import first_tasks
from rollouts.runner.group import Group
from rollouts.runner.retries import RetryPolicy
from rollouts.runner.runner import Runner
from rollouts.terminal.text import counted, printable
from rollouts.workers.worker_pool import WorkerPool


def print_first_prompt(parts: RunParts, console: Console) -> GenerateRequest | None:
    """Print the prompt of the first task's first request. Raises `RolloutsError` if there is none.

    Returns the request; None for a chat endpoint.
    """
    section = parts.file.config.engine
    if isinstance(section, EndpointEngineSection):
        endpoint = _NoEndpoint(media_policy(parts.file, section.media))
        group = _first_group(parts, endpoint, None, lambda: endpoint.messages)
        _print_messages(group, endpoint.messages, console)
        return None
    assert parts.renderer is not None  # every other kind of engine has one
    engine = _NoEngine()
    with _RecordingPool(parts.renderer) as pool:
        group = _first_group(parts, engine, pool, lambda: engine.request)
    assert engine.request is not None
    # An environment may request several completions at once; their prompts are rendered in any order.
    prompt_ids = list(engine.request.prompt_ids)
    rendered, tools = next(one for one in pool.rendered if one[0].token_ids == prompt_ids)
    _print(parts.renderer, group, rendered, tools, console)
    return engine.request


class _NoEngine(Engine):
    """Ends the episode at every request, and keeps the first."""

    def __init__(self) -> None:
        self.request: GenerateRequest | None = None

    async def generate(self, request: GenerateRequest, listen: TokenListener | None = None) -> GenerateResult:
        self.request = self.request or request
        raise EpisodeLimitError("dry_run", "a dry run has no engine")

    async def close(self) -> None:
        pass


class _NoEndpoint(ChatEngine):
    """Ends the episode at every request to a chat endpoint, and keeps the messages of the first."""

    def __init__(self, media_policy: MediaPolicy) -> None:
        self.media_policy = media_policy
        self.messages: Sequence[Message] = ()

    async def chat(self, messages: Sequence[Message], **options: Any) -> ChatAnswer:
        self.messages = self.messages or messages
        raise EpisodeLimitError("dry_run", "a dry run has no engine")

    async def close(self) -> None:
        pass


class _RecordingPool(RendererPool):
    """A pool that keeps what it renders, with the number of tools."""

    def __init__(self, renderer: TemplateRenderer) -> None:
        super().__init__(renderer)
        self.rendered: list[tuple[RenderedTokens, int]] = []

    def render(self, messages: Any, **options: Any) -> RenderedTokens:
        rendered = super().render(messages, **options)
        self.rendered.append((rendered, len(options.get("tools") or ())))
        return rendered

    async def render_async(self, messages: Any, **options: Any) -> RenderedTokens:
        rendered = await super().render_async(messages, **options)
        self.rendered.append((rendered, len(options.get("tools") or ())))
        return rendered


def _print_messages(group: Group, messages: Sequence[Message], console: Console) -> None:
    seed = group.episodes[0].seed
    title = f"first messages: task {group.task.task_id}, environment seed {seed}, {counted(len(messages), 'message')}"
    console.print(printable(title), "", sep="\n", soft_wrap=True, markup=False, highlight=False)
    for message in messages:
        content = message.get("content") or ""
        texts = [content] if isinstance(content, str) else [_part_text(part) for part in content]
        text = printable(f"{message['role']}: {' '.join(texts)}")
        console.print(text, soft_wrap=True, markup=False, highlight=False)


def _part_text(part: Any) -> str:
    if not is_media_part(part):
        return str(part["text"])
    return f"<{part_kind(part)}, {media_value(part).nbytes:,} bytes>"


def _first_group(
    parts: RunParts, engine: _NoEngine | _NoEndpoint, pool: RendererPool | None, requested: Callable[[], object]
) -> Group:
    """The group of the first task, which ended at its first request. Raises `RolloutsError` without a request."""

    async def run() -> Group:
        async with parts.place(engine, pool) as place:
            workers = place if isinstance(place, WorkerPool) else None
            runner = Runner(
                parts.make_environment,
                None if workers else engine,
                None if workers else pool,
                sampling=parts.sampling,
                limits=parts.limits,
                # An error of an environment, a medium or the engine is shown at once. The stop at the request is
                # a truncation, which is never repeated.
                retry=RetryPolicy(max_attempts=1),
                seed=parts.file.config.seed,
                workers=workers,
            )
            async with runner:
                async for group in runner.stream(first_tasks(parts.tasks, 1)):
                    return group
        raise parts.file.error(("tasks",), "there is no task; add at least one")

    group = asyncio.run(run())
    if not requested():
        episode = group.episodes[0]
        reason = episode.error or episode.truncation_reason or "the episode ended without a request"
        raise RolloutsError(f"task {group.task.task_id:.80} has no first prompt: {reason}")
    return group


def _print(renderer: TemplateRenderer, group: Group, rendered: RenderedTokens, tools: int, console: Console) -> None:
    seed = group.episodes[0].seed
    title = f"first prompt: task {group.task.task_id}, environment seed {seed}\n{_counts(rendered, tools)}"
    print_tokens(title, rendered, token_cells(renderer, rendered), console)


def _counts(rendered: RenderedTokens, tools: int) -> str:
    media = rendered.multi_modal_data
    placed = [] if media is None else media.items_with_ranges()
    counts = [
        counted(len(rendered), "token"),
        counted(len(rendered.message_roles), "message"),
        counted(tools, "tool"),
    ]
    for modality, plural in PLURALS.items():
        lengths = [where.length for item, where in placed if item.modality == modality]
        if lengths or modality == "image":
            tokens = f" of {counted(sum(lengths), 'token')}" if lengths else ""
            counts.append(f"{counted(len(lengths), plural.removesuffix('s'))}{tokens}")
    return ", ".join(counts)
