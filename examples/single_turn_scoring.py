"""A dataset of prompts with images, one completion each, scored by functions: the rewards and advantages of groups.

    python examples/single_turn_scoring.py
    python examples/single_turn_scoring.py --data FILE.jsonl --model DIR --base-url http://127.0.0.1:8000

The first form needs no model: it draws a small dataset, and a script guesses. The second samples from a vLLM server
that serves DIR. A line of FILE is {"id": ..., "image": ..., "question": ..., "answer": ...}, with the path of an image
relative to FILE.
"""

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from renderers import MediaPolicy, load_renderer
from rollouts import SamplingParams, VLLMEngine
from rollouts.environments import ScoredPrompt
from rollouts.episodes.limits import EpisodeLimits
from rollouts.rewards import GroupReward, Reward, rank_by
from rollouts.runner import Runner, Task
from rollouts.testing import ScriptedEngine, tiny_qwen3_vl
from rollouts.training import group_advantages

GROUP_SIZE = 4


def draw_dataset(directory):
    """Four images of dots, and a file with a question about each; return the path of the file."""
    rows = []
    for count in range(1, 5):
        image = Image.new("RGB", (96, 64), "white")
        for dot in range(count):
            ImageDraw.Draw(image).ellipse((8 + 22 * dot, 24, 22 + 22 * dot, 38), fill="black")
        image.save(directory / f"dots-{count}.png")
        question = "How many dots are there? Respond with the number alone."
        rows.append({"id": f"dots-{count}", "image": f"dots-{count}.png", "question": question, "answer": str(count)})
    path = directory / "dots.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def read_tasks(path):
    """A task for each line; images stay paths, which the renderer opens when it needs them."""
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        yield Task(row["id"], {**row, "image": str((path.parent / row["image"]).resolve())})


def messages(task):
    content = [{"type": "image", "image": task.data["image"]}, {"type": "text", "text": task.data["question"]}]
    return [{"role": "user", "content": content}]


def is_right(completion, task):
    return float(completion["content"].strip().rstrip(".") == task.data["answer"])


def is_a_number(completion, task):
    return float(completion["content"].strip().isdecimal())


def shortest_first(episode):
    return -episode.nodes[-1].token_ids.size


REWARDS = [Reward("right", 1.0, is_right), Reward("number", 0.2, is_a_number)]
GROUP_REWARDS = [GroupReward("short", 0.1, rank_by(shortest_first))]  # compares the completions of one prompt


def script(request):
    """A model that guesses, sometimes in a sentence."""
    choice = random.Random(request.sampling.seed)  # noqa: S311  not a secret
    number = choice.randint(1, 4)
    return choice.choice([f"{number}", f"{number}.", f"I see {number} dots."])


async def score(engine, renderer, tasks):
    async with Runner(
        lambda task: ScoredPrompt(task, messages, REWARDS),
        engine,
        renderer,
        sampling=SamplingParams(max_tokens=64, seed=0),
        group_size=GROUP_SIZE,
        group_rewards=GROUP_REWARDS,
        limits=EpisodeLimits(max_turns=1),
    ) as runner:
        return [group async for group in runner.stream(tasks)]


def print_table(groups):
    names = [reward.name for reward in (*REWARDS, *GROUP_REWARDS)]
    print(f"{'task':10}", *(f"{name:>7}" for name in [*names, "total"]), f"{'advantage':>10}  completion")
    for group in groups:
        for episode in group.episodes:
            if episode.error:
                print(f"{group.task.task_id:10} failed: {episode.error}")
        finished = list(group.succeeded())
        indices = [index for index, _ in finished]
        advantages = group_advantages(group.rewards[indices], [group.task.task_id] * len(indices))
        for (index, episode), advantage in zip(finished, advantages, strict=True):
            values = [*(group.reward_parts[name][index] for name in names), group.rewards[index]]
            text = episode.turns[-1].message["content"]
            numbers = " ".join(f"{value:7.2f}" for value in values)
            print(f"{group.task.task_id:10} {numbers} {advantage:10.2f}  {text!r:.60}")
    print(f"mean total reward {np.mean([group.rewards for group in groups]):.2f}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a JSON Lines file of prompts")
    parser.add_argument("--model", type=Path, help="checkpoint directory, with --base-url that of the server")
    parser.add_argument("--base-url", help="a vLLM server to sample from")
    options = parser.parse_args(arguments)
    if options.base_url and not options.model:
        parser.error("--base-url needs --model, the directory that the server has loaded")
    with tempfile.TemporaryDirectory() as temporary:
        data = options.data or draw_dataset(Path(temporary).resolve())
        # By default no file is read: a message may hold text of strangers. Here, those beside the dataset are.
        policy = MediaPolicy(allowed_directories=(str(data.resolve().parent),))
        directory = options.model or tiny_qwen3_vl(Path(temporary) / "model", weights=False)
        renderer = load_renderer(directory, media_policy=policy)
        engine = VLLMEngine(options.base_url) if options.base_url else ScriptedEngine(script, renderer=renderer)
        groups = asyncio.run(score(engine, renderer, read_tasks(data)))
    print_table(groups)
    return groups


if __name__ == "__main__":
    main()
