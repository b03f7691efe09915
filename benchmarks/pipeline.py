"""The cost of the pipeline around the model, compared with the stock libraries.

    python benchmarks/pipeline.py

Left: this library. Right: transformers' chat template, tokenizer and image processor on the whole conversation; its own
forward pass on the batch; msgpack of whole steps with float32 pixels. The two sides of a row are measured alternately.
"""

import tempfile
import time
from collections.abc import Callable

import msgpack
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from renderers import load_renderer
from renderers.vision.patches import normalise
from rollouts import Completion, FinishReason, Trajectory
from rollouts.demo.digits import digits
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import TrainingBatch, model_inputs, samples_from_trajectory, token_logprobs
from transport import decode, encode

DIGITS, GROUP = 32, 8


def alternating(ours: Callable[[int], object], theirs: Callable[[int], object], rounds: int) -> tuple[float, float]:
    """Median seconds of each side; calls alternate so that noise of the machine affects both."""
    taken: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds):
        for times, call in zip(taken, (ours, theirs), strict=True):
            started = time.perf_counter()
            call(index)
            times.append(time.perf_counter() - started)
    return float(np.median(taken[0])), float(np.median(taken[1]))


def ask(image: np.ndarray, text: str) -> dict[str, object]:
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title="pipeline, tiny model, one thread", title_justify="left")
    for column in ("", "mmrollouts", "stock", "ratio"):
        table.add_column(column, justify="left" if not column else "right")

    def add(name: str, ours: float, theirs: float, unit: str) -> None:
        scale = {"ms": 1e3, "kB": 1e-3}[unit]
        table.add_row(name, f"{ours * scale:,.3f} {unit}", f"{theirs * scale:,.3f} {unit}", f"{theirs / ours:.1f}x")

    with tempfile.TemporaryDirectory() as directory:
        tiny_qwen3_vl(directory)
        renderer = load_renderer(directory)
        tokenizer, pixels = AutoTokenizer.from_pretrained(directory), AutoImageProcessor.from_pretrained(directory)
        model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    plain, sharp = digits(False)[0], digits(False, sharp=True)[0]
    stop = renderer.get_stop_token_ids()[0]
    said = [*renderer.tokenizer.encode_run("7").ids, stop]

    def stock_prompt(messages: list[dict[str, object]]) -> None:
        tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
        images = [part["image"] for m in messages if isinstance(m["content"], list) for part in m["content"][:1]]
        pixels(images=[np.repeat(image[:, :, None], 3, axis=2) for image in images])

    # A different digit in every round: images and texts are new to every cache, except where a row says so.
    opening = [ask(plain[i], f"Which digit? {i}") for i in range(200)]
    for name in ("first prompt, everything new", "first prompt, seen before (the other members of a group)"):
        times = alternating(
            lambda i: renderer.render([opening[i]], add_generation_prompt=True),
            lambda i: stock_prompt([opening[i]]),
            rounds=200,
        )
        add(name, *times, "ms")
    first = [renderer.render([message], add_generation_prompt=True) for message in opening]
    second = [ask(sharp[i], f"No. Again? {i}") for i in range(200)]
    answer = {"role": "assistant", "content": "7"}
    add(
        "second prompt: bridge / whole conversation again",
        *alternating(
            lambda i: renderer.bridge_to_next_turn(
                first[i].token_ids, said, [second[i]], previous_multi_modal_data=first[i].multi_modal_data
            ),
            lambda i: stock_prompt([opening[i], answer, second[i]]),
            200,
        ),
        "ms",
    )

    trajectories = []
    for index in range(DIGITS * GROUP):
        digit = index // GROUP
        trajectory = Trajectory(str(index))
        prompt = renderer.render([ask(plain[digit], "Which digit?")], add_generation_prompt=True)
        for turn in range(2):
            ids = [*renderer.tokenizer.encode_run(str(index % 3)).ids, stop]
            completion = Completion(0, np.array(ids, np.int32), np.full(2, -0.5, np.float32), FinishReason.STOP)
            trajectory.add_turn(prompt, completion, answer)
            if turn == 0:
                bridged = renderer.bridge_to_next_turn(
                    prompt.token_ids,
                    ids,
                    [ask(sharp[digit], "No. Again?")],
                    previous_multi_modal_data=prompt.multi_modal_data,
                )
                assert bridged is not None
                prompt = bridged
        trajectories.append(trajectory)

    processors = renderer.processors
    samples = [s for t in trajectories for s in samples_from_trajectory(t, advantage=1.0, processors=processors)]
    batch = TrainingBatch.from_samples(samples, pad_id=0)

    def stock_step(_: int) -> None:
        inputs = model_inputs(batch, model)
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, batch.input_ids[:, 1:, None])
        logprobs[batch.loss_mask[:, 1:]].sum().backward()

    add(
        f"log-probabilities and gradient, {DIGITS} groups of {GROUP}",
        *alternating(lambda _: token_logprobs(model, batch).sum().backward(), stock_step, 5),
        "ms",
    )

    def naive_message() -> bytes:
        """Every step with its whole prompt, its log-probabilities and the float32 pixels of all images so far."""
        steps = []
        for t in trajectories:
            for turn in t.turns:
                items = [processors["image"].process(reference.source) for reference in t.media(turn.node)]
                pixels_so_far = [normalise(item["pixel_values"], item.scale).tobytes() for item in items]
                steps.append([t.token_ids(turn.node).tolist(), t.nodes[turn.node].logprobs.tolist(), pixels_so_far])
        packed: bytes = msgpack.packb(steps)
        return packed

    add(
        f"{len(trajectories)} episodes to bytes and back / as steps with pixels through msgpack",
        *alternating(lambda _: decode(encode(trajectories)), lambda _: msgpack.unpackb(naive_message()), 9),
        "ms",
    )
    add("bytes of them", len(encode(trajectories)), len(naive_message()), "kB")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
