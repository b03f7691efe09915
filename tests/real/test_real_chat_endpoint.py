"""`ChatEndpoint` against vLLM's own chat completions: what it sends is sampled as token ids and features are."""

import numpy as np
import pytest

from renderers import load_renderer
from rollouts import FinishReason, GenerateRequest, SamplingParams
from rollouts.engines import ChatEndpoint
from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import ContextLengthError, ServerError

IMAGE = np.random.default_rng(5).integers(0, 256, (64, 80, 3), dtype=np.uint8)


def conversation(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


@pytest.fixture
async def endpoint(vllm_server):
    async with VLLMEngine(vllm_server.base_url) as engine:
        model = (await engine.capabilities()).model
    async with ChatEndpoint(f"{vllm_server.base_url}/v1", model) as endpoint:
        yield endpoint


@pytest.mark.parametrize("parts", [(), ({"type": "image", "image": IMAGE},)], ids=["text", "image"])
async def test_a_greedy_completion_is_that_of_the_engine_on_the_same_server(endpoint, vllm_server, parts):
    renderer = load_renderer(vllm_server.model_dir)
    prompt = renderer.render(conversation(*parts), add_generation_prompt=True)
    letters = renderer.tokenizer.encode_run("abcdefgh").ids  # whose texts both servers' parsers leave as they are
    sampling = SamplingParams(max_tokens=12, temperature=0, extra={"allowed_token_ids": letters})
    async with VLLMEngine(vllm_server.base_url) as engine:
        request = GenerateRequest(
            prompt.token_ids,
            sampling,
            prompt.multi_modal_data,
            placeholder_token_ids=prompt.placeholder_token_ids,
        )
        (completion,) = (await engine.generate(request)).completions
    answer = await endpoint.chat(conversation(*parts), sampling=sampling)
    assert answer.message["content"] == renderer.parse_response(completion.token_ids.tolist()).content
    assert (answer.prompt_tokens, answer.completion_tokens) == (len(prompt.token_ids), len(completion.token_ids))


async def test_the_tokens_of_an_answer_are_those_of_the_engine_on_the_same_server(endpoint, vllm_server):
    """Two turns; the second prompt is what the server's template prints of the first."""
    renderer = load_renderer(vllm_server.model_dir)
    letters = renderer.tokenizer.encode_run("abcdefgh").ids
    sampling = SamplingParams(max_tokens=12, temperature=0, extra={"allowed_token_ids": letters})
    messages = conversation()
    async with (
        VLLMEngine(vllm_server.base_url) as engine,
        ChatEndpoint(endpoint.base_url, endpoint.model, return_token_ids=True) as returning,
    ):
        for _ in range(2):
            answer = await returning.chat(messages, sampling=sampling)
            prompt = renderer.render(messages, add_generation_prompt=True).token_ids
            (completion,) = (await engine.generate(GenerateRequest(prompt, sampling))).completions
            assert answer.tokens.prompt_ids.tolist() == prompt
            np.testing.assert_array_equal(answer.tokens.token_ids, completion.token_ids)
            np.testing.assert_allclose(answer.tokens.logprobs, completion.logprobs, atol=1e-4)
            messages = [*messages, answer.message, *conversation()]


async def test_a_prompt_longer_than_the_context_is_an_overlong_prompt(endpoint):
    with pytest.raises(ContextLengthError) as raised:
        await endpoint.chat([{"role": "user", "content": "word " * 20_000}], sampling=SamplingParams(max_tokens=4))
    assert raised.value.limit is not None


async def test_a_completion_ends_with_the_context(endpoint):
    sampling = SamplingParams(max_tokens=2**20, extra={"ignore_eos": True})
    answer = await endpoint.chat(conversation(), sampling=sampling)
    assert answer.finish_reason is FinishReason.LENGTH


async def test_a_model_that_is_not_served_is_named(endpoint, vllm_server):
    async with ChatEndpoint(f"{vllm_server.base_url}/v1", "another-model") as other:
        with pytest.raises(ServerError, match="another-model") as raised:
            await other.chat(conversation(), sampling=SamplingParams())
    assert raised.value.status == 404


async def test_calls_and_results_with_images_are_rendered_as_here(endpoint, vllm_server):
    renderer = load_renderer(vllm_server.model_dir)
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"row": 1}}}
    messages = [
        *conversation({"type": "image", "image": IMAGE}),
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "image", "image": IMAGE[:40]}]},
    ]
    answer = await endpoint.chat(messages, sampling=SamplingParams(max_tokens=1))
    expected = renderer.render(messages, add_generation_prompt=True)
    assert answer.prompt_tokens == len(expected.token_ids)


async def test_tools_need_a_server_that_was_started_for_them(endpoint):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    with pytest.raises(ServerError, match="--enable-auto-tool-choice") as raised:
        await endpoint.chat(conversation(), tools=tools, sampling=SamplingParams(max_tokens=1))
    assert raised.value.status == 400
