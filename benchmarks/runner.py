"""The cost of a `Runner` per turn, beside a bare asyncio loop that makes the same calls.

    python benchmarks/runner.py [--episodes 4096] [--turns 8] [--only text] [--profile]

The engine is in the process and takes no time. The bare loop makes the same calls of renderer, engine and environment
on the event loop itself: no threads, no trajectory, no checks, no limits, no retries. Turns per second are wall-clock
time; CPU is that of the process, threads included. The messages of "text" and "cached images" repeat from episode to
episode, so that the renderer has printed them before; in "new text" no message repeats.

CPU by part is from a second run, in which the call that the event loop is in is looked at every two milliseconds. Two
further measurements: the memory of an episode that waits for the engine, without its tokens and media; and how long the
event loop is blocked while images of 1024x1024 are processed.
"""

import argparse
import asyncio
import cProfile
import gc
import io
import itertools
import pstats
import resource
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from renderers import RenderedTokens, TemplateRenderer, load_renderer
from rollouts import Completion, FinishReason, GenerateRequest, GenerateResult, SamplingParams, StepResult, WeightSpan
from rollouts.engines.protocol import Engine, TokenListener
from rollouts.runner import EpisodeLimits, Runner, Task
from rollouts.testing import tiny_qwen3_vl

SAMPLING = SamplingParams(max_tokens=64)
GROUP_SIZE = 8
QUESTION = "What do you see at this position of the maze, and where do you go? Step"


#: The part that the code of a file belongs to; all other files (transport, numpy) belong to the part that calls them.
PARTS = {
    "/renderers/": "renderer",
    "/rollouts/trajectory/": "trajectory",
    "/rollouts/episodes/": "episode",
    "/rollouts/engines/": "episode",
    "/rollouts/runner/": "runner",
    "/rollouts/workers/": "runner",
    "/asyncio/": "event loop",
    "/benchmarks/": "engine and environment",
}


class InstantEngine(Engine):
    """Returns one completion for every request. With `held`, requests wait until they are cancelled."""

    weight_version = "0"

    def __init__(self, renderer: TemplateRenderer, *, held: bool = False) -> None:
        ids = [*renderer.tokenizer.encode_run("I go left, because the wall is on the right.").ids]
        ids.append(renderer.get_stop_token_ids()[0])
        self.ids = np.array(ids, np.int32)
        self.logprobs = np.full(len(ids), -0.5, np.float32)
        self.waiting: list[GenerateRequest] = []
        self._held = held

    async def generate(self, request: GenerateRequest, listen: TokenListener | None = None) -> GenerateResult:
        if self._held:
            self.waiting.append(request)
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        spans = (WeightSpan("0", 0, len(self.ids)),)
        completion = Completion(0, self.ids, self.logprobs, FinishReason.STOP, int(self.ids[-1]), spans)
        return GenerateResult(request.request_id, [completion])

    async def close(self) -> None: ...


class Maze:
    """Asks `turns` times; with `images`, each message has one. `place` is in each message."""

    def __init__(self, turns: int, images: Sequence[bytes], place: str = "") -> None:
        self.turns, self.images, self.place, self.turn = turns, images, place, 0

    def reset(self, seed: int) -> list[Any]:
        return [self._message()]

    def step(self, assistant: Any) -> StepResult:
        self.turn += 1
        done = self.turn == self.turns
        return StepResult([] if done else [self._message()], reward=0.125, done=done)

    def _message(self) -> dict[str, Any]:
        text = f"{QUESTION} {self.place}{self.turn}."
        if not self.images:
            return {"role": "user", "content": text}
        image = {"type": "image", "image": self.images[self.turn % len(self.images)]}
        return {"role": "user", "content": [image, {"type": "text", "text": text}]}


