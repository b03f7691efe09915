"""`rollouts render`: what a conversation becomes as tokens, with the owner of each."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from renderers import load_renderer
from rollouts.cli.render.conversation_file import read_conversation, read_tools
from rollouts.cli.render.token_cells import token_cells, tokens_as_json
from rollouts.cli.render.token_lines import print_tokens
from rollouts.terminal.text import counted, print_json


def render(
    conversation: Annotated[
        Path,
        typer.Argument(metavar="CONVERSATION", help="A JSON list of messages, {messages, tools}, or a .jsonl file."),
    ],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A model directory, or the name of a Hugging Face repository.")
    ],
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="TEMPLATE", help="A Jinja file, or the name of one of the model's templates."),
    ] = None,
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON list of tools; replaces the conversation's.")
    ] = None,
    row: Annotated[int | None, typer.Option(min=0, metavar="N", help="Which line of a .jsonl file, from 0.")] = None,
    generation_prompt: Annotated[
        bool,
        typer.Option(
            "--generation-prompt", help="Append the generation prompt, where the model would start to sample."
        ),
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Show each token's id.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: ids, masks, pieces, counts.")] = False,
) -> None:
    """Show a conversation as a model's tokens: who owns each, which are message body, which the model would sample."""
    read = read_conversation(conversation, row=row)
    offered_tools = read.tools if tools is None else read_tools(tools)
    renderer = load_renderer(model, chat_template=chat_template)
    rendered = renderer.render(read.messages, tools=offered_tools, add_generation_prompt=generation_prompt)
    cells = token_cells(renderer, rendered)
    if as_json:
        print_json(tokens_as_json(rendered, cells))
        return
    counts = f"{counted(len(rendered.message_roles), 'message')}, {counted(len(rendered), 'token')}"
    print_tokens(f"{conversation} as {model}: {counts}", rendered, cells, Console(), ids=ids)
