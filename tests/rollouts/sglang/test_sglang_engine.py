"""`SGLangEngine` against a scripted server: what it sends, what it refuses, what it notices."""

import asyncio
import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_inputs import write_adapter
from fake_sglang import IMAGE_TOKEN, VOCABULARY, FakeSGLang
from sglang_requests import image, request_of, with_value, without

from rollouts import FinishReason, GenerateRequest, SamplingParams, WeightSpan
from rollouts.engines.fleet import EngineFleet
from rollouts.engines.protocol import TokenDelta
from rollouts.engines.sglang import SGLangEngine
from rollouts.engines.sglang import engine as engine_module
from rollouts.errors import (
    ArgumentError,
    CapabilityError,
    ContextLengthError,
    FleetMismatchError,
    InvalidRequestError,
    MalformedResultError,
    MissingLogProbsError,
    ServerError,
    UnknownAdapterError,
    WeightUpdateError,
)


async def test_ids_are_sent_as_they_are_and_those_of_a_prompt_have_their_log_probabilities(
    engine: SGLangEngine, server: FakeSGLang
) -> None:
    """The server names the last token of the vocabulary 0 in the log-probabilities of a prompt."""
    ids = [5, server.vocabulary - 1, 8]
    result = await engine.generate(request_of(prompt_ids=ids, prompt_logprobs=True))
    (sent,) = server.requests
    assert (sent["input_ids"], "image_data" in sent, "text" in sent) == (ids, False, False)
    np.testing.assert_array_equal(result.prompt_logprobs, np.array([np.nan, -0.5, -0.5], np.float32))


async def test_an_image_goes_as_its_file_with_one_token_in_the_prompt(engine: SGLangEngine, server: FakeSGLang) -> None:
    images = [image(1), image(2)]
    await engine.generate(request_of(*images))
    (sent,) = server.requests
    assert sent["input_ids"] == [5, 6, IMAGE_TOKEN, 7, IMAGE_TOKEN, 7]
    files = [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in sent["image_data"]]
    assert files == [bytes(item.source.data) for item in images]


async def test_every_sampling_parameter_is_sent_so_that_the_files_of_the_model_fill_in_none(
    engine: SGLangEngine, server: FakeSGLang
) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0, stop_token_ids=(9,), extra={"min_p": 0.1})
    await engine.generate(request_of(sampling=sampling))
    assert server.requests[0]["sampling_params"] == {
        "max_new_tokens": 4,
        "temperature": 0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [9],
    }


async def test_n_samples_are_n_requests_with_ids_to_abort_them_by(engine: SGLangEngine, server: FakeSGLang) -> None:
    server.info["enable_deterministic_inference"] = True
    result = await engine.generate(request_of(sampling=SamplingParams(max_tokens=2, n=3, seed=4), request_id="group"))
    assert [completion.index for completion in result.completions] == [0, 1, 2]
    sent = sorted((body["rid"], body["sampling_params"]["sampling_seed"]) for body in server.requests)
    assert sent == [("group.0", 4), ("group.1", 5), ("group.2", 6)]


async def test_the_likeliest_tokens_are_rows_of_the_k_that_each_part_was_asked_for(
    engine: SGLangEngine, server: FakeSGLang
) -> None:
    request = request_of(sampling=SamplingParams(max_tokens=2, top_logprobs=3), prompt_top_logprobs=2)
    result = await engine.generate(request)
    assert server.requests[0]["top_logprobs_num"] == 3
    top, of_prompt = result.completions[0].top_logprobs, result.prompt_top_logprobs
    assert top is not None
    assert of_prompt is not None
    assert top.token_ids.tolist() == [[1, 2, 3], [1, 2, 3]]
    assert top.logprobs.tolist() == [[-1, -2, -3], [-1, -2, -3]]
    assert of_prompt.token_ids.tolist() == [[-1, -1], [4, 5]]
    assert of_prompt.logprobs[1].tolist() == [-2, -3]
    server.spoil = without("meta_info", "output_top_logprobs")
    with pytest.raises(MissingLogProbsError, match="3 tokens in each of 2 places"):
        await engine.generate(request)


