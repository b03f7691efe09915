"""On-policy distillation: a tiny teacher that reads digits teaches a smaller student, from the student's own episodes.

    python examples/distill_digits.py [--quick] [--out DIR]

The teacher learns from labels first. The student begins with random weights and never sees a label or a reward: it
answers, the teacher scores what it answered, and the loss is the divergence from the teacher's likeliest tokens at each
of the student's own tokens. The student nears the teacher in steps 75 to 125; a quick run leaves chance.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from renderers import build_training_sample, load_renderer
from rollouts import EpisodeSpec, LocalEngine, SamplingParams, Task, run_episodes
from rollouts.demo.digits import ReadDigit, digits
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import (
    TrainingBatch,
    candidate_logprobs,
    forward_kl_loss,
    sample_from_rendered,
    samples_from_trajectory,
    score,
    sft_loss,
    token_logprobs,
    with_teacher,
)

TOP_K = 12  # ten digits, and the end of the answer


def smaller(directory):
    """A model of one layer and half the width, with the tokenizer, the template and the processor of the teacher."""
    tiny_qwen3_vl(directory)
    config = AutoConfig.from_pretrained(directory)
    config.text_config.num_hidden_layers, config.text_config.hidden_size = 1, 32
    config.vision_config.out_hidden_size = 32
    torch.manual_seed(1)
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    return directory


class DigitOfSeed(ReadDigit):
    """Shows digit `seed` of the training set, or of those that are held out."""

    def __init__(self, held_out):
        self.held_out = held_out

    def reset(self, seed):
        super().__init__(Task("digit", (seed, self.held_out)))
        return super().reset(seed)


class Steps:
    """Optimizer steps of a model."""

    def __init__(self, model, steps):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=4e-3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=4e-3, total_steps=steps)

    def take(self, loss):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.item()


def train_teacher(model, renderer, steps, rows):
    """Supervised: the name of the digit is the answer."""
    order, updates, labels = np.random.default_rng(0), Steps(model, steps), digits(False)[1]
    for _ in range(steps):
        samples = []
        for row in order.choice(len(labels), rows, replace=False):
            messages = DigitOfSeed(False).reset(int(row))
            answered = [*messages, {"role": "assistant", "content": str(labels[row])}]
            samples.append(sample_from_rendered(build_training_sample(renderer, answered)))
        batch = TrainingBatch.from_samples(samples, pad_id=0)
        updates.take(sft_loss(token_logprobs(model, batch), batch.loss_mask))


async def episodes(engine, renderer, held_out, rows, temperature):
    specs = [EpisodeSpec(int(row), number, "digits") for number, row in enumerate(rows)]
    options = {"sampling": SamplingParams(max_tokens=3, temperature=temperature), "max_turns": 1}
    return await run_episodes(lambda: DigitOfSeed(held_out), specs, engine=engine, renderer=renderer, **options)


async def accuracy(engine, renderer, count):
    """The share of greedy answers to `count` held-out digits that are right."""
    return float(np.mean([each.reward for each in await episodes(engine, renderer, True, range(count), 0.0)]))


async def distill(model, student, teacher, renderer, held_out, *, steps, rows, every):
    order, updates = np.random.default_rng(1), Steps(model, steps)
    curves = {"step": [0], "divergence": [None], "accuracy": [await accuracy(student, renderer, held_out)]}
    for step in range(1, steps + 1):
        samples = []
        chosen = order.choice(len(digits(False)[1]), rows, replace=False)
        for each in await episodes(student, renderer, False, chosen, 1.0):
            samples += samples_from_trajectory(each, advantage=0.0, processors=renderer.processors)
        scores = await score(samples, teacher, top_k=TOP_K)
        batch = TrainingBatch.from_samples(with_teacher(samples, scores), pad_id=0)
        logprobs = candidate_logprobs(model, batch, batch.column("teacher_top_ids"))
        loss = updates.take(forward_kl_loss(logprobs, batch.column("teacher_top_logprobs"), batch.loss_mask))
        await student.update_weights(model.state_dict(), str(step))
        if step % every == 0:
            figures = (step, loss, await accuracy(student, renderer, held_out))
            for values, figure in zip(curves.values(), figures, strict=True):
                values.append(figure)
            print("step {:4d}  KL(teacher || student) {:.3f} nats a token  held-out accuracy {:.3f}".format(*figures))
    return curves


async def run(directory, *, teacher_steps, held_out_size, rows, **sizes):
    directories = tiny_qwen3_vl(directory / "teacher"), smaller(directory / "student")
    models = [AutoModelForImageTextToText.from_pretrained(each, dtype=torch.float32) for each in directories]
    renderer = load_renderer(directories[1])
    train_teacher(models[0], renderer, teacher_steps, rows)
    teacher, student = LocalEngine(models[0]), LocalEngine.from_pretrained(directories[1])
    reached, parameters = await accuracy(teacher, renderer, held_out_size), [each.num_parameters() for each in models]
    print("parameters: teacher {:,}, student {:,}; accuracy of the teacher {:.3f}".format(*parameters, reached))
    curves = await distill(models[1], student, teacher, renderer, held_out_size, rows=rows, **sizes)
    await asyncio.gather(teacher.close(), student.close())
    return {**curves, "teacher": reached}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps on small batches")
    parser.add_argument("--out", type=Path, default=Path("distilled-digits"), help="directory of curves.json")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = {"steps": 50, "every": 10} if options.quick else {"steps": 150, "every": 25}
    with tempfile.TemporaryDirectory() as directory:
        curves = asyncio.run(run(Path(directory), teacher_steps=60, rows=32, held_out_size=100, **sizes))
    (options.out / "curves.json").write_text(json.dumps(curves, indent=2))
    return curves


if __name__ == "__main__":
    main()
