"""`rollouts run --dry-run`: the first prompt of a run, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from renderers import RenderedTokens, TemplateRenderer
from rollouts.cli.render.token_cells import token_cells
from rollouts.cli.render.token_view import By, View, legend, print_counts, token_lines
from rollouts.cli.run.parts import RunParts
from rollouts.episodes.environment import resolve
from rollouts.episodes.environment_calls import close_environment, environment_tools, reset_environment
from rollouts.errors import ArgumentError
from rollouts.runner.task import Task
from rollouts.terminal.text import counted, printable


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """The prompt of the first turn of the first task's first episode."""

    task: Task
    seed: int
    rendered: RenderedTokens
    tools: int


def print_first_prompt(parts: RunParts, console: Console) -> None:
    """Make the first environment, render its first messages and print the tokens."""
    prompt = asyncio.run(_first_prompt(parts))
    _print(parts.renderer, prompt, console)


async def _first_prompt(parts: RunParts) -> FirstPrompt:
    task = await _first_task(parts)
    seed = parts.environment_seed(task)
    environment = await resolve(parts.make_environment(task))
    try:
        messages = await reset_environment(environment, seed)
        tools = environment_tools(environment)
        rendered = parts.renderer.render(messages, tools=tools, add_generation_prompt=True)
    finally:
        await close_environment(environment)
    return FirstPrompt(task, seed, rendered, len(tools or ()))


async def _first_task(parts: RunParts) -> Task:
    source: Iterable[Task] | AsyncIterable[Task] = parts.tasks
    task: Any
    if isinstance(source, AsyncIterable):
        task = await anext(aiter(source), None)
    else:
        task = next(iter(source), None)
    if task is None:
        raise parts.file.error(("tasks",), "there is no task; add at least one")
    if not isinstance(task, Task):
        raise parts.file.error(("tasks",), str(ArgumentError("task", task, "the source must give Task objects")))
    return task


def _print(renderer: TemplateRenderer, prompt: FirstPrompt, console: Console) -> None:
    rendered = prompt.rendered
    colours = console.color_system is not None and not console.no_color
    view = View(By.OWNER, ids=False, colours=colours, width=console.width if console.is_terminal else None)
    title = f"first prompt: task {prompt.task.task_id}, environment seed {prompt.seed}"
    console.print(Text(printable(title), style="bold" if colours else ""), soft_wrap=True)
    console.print(_counts(prompt), legend(rendered, view), "", sep="\n", soft_wrap=True)
    for line in token_lines(rendered, token_cells(renderer, rendered), view):
        console.print(line, soft_wrap=True)
    console.print()
    print_counts(rendered, console)


def _counts(prompt: FirstPrompt) -> str:
    media = prompt.rendered.multi_modal_data
    placed = [] if media is None else media.items_with_ranges()
    counts = [
        counted(len(prompt.rendered), "token"),
        counted(len(prompt.rendered.message_roles), "message"),
        counted(prompt.tools, "tool"),
    ]
    for modality in ("image", "video"):
        lengths = [where.length for item, where in placed if item.modality == modality]
        if lengths or modality == "image":
            tokens = f" of {counted(sum(lengths), 'token')}" if lengths else ""
            counts.append(f"{counted(len(lengths), modality)}{tokens}")
    return ", ".join(counts)
