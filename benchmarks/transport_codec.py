"""The cost of sending pixels and episodes, compared with msgpack, pickle and torch.save.

    python benchmarks/transport_codec.py [--episodes 1000] [--check]

Pixels: 20 float32 arrays of 1024 x 1536 (126 MB), and the same through msgpack with `tobytes` (what peers do), pickle
protocol 5 in and out of band, and torch.save. Episodes: as trajectories, and as nested Python lists through msgpack, in
two forms: the lists of the very same tree, and a list of steps each with its whole prompt, mask and completion, which
is how peers store them. The targets refer to the second. No lossless form is three times smaller than the first: of its
5.0 kB per turn, 500 ids of 17.2 bits and 250 float32 log-probabilities take 2.1 kB.

With `--check` the exit status is 1 if a target is missed. The file is not called transport.py, because that name would
hide the package `transport` from every script in this directory.
"""

import argparse
import gc
import io
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from renderers import MediaSource, PlaceholderRange
from rollouts import FinishReason, MediaReference, TokenNode, Trajectory, Turn, WeightSpan
from transport import decode, decode_frames, encode, encode_frames

VOCABULARY = 151_000
RNG = np.random.default_rng(0)
MESSAGE = {"role": "assistant", "content": "I press the button on the left and wait for the door to open."}


class Targets:
    """The rows of the table of targets, and whether each target was reached."""

    def __init__(self) -> None:
        self.table = Table(title="targets", title_justify="left")
        for column in ("", "measured", "target", ""):
            self.table.add_column(column)
        self.missed = 0

    def add(self, name: str, measured: float, limit: float, unit: str, *, at_least: bool = False) -> None:
        met = measured >= limit if at_least else measured <= limit
        self.missed += not met
        sign = ">=" if at_least else "<="
        self.table.add_row(name, f"{measured:,.3f} {unit}", f"{sign} {limit} {unit}", "met" if met else "MISSED")


def best(call: Callable[[], object], rounds: int = 7) -> float:
    """The shortest time of `rounds` calls in seconds; each result is freed before the next call."""
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        result = call()
        taken.append(time.perf_counter() - started)
        del result
    return min(taken)


def pixels(targets: Targets) -> Table:
    arrays = [RNG.random((1024, 1536), dtype=np.float32) for _ in range(20)]
    total = sum(array.nbytes for array in arrays)
    flat = [array.reshape(-1) for array in arrays]

    def to_msgpack() -> bytes:
        return bytes(msgpack.packb([[a.dtype.str, a.shape, a.tobytes()] for a in arrays]))

    def from_msgpack(packed: bytes) -> list[np.ndarray]:
        unpacked = msgpack.unpackb(packed, max_bin_len=2**31)
        return [np.frombuffer(data, dtype).reshape(shape) for dtype, shape, data in unpacked]

    def out_of_band() -> tuple[bytes, list[pickle.PickleBuffer]]:
        buffers: list[pickle.PickleBuffer] = []
        return pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append), buffers

    def torch_save() -> io.BytesIO:
        file = io.BytesIO()
        torch.save([torch.from_numpy(array) for array in arrays], file)
        return file

    def torch_load(file: io.BytesIO) -> Any:
        file.seek(0)
        return torch.load(file, weights_only=True)

    frames, buffer, packed, pickled, banded, saved = (
        encode_frames(arrays),
        encode(arrays),
        to_msgpack(),
        pickle.dumps(arrays, protocol=5),
        out_of_band(),
        torch_save(),
    )
    copy = best(lambda: np.concatenate(flat))
    rows: list[tuple[str, float, float]] = [
        ("one copy of the bytes", copy, 0.0),
        ("encode_frames, decode_frames", best(lambda: encode_frames(arrays)), best(lambda: decode_frames(frames))),
        ("encode, decode (one buffer)", best(lambda: encode(arrays)), best(lambda: decode(buffer))),
        ("msgpack with tobytes", best(to_msgpack), best(lambda: from_msgpack(packed))),
        ("pickle 5", best(lambda: pickle.dumps(arrays, protocol=5)), best(lambda: pickle.loads(pickled))),
        ("pickle 5 out of band", best(out_of_band), best(lambda: pickle.loads(banded[0], buffers=banded[1]))),
        ("torch.save", best(torch_save, 3), best(lambda: torch_load(saved), 3)),
    ]
    table = Table(title=f"pixels: 20 arrays of 1024 x 1536 float32, {total / 1e6:.0f} MB", title_justify="left")
    for column in ("", "encode ms", "decode ms"):
        table.add_column(column, justify="left" if not column else "right")
    for name, there, back in rows:
        table.add_row(name, f"{there * 1e3:,.3f}", f"{back * 1e3:,.3f}" if back else "")
    targets.add("encode_frames of pixels", rows[1][1] * 1e3, 1, "ms")
    targets.add("decode_frames of pixels", rows[1][2] * 1e3, 1, "ms")
    return table


