"""A model with a chat template and a tool-call syntax of its own, which no built-in format reads.

    python examples/custom_format.py

Describes the syntax as a `ToolCallSyntax`, checks that it reads back what the template prints, and runs an episode with
tools. A script stands in for the model.
"""

import asyncio
import tempfile
from dataclasses import dataclass
from typing import Literal

from renderers import load_renderer
from renderers.formats import Format, InvalidJsonError, ReasoningMarkers, ToolCallParseStatus, ToolCallSyntax
from rollouts import SamplingParams, run_episode
from rollouts.environments import ToolEnvironment
from rollouts.testing import ScriptedEngine, tiny_qwen3_vl

# A call has its name on the first line, and an argument on each further line.
TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\nTools:\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.reasoning_content -%}{{- '[thoughts]' + message.reasoning_content + '[/thoughts]' -}}{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\n[call]\n' + call.function.name -}}
{%- for name, value in call.function.arguments.items() -%}
{{- '\n' + name + ': ' + (value if value is string else value | tojson) -}}
{%- endfor -%}
{{- '\n[/call]' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class LineCalls(ToolCallSyntax):
    """`[call]`, the name, a line `argument: value` for each argument, `[/call]`; values have no quotes."""

    start_markers: tuple[str, ...] = ("[call]",)
    end_markers: tuple[str, ...] = ("[/call]",)

    def attempts(self, block):
        name, *lines = block.plain_text(*block.body).strip().split("\n")
        schema = block.tools.of_arguments(name)  # the tool's own types say whether 3 is a number or a text
        arguments = {}
        for line in lines:
            argument, separator, value = line.partition(": ")
            if not separator or argument in arguments:
                return [block.failed(name=name)]
            try:
                arguments[argument] = schema.property(argument).parse_value(value)
            except InvalidJsonError:
                return [block.failed(ToolCallParseStatus.INVALID_JSON, name)]
        return [block.attempt(name, arguments)]  # with the status: ok, or what is wrong with it


FORMAT = Format(
    "lines",
    stop_tokens=("<|im_end|>",),
    reasoning=ReasoningMarkers("[thoughts]", "[/thoughts]"),
    tool_calls=LineCalls(),
)


def rainfall(city: str, days: int, unit: Literal["mm", "inch"] = "mm") -> str:
    """The expected rainfall."""
    return f"{12 * days} {unit} in {city}"


def question(task):
    return [{"role": "user", "content": task["question"]}]


def is_right(conversation, task):
    return float(task["answer"] in conversation[-1]["content"])


def round_trip(renderer, tools):
    """Parse an assistant's turn that the template printed, and return the message that it was and the parsed one."""
    call = {"name": "rainfall", "arguments": {"city": "Zürich: old town", "days": 3}}
    turn = {
        "role": "assistant",
        "reasoning_content": "I need the forecast.",
        "content": "One moment.",
        "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
    }
    rendered = renderer.render([{"role": "user", "content": "Will it rain?"}, turn], tools=tools)
    sampled = [token for token, mask in zip(rendered.token_ids, rendered.sampled_mask, strict=True) if mask]
    return turn, renderer.parse_response(sampled, tools=tools).to_message()


SCRIPT = [
    "[thoughts]A forecast helps.[/thoughts]I look.\n[call]\nrainfall\ncity: Bern\ndays: many\n[/call]",
    "Again.\n[call]\nrainfall\ncity: Bern\ndays: 2\n[/call]",
    "It will rain 24 mm.",
]


def main(directory):
    detected = load_renderer(directory, chat_template=TEMPLATE).format
    renderer = load_renderer(directory, chat_template=TEMPLATE, format=FORMAT)
    print(f"detected  {detected}\ngiven     {renderer.format}")

    task = {"question": "How much will it rain in Bern in two days?", "answer": "24 mm"}
    environment = ToolEnvironment(task, tools=[rainfall], messages=question, score=is_right)
    printed, parsed = round_trip(renderer, environment.tools)
    print(f"the template's own turn is read back: {parsed == printed}")

    engine = ScriptedEngine(SCRIPT, renderer=renderer)
    run = run_episode(environment, engine=engine, renderer=renderer, sampling=SamplingParams(), max_turns=4)
    trajectory = asyncio.run(run)
    for message in trajectory.to_messages(trajectory.leaves()[0]):
        calls = [call["function"] for call in message.get("tool_calls", ())]
        print(f"  {message['role']}: {message['content']!r}", *calls)
    print(f"reward {trajectory.reward}, forks {trajectory.forks}")
    return detected, printed, parsed, trajectory


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as model_directory:
        main(tiny_qwen3_vl(model_directory, weights=False))
