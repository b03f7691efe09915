"""What a run with images reports about a real server."""

import numpy as np

from renderers import load_renderer
from rollouts import SamplingParams, StepResult
from rollouts.engines.vllm import VLLMEngine
from rollouts.observability import EngineMonitor, ProgressDisplay, RendererStats, RunMetrics
from rollouts.runner import EpisodeLimits, Runner, Task

TURNS = 3


class Gallery:
    """Shows one image, the same to all episodes of a task, then asks again."""

    def __init__(self, task: Task) -> None:
        self.task, self.turn = task, 0

    def reset(self, seed: int):
        pixels = np.random.default_rng(self.task.data).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        text = "What do you see? " * 40  # several blocks of the prefix cache, which on a CPU have 128 tokens
        content = [{"type": "image", "image": pixels}, {"type": "text", "text": text}]
        return [{"role": "user", "content": content}]

    def step(self, message):
        self.turn += 1
        return StepResult([{"role": "user", "content": "And now?"}], reward=1.0, done=self.turn == TURNS)


async def test_load_and_cache_hits_of_the_server_are_metrics_of_the_run(vllm_server):
    renderer = load_renderer(vllm_server.model_dir)
    async with VLLMEngine(vllm_server.base_url) as engine:
        monitor = EngineMonitor(engine)
        await monitor.read()
        before = monitor()
        metrics = RunMetrics(sources=[monitor, RendererStats(renderer)])
        runner = Runner(
            Gallery,
            engine,
            renderer,
            sampling=SamplingParams(max_tokens=8),
            group_size=4,
            limits=EpisodeLimits(max_turns=TURNS),
            listeners=[metrics],
        )
        async with runner:
            groups = [group async for group in runner.stream([Task(str(seed), 7000 + seed) for seed in range(4)])]
        await monitor.read()
        values = metrics.metrics()

        def grown(key):
            return values[key] - before[key]

        assert not any(episode.error for group in groups for episode in group.episodes)
        assert (values["engine_read_errors"], values["engine_requests_running"]) == (0, 0)
        assert 0 <= values["engine_kv_cache_usage_ratio"] <= 1
        assert "engine_preemptions" in values
        # Each image is sent for the first of the 12 requests that show it.
        assert (values["media_items_sent"], values["media_items_omitted"]) == (4, 4 * 11)
        assert 0 < grown("engine_prefix_cache_hits") < grown("engine_prefix_cache_queries")
        assert grown("engine_media_cache_queries") == 0  # vLLM counts the items that it processes itself
        assert values["prompt_images"] == values["turns"] == 4 * 4 * TURNS
        *_, engine_row, prompts_row = ProgressDisplay(metrics).line().split("; ")
        assert engine_row.startswith("engine 0 running, 0 queued, KV cache ")
        assert prompts_row == "prompts media sent by name 92%, bridged 100%"
