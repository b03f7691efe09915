"""A tool that returns an image: the model zooms into a picture to read what is too small to see.

    python examples/tools_with_images.py
    python examples/tools_with_images.py --model DIR --base-url http://127.0.0.1:8000

The first form needs no model: a script zooms into two fields and then guesses. The second plays with a vLLM server
that serves DIR.
"""

import argparse
import asyncio
import random
import tempfile
from enum import Enum
from pathlib import Path
from typing import Annotated

from PIL import Image, ImageDraw
from pydantic import Field

from renderers import load_renderer
from rollouts import SamplingParams, VLLMEngine
from rollouts.environments import ToolEnvironment
from rollouts.episodes.limits import EpisodeLimits
from rollouts.rewards import Reward
from rollouts.runner import Runner, Task
from rollouts.testing import ScriptedEngine, tiny_qwen3_vl

FIELD = 96
COLOURS = {"red": (200, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 210)}


class Column(Enum):
    LEFT = "left"
    MIDDLE = "middle"
    RIGHT = "right"


class Board:
    """Three fields side by side, each with one small coloured dot. Its methods are tools of one episode."""

    def __init__(self, colours):
        self.image = Image.new("RGB", (FIELD * len(colours), FIELD), "white")
        draw = ImageDraw.Draw(self.image)
        for index, colour in enumerate(colours):
            left = FIELD * index + FIELD // 2
            draw.ellipse((left, FIELD // 2, left + 4, FIELD // 2 + 4), fill=COLOURS[colour])

    def zoom(
        self,
        column: Column,
        factor: Annotated[int, "how many times larger", Field(ge=2, le=4)] = 2,
    ) -> Image.Image:
        """Show the middle of one field, enlarged."""
        left = FIELD * list(Column).index(column) + FIELD // 4
        part = self.image.crop((left, FIELD // 4, left + FIELD // 2, 3 * FIELD // 4))
        return part.resize((part.width * factor, part.height * factor))


def question(task):
    text = f"Which colour has the dot in the {task.data['column']} field? Zoom in, then respond with the colour alone."
    image = Board(task.data["colours"]).image
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]


def is_right(conversation, task):
    column = [each.value for each in Column].index(task.data["column"])
    return float(conversation[-1]["content"].strip().lower() == task.data["colours"][column])


def calls(conversation, task):
    return sum(len(message.get("tool_calls", ())) for message in conversation)


def make_environment(task):
    rewards = [Reward("right", 1.0, is_right), Reward("calls", -0.05, calls)]
    return ToolEnvironment(task, tools=[Board(task.data["colours"]).zoom], messages=question, score=rewards)


def tasks(count):
    for number in range(count):
        order = random.Random(number)  # noqa: S311  not a secret
        colours, column = order.choices(list(COLOURS), k=3), order.choice(list(Column)).value
        yield Task(f"board-{number}", {"colours": colours, "column": column})


def script(request):
    """A model that zooms into two fields in its first turn, with a wrong factor once, and guesses in its second."""
    if request.request_id.endswith("-0"):
        call = '<tool_call>\n{{"name": "zoom", "arguments": {{"column": "{}", "factor": {}}}}}\n</tool_call>'
        return "I look closer. " + call.format("left", 3) + call.format("right", 9)
    return random.Random(request.sampling.seed).choice(list(COLOURS))  # noqa: S311  not a secret


async def play(engine, renderer):
    async with Runner(
        make_environment,
        engine,
        renderer,
        sampling=SamplingParams(max_tokens=512),
        group_size=2,
        limits=EpisodeLimits(max_turns=6),
    ) as runner:
        groups = [group async for group in runner.stream(tasks(4))]
    for group in groups:
        parts = {name: scores.tolist() for name, scores in group.reward_parts.items()}
        print(f"{group.task.task_id}: rewards {group.rewards.tolist()} of {parts}")
    episode = groups[0].episodes[0]
    for message in episode.to_messages(episode.leaves()[-1]):
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        print(f"  {message['role']}: {' '.join(part.get('text', '[image]') for part in parts)}")
    return groups


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="checkpoint directory, with --base-url that of the server")
    parser.add_argument("--base-url", help="a vLLM server to sample from")
    options = parser.parse_args(arguments)
    if options.base_url and not options.model:
        parser.error("--base-url needs --model, the directory that the server has loaded")
    with tempfile.TemporaryDirectory() as temporary:
        renderer = load_renderer(options.model or tiny_qwen3_vl(temporary, weights=False))
        engine = VLLMEngine(options.base_url) if options.base_url else ScriptedEngine(script, renderer=renderer)
        return asyncio.run(play(engine, renderer))


if __name__ == "__main__":
    main()
