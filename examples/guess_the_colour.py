"""A custom environment, run with a tiny vision-language model in this process.

    python examples/guess_the_colour.py

Prints the tokens of every trajectory node, and compares the sampler's log-probabilities with the trainer's.
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

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 80, 220)}


class GuessTheColour:
    """Show a coloured square; a wrong guess gets a larger square and another try."""

    def reset(self, seed):
        self.name = list(COLOURS)[seed % len(COLOURS)]
        self.side = 32
        return [self.question("Which colour is this?")]

    def step(self, assistant):
        if assistant["content"] == self.name:
            return StepResult(reward=1.0, done=True)
        self.side += 16
        return StepResult([self.question("No. Look again.")])

    def question(self, text):
        square = np.full((self.side, self.side, 3), COLOURS[self.name], dtype=np.uint8)
        return {"role": "user", "content": [{"type": "image", "image": square}, {"type": "text", "text": text}]}


async def main(directory):
    renderer = load_renderer(directory)
    engine = LocalEngine.from_pretrained(directory)
    sampling = SamplingParams(max_tokens=6, seed=0)
    trajectory = await run_episode(
        GuessTheColour(), engine=engine, renderer=renderer, sampling=sampling, max_turns=3, seed=2
    )
    await engine.close()

    for index, node in enumerate(trajectory.nodes):
        kind = "sampled" if node.sampled.all() else f"prompt, {len(node.media)} image(s)"
        print(f"node {index} ({kind}): {renderer.tokenizer.decode(node.token_ids.tolist())!r}")

    samples = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logprobs = token_logprobs(model, batch)
    report = mismatch_report(batch, logprobs)
    print(f"mismatch over {report.tokens} sampled tokens: {report.max_abs:.1e} nats")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(tiny_qwen3_vl(directory)))