async def test_a_completion_ends_where_the_context_does(engine: SGLangEngine, server: FakeSGLang) -> None:
    result = await engine.generate(request_of(prompt_ids=[5] * 4090, sampling=SamplingParams(max_tokens=100)))
    assert len(result.completions[0].token_ids) == 6


def _retokenised(answer: dict[str, Any]) -> None:
    answer["prompt_token_ids"][3:5] = [7]


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (_retokenised, MalformedResultError, "tokenised the prompt again"),
        (without("prompt_token_ids"), MalformedResultError, "lacks `prompt_token_ids`"),
        (without("meta_info", "output_token_logprobs"), MissingLogProbsError, "3 tokens and no log-probabilities"),
        (with_value([[-1.0, 1, None]], "meta_info", "output_token_logprobs"), MissingLogProbsError, "3 tokens and 1 "),
        (with_value(None, "meta_info", "output_token_logprobs", 1, 0), MissingLogProbsError, "token 1"),
        (
            with_value(8, "meta_info", "output_token_logprobs", 1, 1),
            MalformedResultError,
            "is of token 8, not of token 2",
        ),
        (with_value([1, 2, -3], "output_ids"), MalformedResultError, "`output_ids` cannot be read"),
        (with_value([1, 2.5, 3], "output_ids"), MalformedResultError, r"`output_ids` cannot be read.*float64"),
        (with_value(["1", "2", "3"], "output_ids"), MalformedResultError, "`output_ids` cannot be read"),
        (with_value({"logprob": -1}, "meta_info", "output_token_logprobs", 1), MissingLogProbsError, "cannot be read"),
        (with_value({"type": "cow"}, "meta_info", "finish_reason"), MalformedResultError, "finished with"),
        (with_value({"type": "stop", "matched": 2}, "meta_info", "finish_reason"), MalformedResultError, "stopped at"),
        (with_value([], "meta_info", "weight_versions"), MalformedResultError, "do not cover the 3 tokens"),
        (with_value(2, "meta_info", "completion_tokens"), MalformedResultError, "counts 2 completion_tokens.* are 3"),
        (without("meta_info"), MalformedResultError, "SGLang's shape"),
    ],
)
async def test_an_answer_that_is_not_that_of_the_request_is_an_error(
    engine: SGLangEngine, server: FakeSGLang, spoil: Any, error: type[Exception], text: str
) -> None:
    server.spoil = spoil
    with pytest.raises(error, match=text):
        await engine.generate(request_of(image(1)))


