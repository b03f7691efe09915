"""`rollouts train` beside TRL's `GRPOTrainer`: the same tiny vision model, tasks, steps, groups and learning rate.

    OMP_NUM_THREADS=1 python benchmarks/train_trl.py [--steps 60] [--groups 16]

A task is an image of one colour, whose hue the model names in one turn; supervised steps have taught it the words and
not the hues. Both sides train all parameters in float32 on one thread, with one optimizer step for 8 episodes of each
task. Prints the rewards of the steps, the seconds of the whole run, and the largest difference between the
log-probabilities of sampler and trainer. TRL has none of its own sampler: those are of the logits of `generate`, in a
second run, which is not timed.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import GRPOConfig, GRPOTrainer
from typer.testing import CliRunner

from renderers import build_training_sample, load_renderer
from rollouts import Task
from rollouts.cli.main import app
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import sample_from_rendered
from rollouts.training.trainer import AdamParams, Trainer, datum_from_sample

HUES = ["red", "green", "blue"]
RATE, GROUP, MAX_TOKENS = 1e-3, 8, 6

CONFIG = """\
group_size = {group}
concurrency = 4096
tasks = {{ kind = "import", source = "train_trl:tasks" }}
engine = {{ kind = "local", directory = "model" }}
renderer = {{ model = "model" }}
sampling = {{ max_tokens = {max_tokens} }}
limits = {{ max_turns = 1 }}
output = {{ directory = "out", report = false }}
environment = {{ kind = "scored_prompt", messages = "train_trl:messages", rewards = [
    {{ name = "right", function = "train_trl:is_right" }} ] }}

[train]
steps = {steps}
groups = {groups}
lora_rank = 0
learning_rate = {rate}
checkpoint_every = 1000
threads = 1
"""


def image(seed):
    rgb = np.random.default_rng(seed).integers(40, 180, 3)
    rgb[seed % 3] = rgb.max() + 30
    return Image.fromarray(np.full((32, 32, 3), rgb, np.uint8))


def tasks():
    return [Task(f"hue {seed}", seed=seed) for seed in range(1000)]


def messages(task):
    return [{"role": "user", "content": [{"type": "image", "image": image(task.seed)}, {"type": "text", "text": "?"}]}]


def is_right(completion, task):
    return float(completion["content"] == HUES[task.seed % 3])


def write_model(directory):
    """The model of both sides."""
    tiny_qwen3_vl(directory)
    renderer, trainer = load_renderer(directory), Trainer.from_pretrained(directory, dtype="float32")
    trainer.create_model("policy", lora=None)
    data = []
    for seed in range(2000, 2090):
        answer = {"role": "assistant", "content": HUES[seed // 3 % 3]}
        sample = sample_from_rendered(build_training_sample(renderer, [*messages(Task("shown", seed=seed)), answer]))
        datum = datum_from_sample(sample, "cross_entropy")
        data.append(datum)
    for _ in range(60):
        trainer.forward_backward("policy", data[:30], "cross_entropy")
        trainer.optim_step("policy", AdamParams(learning_rate=2 * RATE, grad_clip_norm=1.0))
        data = [*data[30:], *data[:30]]
    trainer.save_for_sampler("policy", directory / "warm")
    for path in (directory / "warm").iterdir():
        path.replace(directory / path.name)


def ours(directory, steps, groups):
    """Rewards of the steps, and the largest mismatch."""
    text = CONFIG.format(group=GROUP, max_tokens=MAX_TOKENS, steps=steps, groups=groups, rate=RATE)
    Path(directory, "train.toml").write_text(text)
    result = CliRunner().invoke(app, ["train", f"{directory}/train.toml"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line)["metrics"] for line in Path(directory, "out/training.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    return [row["reward"] for row in rows], max(row["mismatch_max"] for row in rows)


def right(completions, answer, **columns):
    return [float(completion[0]["content"] == text) for completion, text in zip(completions, answer, strict=True)]


class ComparedTrainer(GRPOTrainer):
    """With the differences between the log-probabilities of its sampler and its own."""

    def compare(self):
        self.differences, generate = [], self.model.generate

        def generated(**options):
            found = generate(**options, return_dict_in_generate=True, output_logits=True)
            ids = found.sequences[:, -len(found.logits) :]
            self.sampled = torch.stack(found.logits, 1).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
            return found.sequences

        self.model.generate = generated

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if hasattr(self, "differences"):
            count = batch["completion_ids"].shape[1]
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            names = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
            media = {name: batch[name] for name in names if name in batch}
            with torch.no_grad():
                own = self._get_per_token_logps_and_entropies(self.model, ids, attention, count, **media)[0]
            mask = batch["completion_mask"].bool()
            self.differences.append((own - self.sampled[:, :count])[mask].abs().max().item())
        return batch


def theirs(directory, steps, groups, *, compare=False):
    """Rewards of the steps, and the largest mismatch where it is asked for."""
    rows = [
        {"prompt": [{"role": "user", "content": "?"}], "image": image(task.seed), "answer": HUES[task.seed % 3]}
        for task in tasks()
    ]
    adam = AdamParams()
    settings = GRPOConfig(
        output_dir=f"{directory}/trl",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta1=adam.beta1,
        adam_beta2=adam.beta2,
        adam_epsilon=adam.eps,
        max_grad_norm=1.0,
        per_device_train_batch_size=GROUP * groups,
        num_generations=GROUP,
        max_completion_length=MAX_TOKENS,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = ComparedTrainer(
        AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32),
        reward_funcs=right,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoProcessor.from_pretrained(directory),
    )
    if compare:
        trainer.compare()
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return rewards, max(trainer.differences) if compare else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=16, help="of 8 episodes each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    sys.path.append(str(Path(__file__).parent))
    seconds = {}
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as nowhere:
        directory = Path(name, "model")
        write_model(directory)
        for side, train, place in (("ours", ours, name), ("TRL", theirs, str(directory))):
            shown, sys.stdout = sys.stdout, nowhere
            started, on_processor = time.perf_counter(), time.process_time()
            rewards, mismatch = train(place, options.steps, options.groups)
            seconds[side] = time.process_time() - on_processor
            wall = time.perf_counter() - started
            if mismatch is None:
                _, mismatch = theirs(str(directory), options.steps, options.groups, compare=True)
            sys.stdout = shown
            last = rewards[-max(len(rewards) // 10, 1) :]
            print(f"{side:4} reward {rewards[0]:.3f} to {rewards[-1]:.3f}, last tenth {np.mean(last):.3f}", end=", ")
            print(f"all {np.mean(rewards):.3f}; {seconds[side]:.1f} s on a processor ({wall:.1f} s), ", end="")
            print(f"mismatch {mismatch:.1e}")
            print("     " + " ".join(f"{reward:.2f}" for reward in rewards))
    print(f"time, ours to TRL's: {seconds['ours'] / seconds['TRL']:.2f}")


if __name__ == "__main__":
    main()