def text_episode(turns: int, tokens: int, sources: list[MediaSource] | None = None) -> Trajectory:
    """Half of each turn's tokens are a prompt, the other half are sampled; one image per turn if `sources` is set."""
    trajectory = Trajectory(f"episode-{RNG.integers(10**9)}")
    nodes: list[TokenNode] = []
    rounds: list[Turn] = []
    for turn in range(turns):
        count = tokens // 2
        media = ()
        if sources is not None:
            where = PlaceholderRange(5, 256)
            media = (MediaReference("image", f"{sources[turn].digest}-f3a9", sources[turn], where),)
        ids = [RNG.integers(0, VOCABULARY, count).astype(np.int32) for _ in range(2)]
        nothing = np.empty(0, np.float32)
        nodes.append(TokenNode(len(nodes) - 1, ids[0], np.zeros(count, np.bool_), nothing, media=media))
        logprobs = -RNG.exponential(size=count).astype(np.float32)
        spans = (WeightSpan("step-100", 0, count),)
        nodes.append(TokenNode(len(nodes) - 1, ids[1], np.ones(count, np.bool_), logprobs, spans))
        rounds.append(Turn(len(nodes) - 1, FinishReason.STOP, MESSAGE, reward=0.5))
    trajectory.nodes, trajectory.turns = nodes, rounds
    return trajectory


def image(form: str, **options: Any) -> MediaSource:
    """A 512 x 512 image of soft colours with some noise, as a file of this form."""
    coarse = Image.fromarray(RNG.integers(0, 256, (16, 16, 3), dtype=np.uint8)).resize((512, 512))
    noisy = np.asarray(coarse, dtype=np.int16) + RNG.integers(-8, 9, (512, 512, 3), dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, form, **options)
    return MediaSource.of(file.getvalue())


def image_episode(targets: Targets) -> Table:
    turns, tokens = 20, 1000
    table = Table(title=f"an episode of {turns} turns, each with one new 512 x 512 image", title_justify="left")
    for column in ("", "MB", "media MB", "bytes per token without media", "float32 pixels of every step so far, MB"):
        table.add_column(column, justify="left" if not column else "right")
    for form in ("JPEG", "PNG"):
        sources = [image(form) for _ in range(turns)]
        size = len(encode(text_episode(turns, tokens, sources)))
        media = sum(source.nbytes for source in sources)
        cumulative = sum(range(1, turns + 1)) * 512 * 512 * 3 * 4
        beside = (size - media) / (turns * tokens)
        row = (size / 1e6, media / 1e6, beside, cumulative / 1e6)
        table.add_row(form, *(f"{value:,.2f}" for value in row))
        targets.add(
            f"episode of {form} images, share of the allowance", size / (1.02 * media + 14 * turns * tokens), 1, "x"
        )
    return table


def as_lists(trajectory: Trajectory) -> list[Any]:
    """The same tree with its arrays as lists."""
    nodes = [
        [
            n.parent,
            n.token_ids.tolist(),
            n.sampled.tolist(),
            n.logprobs.tolist(),
            [[s.version, s.start, s.end] for s in n.weight_spans],
        ]
        for n in trajectory.nodes
    ]
    turns = [[t.node, str(t.finish_reason), t.message, t.reward] for t in trajectory.turns]
    return [trajectory.episode_id, nodes, turns]