async def test_a_sampled_id_outside_of_the_vocabulary_is_an_error(engine: SGLangEngine, server: FakeSGLang) -> None:
    def sample_it(answer: dict[str, Any]) -> None:
        answer["output_ids"][1] = answer["meta_info"]["output_token_logprobs"][1][1] = VOCABULARY

    server.spoil = sample_it
    with pytest.raises(MalformedResultError, match="token 1 has id 300"):
        await engine.generate(request_of())


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_whose_id_the_server_still_has_is_sent_again_when_the_id_is_free(
    engine: SGLangEngine, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """The server keeps the id of an attempt whose connection broke until it notices that."""
    taken = {"message": "Duplicate request ID detected: x", "code": 400}
    if streamed:
        server.stream_error = taken
    else:
        server.refuse["/generate"] = (400, json.dumps({"error": taken}))

    def waits() -> Iterator[float]:
        yield 0.0
        server.refuse.clear()
        server.stream_error = None
        yield 0.0

    monkeypatch.setattr(engine_module, "_WAITS_FOR_ID", waits())
    request = request_of(request_id="x")
    sampling = engine.generate(request, lambda delta: None) if streamed else engine.generate(request)
    assert (await sampling).completions[0].token_ids.tolist() == [1, 2, 3]
    assert [body["rid"] for body in server.requests] == ["x", "x"]


async def test_an_id_that_another_client_keeps_is_an_error(
    engine: SGLangEngine, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_WAITS_FOR_ID", (0.0, 0.0))
    server.refuse["/generate"] = (400, '{"error": {"message": "Duplicate request ID detected: x"}}')
    with pytest.raises(ServerError, match="Duplicate request ID detected: x"):
        await engine.generate(request_of(request_id="x"))
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (request_of(prompt_ids=[VOCABULARY]), InvalidRequestError, "not in the vocabulary of 300"),
        (request_of(prompt_ids=[]), InvalidRequestError, "empty"),
        (request_of(prompt_ids=[1] * 4096), ContextLengthError, "4096"),
        (request_of(sampling=SamplingParams(stop_token_ids=(300,))), InvalidRequestError, "stop_token_ids"),
        (request_of(sampling=SamplingParams(temperature=0, n=2)), InvalidRequestError, "all samples are equal"),
        (request_of(sampling=SamplingParams(temperature=1e-8)), InvalidRequestError, "replaces by 0"),
        (request_of(sampling=SamplingParams(extra={"logit_bias": {}})), InvalidRequestError, "after this change"),
        (request_of(sampling=SamplingParams(extra={"stop": "x"})), InvalidRequestError, "stop strings"),
        (request_of(sampling=SamplingParams(extra={"moo": 1})), InvalidRequestError, "unknown here"),
        (request_of(sampling=SamplingParams(temperature=0.5)), CapabilityError, "SGLANG_RETURN_ORIGINAL_LOGPROB"),
        (request_of(sampling=SamplingParams(top_logprobs=301)), InvalidRequestError, "more than the vocabulary has"),
        (request_of(adapter="policy"), CapabilityError, "--enable-lora"),
        (request_of(image(1), placeholder_token_ids={}), InvalidRequestError, "placeholder_token_ids"),
        (request_of(image(1, "video")), InvalidRequestError, "tokenises a prompt with video again"),
        (request_of(prompt_ids=[5, IMAGE_TOKEN]), InvalidRequestError, "lies in no placeholder"),
        (request_of(request_id="a b"), InvalidRequestError, "without spaces"),
    ],
)
async def test_what_would_end_or_mislead_the_server_is_not_sent(
    engine: SGLangEngine, server: FakeSGLang, request_: GenerateRequest, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await engine.generate(request_)
    assert server.requests == []


async def test_seeds_that_a_server_does_not_take_are_left_out_with_one_warning(
    engine: SGLangEngine, server: FakeSGLang, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in (1, 2):
        await engine.generate(request_of(sampling=SamplingParams(max_tokens=2, seed=seed)))
    assert not any("sampling_seed" in sent["sampling_params"] for sent in server.requests)
    assert [record.message for record in caplog.records if "takes no seeds" in record.message][1:] == []
    assert "takes no seeds: completions cannot be repeated" in caplog.text


async def test_a_server_that_does_not_report_its_vocabulary_is_refused(
    server: FakeSGLang, engine: SGLangEngine
) -> None:
    server.vocabulary_error = "no"
    with pytest.raises(CapabilityError, match="ids outside of the vocabulary end the server"):
        await engine.generate(request_of())


async def test_another_program_that_answers_with_a_page_is_refused_by_name(
    server: FakeSGLang, engine: SGLangEngine
) -> None:
    server.refuse["/server_info"] = (200, "<html>Welcome</html>")
    with pytest.raises(CapabilityError, match=r"is no SGLang server.*<html>Welcome"):
        await engine.capabilities()


@pytest.mark.parametrize("in_flight", ["abort", "keep"])
async def test_weights_are_loaded_within_a_pause(
    server: FakeSGLang, engine: SGLangEngine, checkpoint: Path, in_flight: Any
) -> None:
    await engine.update_weights(checkpoint, "1", in_flight=in_flight)
    assert [path for path, _ in server.calls] == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
    ]
    assert server.calls[0][1] == {"mode": {"abort": "abort", "keep": "retract"}[in_flight]}
    assert server.calls[1][1] == {"model_path": str(checkpoint), "weight_version": "1", "flush_cache": True}
    assert engine.weight_version == "1"


async def test_a_completion_with_an_image_token_beside_an_image_is_not_continued(
    server: FakeSGLang, engine: SGLangEngine, checkpoint: Path
) -> None:
    def sample_an_image_token(answer: dict[str, Any]) -> None:
        answer["output_ids"][0] = answer["meta_info"]["output_token_logprobs"][0][1] = IMAGE_TOKEN

    server.holds, server.spoil = True, sample_an_image_token
    sampling = asyncio.create_task(engine.generate(request_of(image(1), sampling=SamplingParams(max_tokens=5))))
    await server.until_running()
    await engine.update_weights(checkpoint, "1")
    with pytest.raises(InvalidRequestError, match="sampled as text"):
        await sampling
    assert len(server.requests) == 1


async def test_waiting_for_running_requests_holds_new_ones_back(
    server: FakeSGLang, engine: SGLangEngine, checkpoint: Path
) -> None:
    server.holds = True
    running = asyncio.create_task(engine.generate(request_of(request_id="running")))
    await server.until_running()
    server.holds = False
    update = asyncio.create_task(engine.update_weights(checkpoint, "1", in_flight="wait"))
    await asyncio.sleep(0)  # the update begins, and waits
    later = asyncio.create_task(engine.generate(request_of()))
    await engine.control.health()  # a round trip, in which `later` would have been sent
    assert [body["rid"] for body in server.requests] == ["running"]
    await engine.abort(["running"])
    assert (await running).completions[0].weight_spans == (WeightSpan("default", 0, 2),)
    await update
    assert (await later).completions[0].weight_spans == (WeightSpan("1", 0, 3),)


async def test_a_failed_load_ends_the_pause_and_says_what_the_server_said(
    server: FakeSGLang, engine: SGLangEngine, checkpoint: Path
) -> None:
    failure = '{"success": false, "message": "Rolling back to original weights."}'
    server.refuse["/update_weights_from_disk"] = (400, failure)
    with pytest.raises(WeightUpdateError, match="Rolling back to original weights"):
        await engine.update_weights(checkpoint, "1")
    assert server.calls[-1][0] == "/continue_generation"
    assert engine.weight_version == "default"


async def test_a_directory_without_a_checkpoint_is_refused_before_the_pause(
    server: FakeSGLang, engine: SGLangEngine, tmp_path: Path
) -> None:
    with pytest.raises(WeightUpdateError, match=r"no config\.json"):
        await engine.update_weights(tmp_path, "1")
    assert server.calls == []


async def test_adapters_are_loaded_by_name_and_label_their_tokens(
    server: FakeSGLang, engine: SGLangEngine, tmp_path: Path
) -> None:
    server.info["enable_lora"] = True
    with pytest.raises(UnknownAdapterError):
        await engine.generate(request_of(adapter="policy"))
    directory = write_adapter(tmp_path / "adapter")
    await engine.load_adapter("policy", directory)
    with pytest.raises(WeightUpdateError, match="a name stands for one set of weights"):
        await engine.load_adapter("policy", directory)
    (completion,) = (await engine.generate(request_of(adapter="policy"))).completions
    assert server.requests[-1]["lora_path"] == "policy"
    assert completion.weight_spans == (WeightSpan("policy", 0, 3),)
    await engine.unload_adapter("policy")
    assert await engine.adapters() == {}


async def test_routed_experts_have_the_shape_that_was_given(server: FakeSGLang) -> None:
    server.info["enable_return_routed_experts"] = True
    experts = np.arange(4 * 3 * 2, dtype=np.int32)
    server.spoil = with_value(base64.b64encode(experts.tobytes()).decode(), "meta_info", "routed_experts")
    async with SGLangEngine(server.base_url, routed_experts=(3, 2)) as engine:
        (completion,) = (await engine.generate(request_of())).completions
        assert server.requests[0]["return_routed_experts"] is True
        np.testing.assert_array_equal(completion.routed_experts, experts.reshape(4, 3, 2))
    async with SGLangEngine(server.base_url, routed_experts=(3, 5)) as engine:
        with pytest.raises(MalformedResultError, match="in 3 layers with 5 experts"):
            await engine.generate(request_of())


async def test_control_calls_that_a_server_lacks_or_refuses(server: FakeSGLang, engine: SGLangEngine) -> None:
    server.refuse["/flush_cache"] = (400, "Flush cache failed.")
    with pytest.raises(ServerError, match="Flush cache failed"):
        await engine.control.reset_prefix_cache()
    server.refuse["/pause_generation"] = (404, "")
    with pytest.raises(CapabilityError, match="older than the route"):
        await engine.control.pause()
    server.refuse["/health"] = (503, "")
    assert await engine.control.health() is False


async def test_memory_is_freed_within_a_pause_where_the_server_can(server: FakeSGLang, engine: SGLangEngine) -> None:
    with pytest.raises(CapabilityError, match="--enable-memory-saver and --enable-weights-cpu-backup"):
        await engine.control.sleep()
    assert server.calls == []
    server.info["enable_memory_saver"] = True
    await engine.control.sleep(2)
    await engine.control.wake_up(["weights"])
    await engine.control.wake_up(["kv_cache"])
    assert [path.strip("/") for path, _ in server.calls] == [
        "pause_generation",
        "release_memory_occupation",
        "resume_memory_occupation",
        "resume_memory_occupation",
        "continue_generation",
    ]


async def test_a_fleet_is_of_servers_of_one_kind(server: FakeSGLang, checkpoint: Path) -> None:
    other = FakeSGLang()
    await other.start()
    try:
        async with EngineFleet.from_urls([server.base_url, other.base_url], kind="sglang") as fleet:
            for session in range(8):
                await fleet.generate(request_of(session_id=str(session)))
            assert {len(each.requests) > 0 for each in (server, other)} == {True}
            await fleet.update_weights(checkpoint, "1")
            await fleet.control.pause(clear_cache=True)
            await fleet.control.resume()
            assert {await each.served_version() for each in fleet.engines.values()} == {"1"}
    finally:
        await other.stop()


async def test_a_fleet_of_servers_of_two_kinds_or_an_unknown_one_is_refused_by_name(server: FakeSGLang) -> None:
    with pytest.raises(ArgumentError, match="pass one of vllm, sglang"):
        EngineFleet.from_urls([server.base_url], kind="tgi")  # type: ignore[arg-type]

    class OtherEngine(SGLangEngine):
        async def capabilities(self) -> Any:
            return SimpleNamespace(engine="vLLM", model="/model", max_model_len=4096)

    engines = {"first": SGLangEngine(server.base_url), "second": OtherEngine(server.base_url)}
    async with EngineFleet(engines) as fleet:
        with pytest.raises(FleetMismatchError, match=r"has engine '(vLLM|SGLang)'"):
            await fleet.check()


async def test_a_server_that_was_restarted_with_another_model_is_probed_again(
    server: FakeSGLang, engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.generate(request_of())
    monkeypatch.setattr("rollouts.engines.http.capability_cache._QUIET_SECONDS", -1)
    server.model["model_path"] = "/other"
    await engine.generate(request_of())
    assert (await engine.capabilities()).model == "/model"  # the same process, by the seed that it drew
    server.info["random_seed"] = 2
    assert (await engine.capabilities()).model == "/other"


_SAMPLED_MARKER = {"prompt_ids": [5, IMAGE_TOKEN], "sampled": [(1, 2)]}


async def test_an_image_token_that_was_sampled_is_text_without_images_and_refused_with_them(
    engine: SGLangEngine, server: FakeSGLang
) -> None:
    await engine.generate(request_of(**_SAMPLED_MARKER))
    with_image = request_of(image(1))
    sampled = [*with_image.prompt_ids, IMAGE_TOKEN]
    with pytest.raises(InvalidRequestError, match="sampled as text"):
        await engine.generate(request_of(image(1), prompt_ids=sampled, sampled=[(len(sampled) - 1, len(sampled))]))


class Heard:
    """What a listener was told, by completion."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []

    def __call__(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)

    def parts(self, index: int = 0) -> list[list[int]]:
        return [delta.token_ids.tolist() for delta in self.deltas if delta.index == index]


@pytest.mark.parametrize("incremental", [False, True])
async def test_tokens_are_reported_as_they_are_sampled_whether_or_not_parts_repeat_them(
    engine: SGLangEngine, server: FakeSGLang, incremental: bool
) -> None:
    server.info["incremental_streaming_output"] = incremental
    heard = Heard()
    request = request_of(image(1), sampling=SamplingParams(max_tokens=4, n=2, top_logprobs=2))
    result = await engine.generate(request, heard)
    for index, completion in enumerate(result.completions):
        assert heard.parts(index) == [[1], [2], [3], [4]]
        assert completion.token_ids.tolist() == [1, 2, 3, 4]
        assert completion.logprobs.tolist() == [-1, -2, -3, -4]
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.weight_spans == (WeightSpan("default", 0, 4),)
        tops = [delta.top_logprobs for delta in heard.deltas if delta.index == index]
        assert completion.top_logprobs is not None
        joined = np.concatenate([top.token_ids for top in tops if top is not None])
        np.testing.assert_array_equal(joined, completion.top_logprobs.token_ids)
    assert engine.streams


KEPT = SamplingParams(max_tokens=3, top_k=4, top_p=0.9, top_logprobs=4)


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("listen", [None, lambda delta: None])
async def test_the_ids_that_top_k_with_top_p_kept_are_those_that_the_server_reports(
    engine: SGLangEngine, server: FakeSGLang, incremental: bool, listen: Any
) -> None:
    server.info["incremental_streaming_output"] = incremental
    (completion,) = (await engine.generate(request_of(sampling=KEPT), listen)).completions
    assert completion.sampling_masks is not None
    assert [mask.tolist() for mask in completion.sampling_masks] == [[1, 4], [2, 4], [3, 4]]
    server.spoil = without("meta_info", "output_token_sampling_mask", 2)
    with pytest.raises(MalformedResultError, match="output_token_sampling_mask` "):
        await engine.generate(request_of(sampling=KEPT), listen)


@pytest.mark.parametrize(
    ("top_k", "top_logprobs", "info"),
    [
        (0, 4, {}),
        (4096, 4, {}),
        (4, 0, {}),
        (4, 4, {"speculative_algorithm": "EAGLE"}),
        (4, 4, {"disaggregation_mode": "decode"}),
    ],
)
async def test_kept_ids_that_a_server_would_refuse_to_report_are_not_requested(
    engine: SGLangEngine, server: FakeSGLang, top_k: int, top_logprobs: int, info: dict[str, str]
) -> None:
    server.info |= info
    sampling = replace(KEPT, top_k=top_k, top_logprobs=top_logprobs)
    await engine.generate(request_of(sampling=sampling))
    assert "return_sampling_mask" not in server.requests[0]


async def test_a_long_completion_has_few_parts_where_each_repeats_all_tokens(
    engine: SGLangEngine, server: FakeSGLang
) -> None:
    heard = Heard()
    await engine.generate(request_of(sampling=SamplingParams(max_tokens=1000)), heard)
    assert server.requests[0]["sampling_params"]["stream_interval"] == 8
    assert [len(part) for part in heard.parts()] == [1, *[8] * 124, 7]


async def test_a_stream_goes_on_across_a_pause(server: FakeSGLang, engine: SGLangEngine, checkpoint: Path) -> None:
    server.holds = True
    heard = Heard()
    sampling = asyncio.create_task(engine.generate(request_of(image(1), sampling=SamplingParams(max_tokens=5)), heard))
    await server.until_running()
    server.holds = False
    await engine.update_weights(checkpoint, "1")
    (completion,) = (await sampling).completions
    assert heard.parts() == [[1], [2], [1], [2], [3]]
    assert completion.token_ids.tolist() == [1, 2, 1, 2, 3]
    assert completion.weight_spans == (WeightSpan("default", 0, 2), WeightSpan("1", 2, 5))
    first, rest = server.requests
    assert rest["input_ids"] == [*first["input_ids"], 1, 2]
    assert rest["image_data"] == first["image_data"]
    assert rest["sampling_params"]["max_new_tokens"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("answered", [True, False])
async def test_an_aborted_stream_has_the_tokens_that_were_reported(
    server: FakeSGLang, engine: SGLangEngine, answered: bool
) -> None:
    """Also where the server takes the abort and does not end the request."""
    if not answered:
        server.end = lambda request_id: None  # type: ignore[method-assign]
    server.holds = True
    heard = Heard()
    request = request_of(sampling=SamplingParams(max_tokens=5), request_id="x")
    sampling = asyncio.create_task(engine.generate(request, heard))
    await server.until_running()
    await engine.abort(["x"])
    (completion,) = (await sampling).completions
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.token_ids.tolist() == [token for part in heard.parts() for token in part] == [1, 2]


async def test_leaving_a_stream_ends_its_request_on_the_server(server: FakeSGLang, engine: SGLangEngine) -> None:
    server.holds = True
    request = request_of(sampling=SamplingParams(max_tokens=5), request_id="x")
    sampling = asyncio.create_task(engine.generate(request, Heard()))
    await server.until_running()
    sampling.cancel()
    await asyncio.wait([sampling])
    assert ("/abort_request", {"rid": "x"}) in server.calls


_ROWS, _ENDING = ("meta_info", "output_token_logprobs"), ("meta_info", "finish_reason")


def _twice_as_many(answer: dict[str, Any]) -> None:
    for rows in (answer, answer["meta_info"]):
        for name in rows.keys() & {"output_ids", "output_token_logprobs"}:
            rows[name] *= 2


_REFUSAL = {"type": "abort", "status_code": 400, "message": "Input length exceeds the maximum"}


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (with_value(7, "output_ids", 1), MalformedResultError, "log-probability 0 is of token 2, not of token 7"),
        (with_value({"logprob": -2.0}, *_ROWS, 1), MissingLogProbsError, "cannot be read"),
        (with_value(None, *_ENDING), MalformedResultError, "the stream ended after 3 tokens without a finish_reason"),
        (with_value(_REFUSAL, *_ENDING), ServerError, "Input length exceeds the maximum"),
        (without(*_ROWS, 2), MalformedResultError, r"has 2 `output_token_logprobs` after 2 of 3 tokens"),
        (with_value(None, *_ROWS, 1, 0), MissingLogProbsError, "log-prob"),
        (with_value(3, "meta_info", "prompt_tokens"), MalformedResultError, "ran 3 tokens of a prompt of 2"),
        (_twice_as_many, MalformedResultError, "holds 6 tokens; the request has max_tokens=3"),
    ],
)
async def test_what_is_wrong_in_a_stream_is_an_error(
    server: FakeSGLang, engine: SGLangEngine, spoil: Any, error: type[Exception], text: str
) -> None:
    server.spoil = spoil
    with pytest.raises(error, match=text):
        await engine.generate(request_of(), Heard())
