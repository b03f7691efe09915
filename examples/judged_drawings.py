"""A model draws what it is shown with a tool; a second model looks at both pictures, and its verdict is the reward.

    python examples/judged_drawings.py
    python examples/judged_drawings.py --judge-url https://api.openai.com/v1 --judge gpt-5-mini

The policy is a script. So is the judge in the first form: it compares the pixels. The second form asks a model behind
OpenAI's chat completions, with the key in OPENAI_API_KEY.
"""

import argparse
import asyncio
import random
import tempfile

import numpy as np
from PIL import Image, ImageDraw

from renderers import MediaPolicy, load_renderer
from renderers.media.decoding import decode_image
from rollouts import SamplingParams
from rollouts.engines import ChatEndpoint
from rollouts.environments import ToolEnvironment
from rollouts.rewards import Judge, Reward
from rollouts.runner import Runner, Task
from rollouts.testing import ScriptedEngine, tiny_qwen3_vl

COLOURS = ("red", "green", "blue")
PROMPT = """\
A student was shown this picture:
{{ task.data.picture }}
The student's drawings, the last of which counts:
{% for message in messages if message.role == "tool" %}
{{ message.content }}
{% endfor %}
Is the same shape drawn in the same colour? Give a reason. The last line is only `Score: N`, where N is 2 if both are
the same, 1 if one of them is, and 0 otherwise."""


def picture(shape, colour):
    image = Image.new("RGB", (64, 64), "white")
    draw = ImageDraw.Draw(image)
    (draw.ellipse if shape == "circle" else draw.rectangle)((12, 12, 52, 52), fill=colour)
    return image


def draw(shape: str, colour: str) -> Image.Image:
    """Draw a circle or a square."""
    return picture(shape, colour)


def messages(task):
    content = [{"type": "image", "image": task.data["picture"]}, {"type": "text", "text": "Draw this."}]
    return [{"role": "user", "content": content}]


def policy(request):
    """A model that draws something, and is content with it."""
    if len(request.media) == 2:
        return "Done."
    choice = random.Random(request.sampling.seed)  # noqa: S311  not a secret
    arguments = f'{{"shape": "{choice.choice(["circle", "square"])}", "colour": "{choice.choice(COLOURS)}"}}'
    return f'<tool_call>\n{{"name": "draw", "arguments": {arguments}}}\n</tool_call>'


def compare(request):
    """In place of a judging model: the answer depends on the pixels of the first and the last image of the prompt."""
    shown, *_, drawn = (np.asarray(decode_image(item.source, MediaPolicy())) for item, _ in request.media)
    same_colour = (shown[32, 32] == drawn[32, 32]).all()
    same_shape = (shown[14, 14] == 255).all() == (drawn[14, 14] == 255).all()  # a corner that a circle leaves white
    return f"Same shape: {same_shape}. Same colour: {same_colour}.\nScore: {int(same_shape) + int(same_colour)}"


async def play(judge, renderer):
    tasks = [Task(f"{colour} square", {"picture": picture("square", colour)}) for colour in COLOURS]
    async with Runner(
        lambda task: ToolEnvironment(task, tools=[draw], messages=messages, score=Reward("alike", 0.5, judge)),
        ScriptedEngine(policy, renderer=renderer),
        renderer,
        sampling=SamplingParams(max_tokens=128, seed=0),
        group_size=4,
    ) as runner:
        return [group async for group in runner.stream(tasks)]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--judge-url", help="the address of a server with chat completions, such as http://127.0.0.1:8000/v1"
    )
    parser.add_argument("--judge", help="the name of the judging model at that server")
    options = parser.parse_args(arguments)
    if bool(options.judge_url) != bool(options.judge):
        parser.error("--judge-url and --judge belong together")
    with tempfile.TemporaryDirectory() as directory:
        renderer = load_renderer(tiny_qwen3_vl(directory, weights=False))
        if options.judge_url:
            engine = ChatEndpoint(options.judge_url, options.judge)
        else:
            engine = ScriptedEngine(compare, renderer=renderer)
        judge = Judge(engine, PROMPT, parse=r"Score: (?P<score>[012])", renderer=renderer)
        groups = asyncio.run(play(judge, renderer))
    for group in groups:
        for episode in group.episodes:
            drawn = episode.turns[0].message["tool_calls"][0]["function"]["arguments"]
            print(f"{group.task.task_id:13} {drawn['shape']:7} {drawn['colour']:6} {episode.error or episode.reward}")
    print(judge.usage)
    return groups, judge.usage


if __name__ == "__main__":
    main()
