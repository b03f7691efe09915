"""`rollouts doctor` and `ServerRenderer` on `rollouts serve`."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

from rollouts.cli.doctor.command import Options, run_checks
from rollouts.cli.doctor.target import Outcome
from rollouts.engines.vllm import ServerRenderer, VLLMEngine
from rollouts.observability.engine_load import server_load


async def test_the_doctor_finds_nothing_wrong_with_a_served_model(tiny_server, tiny_model_dir):
    findings = await run_checks(tiny_server.base_url, tiny_model_dir, Options())
    assert {finding.check: finding.seen for finding in findings if finding.outcome is not Outcome.OK} == {}
    assert len(findings) == 14


@pytest.mark.parametrize("text", ["  Count: 1 22\n\n", "naïve — 東京 🙂", "{'a': [1,\t2]}"])
async def test_the_server_renders_what_the_renderer_of_its_directory_renders(tiny_server, renderer, text):
    image = np.random.default_rng(0).integers(0, 256, (64, 48, 3), dtype=np.uint8)
    parts = [{"type": "text", "text": text}, {"type": "image", "image": image}, {"type": "text", "text": "?"}]
    messages = [{"role": "user", "content": parts}]
    own = renderer.render(messages, add_generation_prompt=True)
    async with ServerRenderer.connect(tiny_server.base_url) as served:
        for _ in range(2):  # the second time, the image is named only
            rendered = await served.render(messages, add_generation_prompt=True)
            assert rendered.token_ids == own.token_ids
            ((item, place),) = rendered.multi_modal_data.items_with_ranges()
            ((own_item, own_place),) = own.multi_modal_data.items_with_ranges()
            assert (place.offset, place.length) == (own_place.offset, own_place.length)
            np.testing.assert_array_equal(item["pixel_values"], own_item["pixel_values"])


async def test_the_load_of_the_server_has_the_names_that_vllm_uses(tiny_server):
    async with VLLMEngine(tiny_server.base_url) as engine:
        load = server_load(await engine.control.metrics())
        assert (await engine.control.metrics()).process_start_time > 1e9
        assert await engine.control.load() == 0
    assert load.pop("engine_media_cache_queries") >= load.pop("engine_media_cache_hits")
    expected = ("requests_running", "requests_waiting", "preemptions", "prefix_cache_queries", "prefix_cache_hits")
    assert load == {f"engine_{name}": 0 for name in (*expected, "kv_cache_usage_ratio")}


def test_text_becomes_tokens_and_text_again(tiny_server, tiny_model_dir):
    text = "  naïve — 東京 <|im_end|>"
    tokens = tiny_server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    vocabulary = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json")).get_vocab()
    assert [vocabulary[token] for token in tokens["token_strs"]] == tokens["tokens"]  # as vLLM names them
    assert tokens["max_model_len"] == 4096
    assert tiny_server.post("/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": text}
