"""TRL's GRPOTrainer with episodes of our engine: a tiny model names digits, and may try again after a wrong answer.

    python examples/trl_grpo.py [--quick]

TRL asks the rollout function for completions and computes rewards, advantages and losses itself. The function runs
episodes of two turns from TRL's prompts (an image each), with the trainer's present weights, and returns ids,
log-probabilities and `env_mask`, which leaves the environment's tokens out of the loss. TRL computes the pixels of the
prompts by itself; later turns have text only.
"""

import argparse
import asyncio
import tempfile

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import GRPOConfig, GRPOTrainer

from renderers import build_training_sample, load_renderer
from rollouts import EpisodeSpec, LocalEngine, SamplingParams, StepResult, run_episodes
from rollouts.demo.digits import digits
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import TrainingBatch, sample_from_rendered, sft_loss, token_logprobs


class TwoTries:
    """An episode from one of TRL's prompts: 1 for the right digit at the first try, 0.5 at the second."""

    def __init__(self, prompts, labels):
        self.prompts = prompts
        self.labels = labels

    def reset(self, seed):
        self.tries = 0
        prompt = self.prompts[seed]
        (image,) = (part["image"] for part in prompt[0]["content"] if part["type"] == "image")
        self.label = self.labels[image.convert("L").tobytes()]
        return prompt

    def step(self, assistant):
        self.tries += 1
        right = assistant["content"] == self.label
        if right or self.tries == 2:
            return StepResult(reward=right / self.tries, done=True)
        return StepResult([{"role": "user", "content": "No. Again?"}])


def columns_of(trajectory, media_tokens):
    """One episode as TRL has it: the first prompt, then everything after it as the completion."""
    first, *rest = trajectory.nodes
    ids = np.concatenate([node.token_ids for node in rest])
    sampled = np.concatenate([node.sampled for node in rest])
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[sampled] = np.concatenate([node.logprobs for node in rest])
    # TRL finds images by token id. A sampled placeholder token becomes another one; from there on nothing is trained.
    literal = np.flatnonzero(np.isin(ids, media_tokens))
    ids[literal] = 0
    sampled[np.append(literal, len(ids))[0] :] = False
    return {
        "prompt_ids": first.token_ids.tolist(),
        "completion_ids": ids.tolist(),
        "logprobs": logprobs.tolist(),
        "env_mask": sampled.astype(int).tolist(),
        "episode_reward": trajectory.reward,
    }


def make_rollout(engine, renderer, labels):
    def rollout(prompts, trainer):
        step = trainer.state.global_step
        asyncio.run(engine.update_weights(trainer.model.state_dict(), str(step)))
        specs = [EpisodeSpec(row, 10_000 * step + row, f"{step}") for row in range(len(prompts))]
        options = {"sampling": SamplingParams(max_tokens=4), "max_turns": 2, "on_error": "raise"}
        run = run_episodes(lambda: TwoTries(prompts, labels), specs, engine=engine, renderer=renderer, **options)
        rows = [columns_of(trajectory, list(renderer.mm_token_type_id_map)) for trajectory in asyncio.run(run)]
        return {name: [row[name] for row in rows] for name in rows[0]}

    return rollout


def episode_reward(completions, episode_reward, **columns):
    """The rewards of the environment; TRL passes the columns that the rollout function returns."""
    return episode_reward


def warm_start(model, renderer, rows, steps):
    """Supervised steps, for a policy that is right often enough to learn from rewards."""
    samples = []
    for row in rows:
        content = [{"type": "image", "image": row["image"]}, {"type": "text", "text": row["prompt"][0]["content"]}]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": row["label"]}]
        samples.append(sample_from_rendered(build_training_sample(renderer, messages)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    order = np.random.default_rng(0)
    for _ in range(steps):
        picked = order.choice(len(samples), min(32, len(samples)), replace=False)
        batch = TrainingBatch.from_samples([samples[index] for index in picked], pad_id=0)
        sft_loss(token_logprobs(model, batch), batch.loss_mask).backward()
        optimizer.step()
        optimizer.zero_grad()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps of small groups")
    quick = parser.parse_args(arguments).quick
    images = [Image.fromarray(image) for image in digits(False)[0]]
    labels = {image.tobytes(): str(label) for image, label in zip(images, digits(False)[1], strict=True)}
    rows = [
        {"prompt": [{"role": "user", "content": "Which digit?"}], "image": image, "label": labels[image.tobytes()]}
        for image in images[: 120 if quick else 1000]
    ]
    with tempfile.TemporaryDirectory() as directory:
        tiny_qwen3_vl(directory)
        model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        engine, renderer = LocalEngine.from_pretrained(directory), load_renderer(directory)
        warm_start(model, renderer, rows[:120], 12 if quick else 60)
        settings = GRPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=False,
            learning_rate=1e-3,
            per_device_train_batch_size=16 if quick else 128,
            num_generations=4,
            max_steps=2 if quick else 60,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        )
        trainer = GRPOTrainer(
            model,
            reward_funcs=episode_reward,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoProcessor.from_pretrained(directory),
            rollout_func=make_rollout(engine, renderer, labels),
        )
        trainer.train()
        asyncio.run(engine.close())
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    main()
