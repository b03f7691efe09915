"""Supervised training of a vision-language model: a tiny one learns to name handwritten digits.

    python examples/sft_vlm_classifier.py [--quick] [--out DIR]

Each sample is a conversation: an image, the question, and the digit as the answer. Only the answer is trained. Prints
the negative log-likelihood of training and held-out answers and the accuracy of greedy answers; report.html draws them.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from renderers import build_training_sample, load_renderer
from rollouts import EpisodeSpec, LocalEngine, SamplingParams, StepResult, run_episodes
from rollouts.demo.digits import digits
from rollouts.observability import TrainingLog
from rollouts.report import write_report
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import TrainingBatch, sample_from_rendered, sft_loss, token_logprobs


class OneQuestion:
    """Shows held-out digit `seed`; the reward is 1 for its name."""

    def reset(self, seed):
        images, labels = digits(True)
        self.label = str(labels[seed])
        return [question(images[seed])]

    def step(self, assistant):
        return StepResult(reward=float(assistant["content"] == self.label), done=True)


def question(image):
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Which digit?"}]}


def labelled_samples(renderer, images, labels):
    conversations = [
        [question(image), {"role": "assistant", "content": str(label)}]
        for image, label in zip(images, labels, strict=True)
    ]
    return [sample_from_rendered(build_training_sample(renderer, messages)) for messages in conversations]


def held_out_nll(model, samples, pad_id):
    batch = TrainingBatch.from_samples(samples, pad_id=pad_id)
    with torch.no_grad():
        return float(sft_loss(token_logprobs(model, batch), batch.loss_mask))


def accuracy(engine, renderer, count):
    """The share of greedy answers that are right, in episodes as a policy would have them."""
    specs = [EpisodeSpec(index, index, "held-out") for index in range(count)]
    sampling = SamplingParams(max_tokens=3, temperature=0.0)
    run = run_episodes(OneQuestion, specs, engine=engine, renderer=renderer, sampling=sampling, max_turns=1)
    return np.mean([trajectory.reward for trajectory in asyncio.run(run)])


def train(model, engine, renderer, log, *, steps, batch_size, held_out_size, every):
    training = labelled_samples(renderer, *digits(False))
    held_out = labelled_samples(renderer, *(column[:held_out_size] for column in digits(True)))
    pad_id = model.config.text_config.pad_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    order = np.random.default_rng(0)
    recent, curves = [], []
    for step in range(1, steps + 1):
        rows = order.choice(len(training), batch_size, replace=False)
        batch = TrainingBatch.from_samples([training[row] for row in rows], pad_id=pad_id)
        loss = sft_loss(token_logprobs(model, batch), batch.loss_mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        if step % every == 0:
            asyncio.run(engine.update_weights(model.state_dict(), str(step)))
            figures = {"training_nll": float(np.mean(recent)), "held_out_nll": held_out_nll(model, held_out, pad_id)}
            figures["accuracy"] = float(accuracy(engine, renderer, held_out_size))
            log.write(step, figures)
            curves.append(figures)
            print(f"step {step:4d}", *(f"{name} {value:.3f}" for name, value in figures.items()))
            recent.clear()
    return curves


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="30 steps on small batches")
    parser.add_argument("--out", type=Path, default=Path("sft-digits"), help="directory of the report")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory, TrainingLog(options.out) as log:
        tiny_qwen3_vl(directory)
        model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        engine = LocalEngine.from_pretrained(directory)
        renderer = load_renderer(directory)
        size = {"steps": 30, "batch_size": 24, "held_out_size": 40, "every": 15}
        full = {"steps": 300, "batch_size": 64, "held_out_size": 350, "every": 30}
        curves = train(model, engine, renderer, log, **(size if options.quick else full))
        asyncio.run(engine.close())
    print(f"curves: {write_report(options.out).path}")
    return curves


if __name__ == "__main__":
    main()
