"""The `rollouts` command."""

from __future__ import annotations

import json
import os
import sys
import time
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from renderers import load_renderer
from rollouts.cli.command_group import INTERRUPTED, CommandGroup
from rollouts.cli.doctor.commands import doctor
from rollouts.cli.media.commands import media_commands
from rollouts.cli.render.conversation_file import read_conversation, read_tools
from rollouts.cli.render.token_cells import token_cells
from rollouts.cli.render.token_json import tokens_as_json
from rollouts.cli.render.token_view import By, View, counts_table, legend, token_lines, visible
from rollouts.cli.traj.commands import traj_commands
from rollouts.episodes.errors import EpisodeError
from rollouts.errors import CapabilityError, ServerUnreachableError


class EngineKind(StrEnum):
    """What samples in the demonstration."""

    LOCAL = "local"
    VLLM = "vllm"


app = typer.Typer(cls=CommandGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
app.add_typer(media_commands, name="media")
app.add_typer(traj_commands, name="traj")
app.command()(doctor)


@app.callback()
def commands() -> None:
    """Exact multi-turn, multimodal rollouts."""


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer RL steps: about 80 seconds.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Decides everything: weights, digits, samples.")] = 0,
    out: Annotated[Path, typer.Option(help="Where model, trajectories, curves and figures go.")] = Path("demo-out"),
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a figure misses its target.")] = False,
    engine: Annotated[
        EngineKind, typer.Option(help="What samples: this process, or a vLLM server.")
    ] = EngineKind.LOCAL,
    base_url: Annotated[str, typer.Option(help="Of the vLLM server, which must serve OUT/model.")] = "",
) -> None:
    """Watch a tiny vision-language model learn to read digits, from random weights, on this machine."""
    console = Console()
    missing = [name for name in ("torch", "transformers", "sklearn", "matplotlib") if find_spec(name) is None]
    if missing:
        console.print(f'the demo needs {", ".join(missing)}: pip install "mmrollouts\\[demo]"')
        raise typer.Exit(2)
    if (engine is EngineKind.VLLM) != bool(base_url):
        raise typer.BadParameter("--engine vllm and --base-url URL go together")
    if base_url:
        from rollouts.engines.vllm.http.server_address import parse_address

        try:
            parse_address(base_url, api_key=None)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    # Two processes take turns on the same cores; threads that spin while the other one works would slow it down.
    # Read when torch is imported, here and in the child.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from rollouts.demo.output import interrupted_words, prepare_output
    from rollouts.demo.recipe import FULL, QUICK
    from rollouts.demo.trainer_process import TrainerProcess, collect_garbage_rarely

    recipe = QUICK if quick else FULL
    started, started_at = time.perf_counter(), time.time()
    prepare_output(out)
    try:
        # Started before anything heavy is imported here, so that both processes load torch at the same time.
        with TrainerProcess(out / "model", recipe, seed) as trainer:
            from rollouts.demo.progress import Progress
            from rollouts.demo.report import plot_curves, results_table
            from rollouts.demo.run import local_policy, run_demo
            from rollouts.demo.served import serve_command, served_policy

            collect_garbage_rarely()
            with Progress(console, recipe) as progress:
                results = run_demo(
                    recipe=recipe,
                    seed=seed,
                    out=out,
                    trainer=trainer,
                    progress=progress,
                    make_policy=served_policy(base_url) if engine is EngineKind.VLLM else local_policy,
                )
    except (EpisodeError, ServerUnreachableError, CapabilityError) as error:
        cause = error.__cause__ if isinstance(error, EpisodeError) else error
        if not isinstance(cause, ServerUnreachableError | CapabilityError):
            raise
        console.print(str(cause), markup=False)
        console.print(f"start the server with\n  {serve_command(out / 'model')}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print(interrupted_words(out, started_at), markup=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    results.seconds = time.perf_counter() - started
    results.save(out / "results.json")
    plot_curves(results, out / "curves.png")
    console.print(results_table(results))
    console.print(f"in {out}: curves.png, trajectories.mmr, results.json, model/")
    missed = results.missed_targets()
    for words in missed:
        console.print(f"[red]missed:[/red] {words}")
    if check and missed:
        raise typer.Exit(1)


@app.command()
def render(
    conversation: Annotated[Path, typer.Argument(help="A JSON list of messages, {messages, tools}, or a .jsonl file.")],
    model: Annotated[str, typer.Option(help="A model directory, or the name of a Hugging Face repository.")],
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja file instead of the model's own.")] = None,
    tools: Annotated[Path | None, typer.Option(help="A JSON list of tools; wins over the conversation's.")] = None,
    row: Annotated[int | None, typer.Option(min=0, help="Which line of a .jsonl file, from 0.")] = None,
    generation_prompt: Annotated[
        bool, typer.Option("--generation-prompt", help="End where the model samples.")
    ] = False,
    by: Annotated[By, typer.Option(help="What colours mean.")] = By.OWNER,
    ids: Annotated[bool, typer.Option("--ids", help="Show each token's id.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead: ids, masks, pieces, counts.")] = False,
) -> None:
    """Show a conversation as a model's tokens: who owns each, which are message body, which the model would sample."""
    read = read_conversation(conversation, row=row)
    offered = read.tools if tools is None else read_tools(tools)
    renderer = load_renderer(model, chat_template=chat_template)
    rendered = renderer.render(read.messages, tools=offered, add_generation_prompt=generation_prompt)
    cells = token_cells(renderer, rendered)
    if as_json:
        sys.stdout.write(json.dumps(tokens_as_json(rendered, cells)) + "\n")
        return
    console = Console()
    colours = console.color_system is not None and not console.no_color
    view = View(by, ids, colours, width=console.width if console.is_terminal else None)
    title = f"{conversation} as {model}: {len(rendered.message_roles)} messages, {len(rendered):,} tokens"
    console.print(Text(visible(title), style="bold" if colours else ""), legend(rendered, view), "", sep="\n")
    for line in token_lines(rendered, cells, view):
        console.print(line, soft_wrap=True)
    console.print("", counts_table(rendered), sep="\n")


def main() -> None:
    app()
