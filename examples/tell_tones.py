"""A tiny model that hears learns to tell low, middle and high tones from the rewards of its own episodes.

    python examples/tell_tones.py [--quick] [--steps N]

Episodes of up to two turns: the model hears a tone and answers; after a wrong answer it hears another one of the same
kind. Random weights are first trained on some labelled tones.
"""

import argparse
import asyncio
import tempfile

import numpy as np

from renderers import build_training_sample, load_renderer
from rollouts import EpisodeSpec, LocalEngine, SamplingParams, StepResult, run_episodes
from rollouts.testing import tiny_qwen2_audio
from rollouts.training import group_advantages, sample_from_rendered, samples_from_trajectory
from rollouts.training.trainer import AdamParams, Trainer, datum_from_sample

RATE = 16_000
PITCHES = {"low": 220, "mid": 660, "high": 1980}


def tone(pitch, random):
    """Half a second of a tone, of another loudness, phase and noise each time."""
    seconds = np.arange(RATE // 2) / RATE
    wave = random.uniform(0.1, 0.5) * np.sin(2 * np.pi * (pitch * random.uniform(0.9, 1.1) * seconds + random.random()))
    return (wave + random.normal(0, 0.02, len(seconds))).astype(np.float32)


class TellTones:
    """Play a tone; an answer is `low`, `mid` or `high`, and the first one earns more than the second."""

    def reset(self, seed):
        self.random = np.random.default_rng(seed)
        self.name = list(PITCHES)[seed % len(PITCHES)]
        self.turn = 0
        return [self.question("Which tone?")]

    def step(self, assistant):
        self.turn += 1
        if assistant["content"] == self.name:
            return StepResult(reward=1.0 if self.turn == 1 else 0.5, done=True)
        return StepResult([self.question("No. Again:")], done=self.turn == 2)

    def question(self, text):
        sound = {"type": "audio", "audio": tone(PITCHES[self.name], self.random), "sampling_rate": RATE}
        return {"role": "user", "content": [{"type": "text", "text": text}, sound]}


class Learner:
    """The trained model, and an engine that samples from its very weights."""

    def __init__(self, directory):
        self.renderer = load_renderer(directory)
        self.trainer = Trainer.from_pretrained(directory, dtype="float32", device="cpu")
        self.trainer.create_model("policy", lora=None)
        self.engine = LocalEngine(self.trainer.model, lock=self.trainer.lock)

    def optimise(self, data, loss, learning_rate):
        result = self.trainer.forward_backward("policy", data, loss)
        self.trainer.optim_step("policy", AdamParams(learning_rate=learning_rate))
        return result

    def warm_start(self, count, steps):
        """Supervised steps on labelled tones: a policy that is never right has nothing to learn from."""
        data = []
        for seed in range(count):
            environment = TellTones()
            messages = [*environment.reset(seed), {"role": "assistant", "content": environment.name}]
            sample = sample_from_rendered(build_training_sample(self.renderer, messages))
            data.append(datum_from_sample(sample, "cross_entropy"))
        for _ in range(steps):
            self.optimise(data, "cross_entropy", 3e-3)

    async def episodes(self, first, groups, group_size):
        specs = [
            EpisodeSpec(seed, 1000 * seed + number, f"tone-{seed}")
            for seed in range(first, first + groups)
            for number in range(group_size)
        ]
        return await run_episodes(
            TellTones,
            specs,
            engine=self.engine,
            renderer=self.renderer,
            sampling=SamplingParams(max_tokens=6),
            max_turns=2,
            on_error="raise",
        )

    def learn(self, trajectories):
        """One step on the rewards; returns the largest difference to the sampler's log-probabilities."""
        advantages = group_advantages([one.reward for one in trajectories], [one.group_id for one in trajectories])
        samples = [
            sample
            for trajectory, advantage in zip(trajectories, advantages, strict=True)
            for sample in samples_from_trajectory(
                trajectory, advantage=float(advantage), processors=self.renderer.processors
            )
        ]
        result = self.optimise([datum_from_sample(sample, "ppo") for sample in samples], "ppo", 2e-3)
        differences = [
            np.abs(logprobs - sample.logprobs[1:])[sample.loss_mask[1:]].max()
            for logprobs, sample in zip(result.logprobs, samples, strict=True)
        ]
        return float(max(differences))


async def train(learner, *, steps, groups, group_size):
    rewards, mismatches = [], []
    for step in range(steps):
        trajectories = await learner.episodes(1000 + groups * step, groups, group_size)
        rewards.append(float(np.mean([trajectory.reward for trajectory in trajectories])))
        mismatches.append(learner.learn(trajectories))
        print(f"step {step:3d}  reward {rewards[-1]:.3f}  largest mismatch {mismatches[-1]:.1e}")
    await learner.engine.close()
    return rewards, mismatches


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps of small groups")
    parser.add_argument("--steps", type=int, help="optimizer steps on rewards")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        learner = Learner(tiny_qwen2_audio(directory))
        learner.warm_start(count=24, steps=16)
        sizes = {"groups": 6, "group_size": 4} if options.quick else {"groups": 16, "group_size": 8}
        return asyncio.run(train(learner, steps=options.steps or (3 if options.quick else 40), **sizes))


if __name__ == "__main__":
    main()