def png(side: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (side // 8, side // 8, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()


class Measured(NamedTuple):
    turns_per_second: float
    cpu_ms: float


async def measured(run: Callable[[], Awaitable[None]], turns: int) -> Measured:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    await run()
    return Measured(turns / (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu) / turns)


@contextmanager
def sampled_parts() -> Iterator[Counter[str]]:
    """Counts by part, for each two milliseconds of CPU in the block, what the main thread was in."""
    counts: Counter[str] = Counter()

    def note(signal_number: int, frame: FrameType | None) -> None:
        while frame is not None:
            path = frame.f_code.co_filename
            if (part := next((part for folder, part in PARTS.items() if folder in path), None)) is not None:
                counts[part] += 1
                return
            frame = frame.f_back

    previous = signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, 0.002, 0.002)
    try:
        yield counts
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


async def run_bare(renderer: TemplateRenderer, engine: InstantEngine, make: Callable[[], Maze], episodes: int) -> None:
    async def play(index: int) -> None:
        environment = make()
        conversation = environment.reset(index)
        prompt: RenderedTokens | None = renderer.render(conversation, add_generation_prompt=True)
        while prompt is not None:
            result = await engine.generate(GenerateRequest(prompt.token_ids, SAMPLING, prompt.multi_modal_data))
            ids = result.completions[0].token_ids.tolist()
            assistant = renderer.parse_response(ids, prompt_ids=prompt.token_ids).to_message()
            step = environment.step(assistant)
            if step.done:
                return
            media = {} if prompt.multi_modal_data is None else {"previous_multi_modal_data": prompt.multi_modal_data}
            prompt = renderer.bridge_to_next_turn(
                prompt.token_ids, ids, step.messages, previous_messages=conversation, **media
            )
            conversation = [*conversation, assistant, *step.messages]

    async with asyncio.TaskGroup() as group:
        for index in range(episodes):
            group.create_task(play(index))


async def run_runner(
    renderer: TemplateRenderer, engine: InstantEngine, make: Callable[[], Maze], episodes: int
) -> None:
    tasks = (Task(str(index)) for index in range(episodes // GROUP_SIZE))
    limits = EpisodeLimits(max_turns=100, episode_seconds=3600)
    async with Runner(
        lambda task: make(),
        engine,
        renderer,
        sampling=SAMPLING,
        group_size=GROUP_SIZE,
        concurrency=episodes,
        limits=limits,
    ) as runner:
        async for group in runner.stream(tasks):
            assert not group.num_failed, group.episodes[0].error


def compare(
    renderer: TemplateRenderer, name: str, images: Sequence[bytes], episodes: int, turns: int, *, repeats: bool = True
) -> None:
    engine = InstantEngine(renderer)
    numbers = itertools.count()

    def make() -> Maze:
        return Maze(turns, images, "" if repeats else f"{next(numbers)}/")

    async def ours() -> None:
        await run_runner(renderer, engine, make, episodes)

    asyncio.run(run_bare(renderer, engine, make, 64))  # fills the caches
    count = episodes * turns
    bare = asyncio.run(measured(lambda: run_bare(renderer, engine, make, episodes), count))
    runner = asyncio.run(measured(ours, count))
    print(f"{name}: {episodes:,} concurrent episodes of {turns} turns")
    for side, result in (("bare asyncio loop", bare), ("Runner", runner)):
        print(f"  {side:18} {result.turns_per_second:8,.0f} turns/s {result.cpu_ms:8.3f} ms CPU per turn")
    print(f"  Runner / bare loop: {runner.turns_per_second / bare.turns_per_second:.2f} x turns/s")
    with sampled_parts() as counts:
        asyncio.run(ours())
    shares = [f"{part} {runner.cpu_ms * samples / counts.total():.3f}" for part, samples in counts.most_common()]
    print(f"  CPU of the Runner by part, ms per turn: {', '.join(shares)}")


def prompt_bytes(requests: Sequence[GenerateRequest]) -> int:
    """What the token ids of prompts take: their lists, and each id above 256, of which there is one object each."""
    return sum(8 * len(request.prompt_ids) + 32 * sum(i > 256 for i in request.prompt_ids) for request in requests)


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as status:
        return int(status.read().split()[1]) * resource.getpagesize()


async def waiting_memory(renderer: TemplateRenderer, episodes: int) -> float:
    """Kilobytes of an episode that waits for its first completion, beyond its tokens."""
    engine = InstantEngine(renderer, held=True)
    tasks = (Task(str(index)) for index in range(episodes // GROUP_SIZE))
    async with Runner(
        lambda task: Maze(8, []),
        engine,
        renderer,
        sampling=SAMPLING,
        group_size=GROUP_SIZE,
        concurrency=episodes,
        limits=EpisodeLimits(max_turns=8, episode_seconds=3600),
    ) as runner:
        gc.collect()
        before = resident_bytes()
        waiting = asyncio.create_task(anext(runner.stream(tasks)))
        while len(engine.waiting) < episodes:  # noqa: ASYNC110  the engine is as simple as can be
            await asyncio.sleep(0.05)
        gc.collect()
        used = resident_bytes() - before - prompt_bytes(engine.waiting)
        waiting.cancel()
        await asyncio.wait([waiting])
    return used / episodes / 1e3


def report_memory(renderer: TemplateRenderer, episodes: int) -> None:
    asyncio.run(waiting_memory(renderer, 64))  # what the first episodes of a process load
    kilobytes = asyncio.run(waiting_memory(renderer, episodes))
    print(f"memory of an episode that waits for the engine, beyond its tokens: {kilobytes:.1f} KB")


async def blocked_times(stop: asyncio.Event) -> list[float]:
    """Seconds by which a callback that is due every millisecond comes late, until `stop` is set."""
    late = []
    while not stop.is_set():
        due = time.perf_counter() + 1e-3
        await asyncio.sleep(1e-3)
        late.append(time.perf_counter() - due)
    return late


async def blocked_while(run: Callable[[], Awaitable[object]]) -> np.ndarray:
    stop = asyncio.Event()
    watching = asyncio.create_task(blocked_times(stop))
    await run()
    stop.set()
    return 1e3 * np.array(await watching)


async def report_blocking(renderer: TemplateRenderer) -> None:
    """How long the event loop is blocked while new images of 1024x1024 are processed, and without any episode."""
    images = [png(1024, seed) for seed in range(64)]
    numbers = iter(range(10**6))

    def make() -> Maze:
        return Maze(2, [images[next(numbers) % len(images)]])

    idle = await blocked_while(lambda: asyncio.sleep(1.0))
    busy = await blocked_while(lambda: run_runner(renderer, InstantEngine(renderer), make, 64))
    print("lateness of the event loop, ms: median, 99 %, longest")
    for name, late in (("without episodes", idle), ("64 new images of 1024x1024", busy)):
        print(f"  {name:28} {np.median(late):7.2f} {np.percentile(late, 99):7.2f} {late.max():7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--only", choices=("memory", "text", "new-text", "images", "blocking"))
    parser.add_argument("--profile", action="store_true", help="profile the event loop's thread of the text run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        renderer = load_renderer(tiny_qwen3_vl(directory, weights=False))
        # The renderer of larger images has the limits of a real checkpoint.
        (Path(directory) / "preprocessor_config.json").write_text(
            (Path(directory) / "preprocessor_config.json").read_text().replace("65536", str(1024 * 1024))
        )
        large = load_renderer(directory)
    # As docs/runner.md recommends: Python's collector looks at all objects of all episodes again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    if options.profile:
        profile = cProfile.Profile()
        profile.enable()
        make = lambda: Maze(options.turns, [])  # noqa: E731
        asyncio.run(run_runner(renderer, InstantEngine(renderer), make, options.episodes))
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    measurements: dict[str, Callable[[], None]] = {
        # First: later on, the process has memory that earlier episodes used.
        "memory": lambda: report_memory(renderer, options.episodes),
        "text": lambda: compare(renderer, "text", [], options.episodes, options.turns),
        "new-text": lambda: compare(renderer, "new text", [], options.episodes, options.turns, repeats=False),
        "images": lambda: compare(
            renderer, "cached images", [png(64, seed) for seed in range(4)], options.episodes, options.turns
        ),
        "blocking": lambda: asyncio.run(report_blocking(large)),
    }
    for name, measure in measurements.items():
        if options.only in (None, name):
            measure()


if __name__ == "__main__":
    main()
