"""An environment with sub-agents: four readers look at a quarter of an image each, and a critic judges the answer.

    python examples/sub_agents.py

One policy plays every agent. All turns are in one trajectory, of which each agent has branches of its own. The model
is tiny and has random weights, so its text is meaningless; the tokens and log-probabilities are exact.
"""

import asyncio
import tempfile

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from renderers import load_renderer
from rollouts import LocalEngine, SamplingParams, StepResult, run_episode
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import TrainingBatch, mismatch_report, samples_from_trajectory, token_logprobs

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 80, 220), "white": (250, 250, 250)}


def message(text, *images):
    return {
        "role": "user",
        "content": [*({"type": "image", "image": i} for i in images), {"type": "text", "text": text}],
    }


class NameTheColour:
    """The episode of a reader: one image of one colour, and two tries."""

    def __init__(self, image, colour):
        self.image, self.colour, self.tries = image, colour, 0

    def reset(self, seed):
        return [message("Which colour is this?", self.image)]

    def step(self, assistant):
        self.tries += 1
        right = self.colour in assistant["content"]
        if right or self.tries == 2:
            return StepResult(reward=float(right), done=True)
        return StepResult([message("Look again.")])


class DescribeTheQuarters:
    """The policy plans, receives what the readers found, and answers; a critic's verdict is added to the reward."""

    def attach(self, context):
        self.context = context

    def reset(self, seed):
        names = np.random.default_rng(seed).permutation(list(COLOURS))
        quarters = [np.full((32, 32, 3), COLOURS[name], np.uint8) for name in names]
        self.names, self.quarters, self.turns = names, quarters, 0
        rows = [np.concatenate(quarters[:2], axis=1), np.concatenate(quarters[2:], axis=1)]
        return [message("Plan how to name the colours of the quarters.", np.concatenate(rows))]

    async def step(self, assistant):
        self.turns += 1
        if self.turns == 1:
            found = await self.run_readers()
            return StepResult([message(f"The readers found: {', '.join(found)}. Name the four colours.")])
        verdict = await self.context.generate_turn(
            [message(f"Is '{assistant['content']}' a list of four colours? Answer yes or no.")], agent="critic"
        )
        right = sum(name in assistant["content"] for name in self.names) / 4
        agrees = ("yes" in verdict.message["content"]) == (right == 1.0)
        self.context.record_reward(verdict, float(agrees))
        return StepResult(reward=right, done=True)

    async def run_readers(self):
        """The last texts of four child episodes that run at the same time."""
        environments = [NameTheColour(*each) for each in zip(self.quarters, self.names, strict=True)]
        children = await asyncio.gather(
            *(
                self.context.run_child(environment, agent=f"reader-{number}", max_turns=2)
                for number, environment in enumerate(environments)
            )
        )
        return [child.message["content"] for child in children]


async def main(directory):
    renderer = load_renderer(directory)
    engine = LocalEngine.from_pretrained(directory)
    trajectory = await run_episode(
        DescribeTheQuarters(),
        engine=engine,
        renderer=renderer,
        sampling=SamplingParams(max_tokens=8, seed=0),
        max_turns=20,  # of all agents together
        seed=1,
    )
    await engine.close()

    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    mismatches = {}
    for agent in dict.fromkeys(turn.agent for turn in trajectory.turns):
        turns = [turn for turn in trajectory.turns if turn.agent == agent]
        samples = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors, agents={agent})
        batch = TrainingBatch.from_samples(samples, pad_id=0)
        with torch.no_grad():
            report = mismatch_report(batch, token_logprobs(model, batch))
        mismatches[agent] = report.max_abs
        print(
            f"{agent or '(the environment)'}: {len(turns)} turns, reward {sum(turn.reward for turn in turns)}, "
            f"{len(samples)} samples, {report.tokens} sampled tokens, mismatch {report.max_abs:.1e} nats"
        )
    return trajectory, mismatches


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(tiny_qwen3_vl(directory)))
