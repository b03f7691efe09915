"""What an engine and a renderer report about themselves."""

import asyncio
import threading

import pytest

from rollouts.engines.fleet import EngineFleet
from rollouts.engines.http.metrics import Metrics
from rollouts.engines.protocol import Engine
from rollouts.engines.vllm.metrics import ServerMetrics
from rollouts.engines.vllm.server_media_cache import MediaCacheCounts
from rollouts.errors import ServerUnreachableError
from rollouts.observability import EngineMonitor, RendererStats, RunMetrics
from rollouts.observability.engine_load import PeriodicThread, server_load

# In the form of vLLM 0.32.
TWO_ENGINES = """\
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.9
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.7
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 80.0
vllm:mm_cache_queries_total{engine="0",model_name="m"} 10.0
vllm:mm_cache_hits_total{engine="0",model_name="m"} 9.0
"""


class ReportingEngine(Engine):
    """An engine whose `control.metrics` returns or raises what it is given."""

    def __init__(self, *readings):
        self.readings = list(readings)
        self.read = asyncio.Event()
        self.control = self

    async def generate(self, request, listen=None):
        raise NotImplementedError

    async def close(self):
        pass

    async def health(self):
        return True

    async def metrics(self):
        reading = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        self.read.set()
        if isinstance(reading, Exception):
            raise reading
        return ServerMetrics.parse(reading)


SGLANG = """\
sglang:num_running_reqs{model_name="m",tp_rank="0"} 3.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.25
sglang:num_retracted_requests_total{model_name="m",tp_rank="0"} 4.0
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 60.0
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 40.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 30.0
"""


def test_the_load_of_sglang_has_the_same_keys():
    assert server_load(Metrics.parse(SGLANG), Metrics.parse(SGLANG)) == {
        "engine_requests_running": 6.0,
        "engine_requests_waiting": 4.0,
        "engine_kv_cache_usage_ratio": 0.25,
        "engine_preemptions": 8.0,
        "engine_prefix_cache_queries": 200.0,
        "engine_prefix_cache_hits": 60.0,
    }


async def test_a_monitor_reads_the_server_while_its_block_runs_and_leaves_no_task():
    engine = ReportingEngine(TWO_ENGINES)
    before = asyncio.all_tasks()
    async with EngineMonitor(engine) as monitor:
        await engine.read.wait()
        await asyncio.sleep(0)
        assert RunMetrics(sources=[monitor]).metrics()["engine_requests_running"] == 7.0
    assert asyncio.all_tasks() == before


async def test_a_server_that_cannot_be_read_is_logged_once_and_has_no_old_values(caplog):
    error = ServerUnreachableError("metrics", "nobody listens")
    monitor = EngineMonitor(ReportingEngine(TWO_ENGINES, error, error, TWO_ENGINES, error))
    await monitor.read()
    assert monitor()["engine_requests_running"] == 7.0
    await monitor.read()
    await monitor.read()
    assert dict(monitor()) == {"engine_read_errors": 2}
    assert len(caplog.messages) == 1
    assert "nobody listens" in caplog.text
    await monitor.read()
    assert monitor()["engine_requests_waiting"] == 3.0
    await monitor.read()
    assert len(caplog.messages) == 2


async def test_the_load_of_a_fleet_is_that_of_all_its_servers():
    engines = {name: ReportingEngine(TWO_ENGINES) for name in ("one", "two")}
    for engine in engines.values():
        engine.media_cache_counts = MediaCacheCounts(included_items=1, included_bytes=10, omitted_items=2)
    fleet = EngineFleet(engines)
    monitor = EngineMonitor(fleet)
    await fleet.check()
    await monitor.read()
    values = monitor()
    assert (values["engine_requests_running"], values["engine_kv_cache_usage_ratio"]) == (14.0, pytest.approx(0.8))
    assert (values["media_items_sent"], values["media_sent_bytes"], values["media_items_omitted"]) == (2, 20, 4)
    await fleet.close()


def test_a_renderers_bridges_are_counted_and_its_refusals_by_reason(tiny_model_dir):
    from renderers import RendererPool, load_renderer

    renderer = load_renderer(tiny_model_dir)
    first = [{"role": "user", "content": "Hello"}]
    prompt = renderer.render_ids(first, add_generation_prompt=True)
    completion = [*renderer.tokenizer.encode_scaffold("Hi"), renderer.get_stop_token_ids()[0]]
    assert renderer.bridge_to_next_turn(prompt, completion, [{"role": "user", "content": "Bye"}]) is not None
    assert renderer.bridge_to_next_turn(prompt, completion, []) is None
    with RendererPool(renderer) as pool:
        assert RendererStats(pool)() == {"bridges": 1, "bridges_refused/no_new_messages": 1}
    assert RendererStats(object())() == {}


def test_a_periodic_function_that_raises_is_called_again_and_logged_once_until_it_succeeds(caplog):
    outcomes = iter([ValueError("broken pipe"), ValueError("still broken"), None, ValueError("broken again")])
    over = threading.Event()

    def call():
        outcome = next(outcomes, over)
        if outcome is over:
            over.set()
        elif outcome is not None:
            raise outcome

    thread = PeriodicThread(call, 0.001, "writer")
    thread.start()
    assert over.wait(20)
    thread.stop()
    assert caplog.messages == ["writer failed", "writer failed"]
    assert [str(record.exc_info[1]) for record in caplog.records] == ["broken pipe", "broken again"]