def as_steps(trajectory: Trajectory) -> list[dict[str, Any]]:
    """One step per turn, with its whole prompt: the form in which peers store and send an episode."""
    steps, prompt = [], []
    for turn in trajectory.turns:
        asked, said = trajectory.nodes[turn.node - 1], trajectory.nodes[turn.node]
        prompt = prompt + asked.token_ids.tolist()
        completion = said.token_ids.tolist()
        tokens = {
            "prompt_ids": prompt,
            "prompt_mask": [0] * len(prompt),
            "completion_ids": completion,
            "completion_mask": [1] * len(completion),
            "completion_logprobs": said.logprobs.tolist(),
        }
        steps.append({"tokens": tokens, "completion": turn.message, "reward": turn.reward})
        prompt = prompt + completion
    return steps


def batches(episodes: int) -> Iterator[list[Trajectory]]:
    while episodes > 0:
        yield [text_episode(20, 500) for _ in range(min(50, episodes))]
        episodes -= 50


def text_episodes(targets: Targets, episodes: int) -> Table:
    names = ("trajectories", "the same tree as lists, msgpack", "steps with their prompts as lists, msgpack")
    seconds, sizes = np.zeros((3, 2)), np.zeros(3)
    forms: list[tuple[Callable[[Trajectory], Any], Callable[[Any], bytes], Callable[[bytes], Any]]] = [
        (lambda trajectory: trajectory, encode, decode),
        (as_lists, msgpack.packb, msgpack.unpackb),
        (as_steps, msgpack.packb, msgpack.unpackb),
    ]
    for batch in batches(episodes):
        for number, (form, there, back) in enumerate(forms):
            # Only one form at a time, because the garbage collector scans all lists that exist.
            value = [form(trajectory) for trajectory in batch]
            gc.collect()
            started = time.process_time()
            data = there(value)
            encoded = time.process_time()
            result = back(data)
            seconds[number] += (encoded - started, time.process_time() - encoded)
            sizes[number] += len(data)
            del value, data, result
    table = Table(title=f"{episodes} text episodes of 20 turns x 500 tokens", title_justify="left")
    for column in ("", "encode s", "decode s", "MB", "times as slow", "times as large"):
        table.add_column(column, justify="left" if not column else "right")
    for name, (there, back), size in zip(names, seconds, sizes, strict=True):
        ratios = f"{(there + back) / seconds[0].sum():.1f}", f"{size / sizes[0]:.1f}"
        table.add_row(name, f"{there:.2f}", f"{back:.2f}", f"{size / 1e6:,.1f}", *ratios)
    targets.add(
        "text episodes against steps as lists, time", seconds[2].sum() / seconds[0].sum(), 5, "x", at_least=True
    )
    targets.add("text episodes against steps as lists, bytes", sizes[2] / sizes[0], 3, "x", at_least=True)
    return table


def small_turns() -> Table:
    """Episodes of short turns: the cost of an episode is that of its nodes and turns, not of its tokens."""
    table = Table(title="one episode of short turns", title_justify="left")
    for column in ("turns x tokens", "encode us", "decode us"):
        table.add_column(column, justify="right")
    for turns, tokens in ((2, 100), (20, 200), (100, 200)):
        trajectory = text_episode(turns, tokens)
        message = encode(trajectory)
        times = best(lambda it=trajectory: encode(it), 200), best(lambda it=message: decode(it), 200)
        table.add_row(f"{turns} x {tokens}", *(f"{seconds * 1e6:,.0f}" for seconds in times))
    return table


def main() -> int:
    arguments = argparse.ArgumentParser(description="Time the transport beside what else is used for it.")
    arguments.add_argument("--episodes", type=int, default=1000)
    arguments.add_argument("--check", action="store_true", help="status 1 if a target is missed")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    targets = Targets()
    console = Console(width=140)
    console.print(pixels(targets))
    console.print(image_episode(targets))
    console.print(small_turns())
    console.print(text_episodes(targets, options.episodes))
    console.print(targets.table)
    return int(options.check and targets.missed > 0)


if __name__ == "__main__":
    sys.exit(main())
