"""GRPO over episodes of two turns, with images: ask for a digit, and after a wrong answer show it once more.

    python examples/grpo_multiturn.py [--quick] [--steps N]
    python examples/grpo_multiturn.py --model DIR --base-url http://127.0.0.1:8000

The first form samples in this process, from a tiny model that is first trained on some labelled digits. The second
samples from a vLLM server that serves DIR and reads the same file system (docs/vllm.md); new weights are written below
DIR.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from renderers import build_training_sample, load_renderer
from rollouts import EpisodeSpec, LocalEngine, SamplingParams, VLLMEngine, run_episodes
from rollouts.demo.task import DigitsEnvironment, load_digit_sets
from rollouts.engines.vllm import write_tied_head
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import (
    TrainingBatch,
    group_advantages,
    micro_batches,
    policy_gradient_loss,
    sample_from_rendered,
    samples_from_trajectory,
    sft_loss,
    token_logprobs,
)


class Trainer:
    """The model, its optimizer, and the renderer that computes pixels again from the images of an episode."""

    def __init__(self, directory, learning_rate):
        self.model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
        self.renderer = load_renderer(directory)
        self.pad_id = self.model.config.text_config.pad_token_id or 0

    def step(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def warm_start(self, digits, steps):
        """Supervised steps on labelled digits: a policy that is never right has nothing to learn from."""
        environment, samples = DigitsEnvironment(digits), []
        for index in range(len(digits)):
            messages = [*environment.reset(index), {"role": "assistant", "content": environment.answer()}]
            samples.append(sample_from_rendered(build_training_sample(self.renderer, messages)))
        order = np.random.default_rng(0)
        for _ in range(steps):
            rows = order.choice(len(samples), min(32, len(samples)), replace=False)
            batch = TrainingBatch.from_samples([samples[row] for row in rows], pad_id=self.pad_id)
            sft_loss(token_logprobs(self.model, batch), batch.loss_mask).backward()
            self.step()

    def learn(self, trajectories):
        """One optimizer step on whole groups; returns the largest difference to the sampler's log-probabilities."""
        finished = [trajectory for trajectory in trajectories if not trajectory.error]
        advantages = group_advantages([one.reward for one in finished], [one.group_id for one in finished])
        samples = [
            sample
            for trajectory, advantage in zip(finished, advantages, strict=True)
            for sample in samples_from_trajectory(
                trajectory, advantage=float(advantage), processors=self.renderer.processors
            )
        ]
        mismatch, trained = 0.0, sum(int(sample.loss_mask.sum()) for sample in samples)
        for batch in micro_batches(sorted(samples, key=len), rows=128, pad_id=self.pad_id):
            logprobs = token_logprobs(self.model, batch)
            difference = (logprobs - batch.logprobs)[batch.loss_mask].abs()
            mismatch = max(mismatch, difference.max().item())
            loss = policy_gradient_loss(
                logprobs, batch.logprobs, batch.advantages, batch.loss_mask, normaliser=trained
            ).loss
            loss.backward()
        self.step()
        return mismatch


async def send_weights(engine, model, version, directory):
    if isinstance(engine, LocalEngine):
        await engine.update_weights(model.state_dict(), version)
        return
    target = Path(directory) / "updates" / version
    model.save_pretrained(target)
    write_tied_head(target)  # vLLM reads the output layer by its own name
    await engine.update_weights(target.resolve(), version)


async def train(trainer, engine, digits, directory, *, steps, groups, group_size):
    order = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=4)
    rewards, mismatches = [], []
    for step in range(steps):
        await send_weights(engine, trainer.model, str(step), directory)
        specs = [
            EpisodeSpec(int(digit), 1000 * step + number, f"{step}-{digit}")
            for digit in order.choice(len(digits), groups, replace=False)
            for number in range(group_size)
        ]
        trajectories = await run_episodes(
            lambda: DigitsEnvironment(digits),
            specs,
            engine=engine,
            renderer=trainer.renderer,
            sampling=sampling,
            max_turns=2,
        )
        rewards.append(float(np.mean([trajectory.reward for trajectory in trajectories])))
        turns = sum(trajectory.num_turns for trajectory in trajectories)
        mismatches.append(trainer.learn(trajectories))
        print(f"step {step:3d}  reward {rewards[-1]:.3f}  turns {turns}  largest mismatch {mismatches[-1]:.1e}")
    await engine.close()
    return rewards, mismatches


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps of small groups")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--model", type=Path, help="checkpoint directory, with --base-url that of the server")
    parser.add_argument("--base-url", help="a vLLM server to sample from")
    options = parser.parse_args(arguments)
    if options.base_url and not options.model:
        parser.error("--base-url needs --model, the directory that the server has loaded")
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.model or tiny_qwen3_vl(temporary)
        trainer = Trainer(directory, 2e-3 if options.model is None else 1e-6)
        digits, _ = load_digit_sets()
        if options.model is None:
            trainer.warm_start(digits.take(range(120)), 12 if options.quick else 60)
        engine = VLLMEngine(options.base_url) if options.base_url else LocalEngine.from_pretrained(directory)
        sizes = {"groups": 8, "group_size": 4} if options.quick else {"groups": 64, "group_size": 4}
        steps = options.steps or (3 if options.quick else 100)
        return asyncio.run(train(trainer, engine, digits, directory, steps=steps, **sizes))


if __name__ == "__main__":
    main()
