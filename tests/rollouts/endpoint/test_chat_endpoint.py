"""`ChatEndpoint` against a real server of this project: what it samples, sends and returns."""

import asyncio
import base64
import io
import json
from contextlib import contextmanager

import numpy as np
import pytest
import soundfile
from chat_server import ChatServer, call, completion
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from served_in_thread import ServedInThread
from sounds import sound_file
from starlette.applications import Starlette

from renderers import MediaPolicy, MediaSource
from renderers.errors import MediaError, MediaPolicyError, MessageError
from renderers.parsing.response import ToolCallParseStatus as Status
from rollouts import GenerateRequest, SamplingParams, StepResult, run_episode
from rollouts.engines import ChatEndpoint
from rollouts.engines.local import LocalEngine
from rollouts.environments import ToolEnvironment
from rollouts.errors import (
    ArgumentError,
    ContextLengthError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    MalformedResultError,
    MissingLogProbsError,
)
from rollouts.serve.app import create_app
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import ScriptedEngine
from rollouts.training import samples_from_trajectory
from transport import decode, encode

KEY = "a-key-of-this-test"
PIXELS = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
SAMPLES = 0.5 * np.sin(np.arange(11_025, dtype=np.float32) / 10)
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a row.",
        "parameters": {"type": "object", "properties": {"row": {"type": "integer"}}},
    },
}


def user(content):
    return {"role": "user", "content": content}


def encoded(pixels, kind="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def pixels_of(url):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))


@contextmanager
def serving(directory, renderer):
    """The address of a server with a model and a key."""
    gateway = Gateway(LocalEngine.from_pretrained(directory), renderer)
    with ServedInThread(create_app(gateway, api_key=KEY, on_shutdown=[gateway.close])) as server:
        yield f"{server.base_url}/v1"


@pytest.fixture(scope="module")
def served(tiny_model_dir, renderer):
    with serving(tiny_model_dir, renderer) as url:
        yield url


class Questions:
    """Asks the user's questions one after another."""

    def __init__(self, *questions, system=None):
        self.system = [] if system is None else [{"role": "system", "content": system}]
        self.questions = list(questions)

    def reset(self, seed):
        return [*self.system, user(self.questions.pop(0))]

    def step(self, assistant):
        done = not self.questions
        return StepResult([] if done else [user(self.questions.pop(0))], 1.0, done=done)


def with_tokens(content="fine", *, prompt=(1, 2), ids=(8, 9), logprobs=(-0.5, -0.25), **usage):
    """A chat completion with token ids, as vLLM sends it."""
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), **usage}
    body = {**completion(content, usage=usage), "prompt_token_ids": list(prompt)}
    body["choices"][0] |= {
        "token_ids": list(ids),
        "logprobs": {"content": [{"token": "a", "logprob": each} for each in logprobs]},
    }
    return body


MANY = {"ids": [8] * 1000, "logprobs": [-0.5] * 1000}


async def check_seeded_completion(url, directory, renderer, content):
    """The answer of the server is the completion of an engine with the same model."""
    messages = [{"role": "system", "content": "Be brief."}, user(content)]
    sampling = SamplingParams(max_tokens=12, temperature=0.7)
    async with ChatEndpoint(url, "policy", api_key=KEY) as endpoint:
        answer = await endpoint.chat(messages, sampling=sampling, seed=5)
    prompt = renderer.render(messages, add_generation_prompt=True)
    engine = LocalEngine.from_pretrained(directory)
    stops = tuple(renderer.get_stop_token_ids())
    request = GenerateRequest(
        prompt.token_ids,
        SamplingParams(max_tokens=12, temperature=0.7, seed=5, stop_token_ids=stops),
        prompt.multi_modal_data,
        placeholder_token_ids=prompt.placeholder_token_ids,
    )
    (completion,) = (await engine.generate(request)).completions
    expected = renderer.parse_response(completion.token_ids.tolist(), prompt_ids=prompt.token_ids)
    assert answer.message == expected.to_message()
    assert answer.finish_reason == completion.finish_reason
    assert (answer.prompt_tokens, answer.completion_tokens) == (len(prompt.token_ids), len(completion.token_ids))
    assert answer.model == "policy"
    return answer


@pytest.mark.parametrize("image", [None, Image.fromarray(PIXELS)], ids=["text", "image"])
async def test_a_seeded_completion_is_that_of_the_engine_behind_the_server(served, tiny_model_dir, renderer, image):
    parts = [{"type": "text", "text": "Which colour?"}]
    content = parts if image is None else [{"image": image}, *parts]
    await check_seeded_completion(served, tiny_model_dir, renderer, content)


async def test_an_episode_with_token_ids_has_the_tokens_of_the_engine_behind_the_server(
    served, tiny_model_dir, renderer
):
    sampling = SamplingParams(max_tokens=6, temperature=0.7, seed=3)

    async def episode_on(engine, renderer):
        questions = Questions("Which colour?", "Which shape?", system="Be brief.")
        return await run_episode(questions, engine=engine, renderer=renderer, sampling=sampling, max_turns=2)

    async with ChatEndpoint(served, "policy", api_key=KEY, return_token_ids=True) as endpoint:
        episode = await episode_on(endpoint, None)
    own = await episode_on(LocalEngine.from_pretrained(tiny_model_dir), renderer)
    first, last = (turn.node for turn in episode.turns)
    of_own = own.turns[0].node
    assert episode.token_ids(first).tolist() == own.token_ids(of_own).tolist()
    np.testing.assert_allclose(episode.nodes[first].logprobs, own.nodes[of_own].logprobs, atol=1e-5)
    # The gateway goes on from the tokens of the first turn, as the episode without a server does.
    assert episode.path(last)[: len(episode.path(first))] == episode.path(first)
    roles = [message["role"] for message in episode.to_messages(last)]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    (sample,) = samples_from_trajectory(decode(encode(episode)), advantage=1.0, processors={})
    assert sample.token_ids.tolist() == episode.token_ids(last).tolist() == own.token_ids(own.turns[1].node).tolist()


@pytest.mark.parametrize(
    ("response", "error", "text"),
    [
        (
            completion(),
            MalformedResultError,
            "prompt_token_ids of the answer: Field required.*leave return_tok",
        ),
        (with_tokens(prompt=[-1]), MalformedResultError, "prompt_token_ids of the answer: token 0 has id -1"),
        (with_tokens(ids=[]), MalformedResultError, "token_ids of the answer: no token"),
        (
            with_tokens(ids=[8, 2**70]),
            MalformedResultError,
            r"choices\.0\.token_ids\.1 of the answer: .*less than 9223",
        ),
        (with_tokens(logprobs=[-0.5, -1e39]), MissingLogProbsError, "token 1 has log-probability -inf"),
        (with_tokens(logprobs=[-0.5]), MissingLogProbsError, "2 tokens and 1 log-probabilities"),
        (with_tokens(logprobs=[-0.5, -9999.0]), MissingLogProbsError, "token 1 has log-probability -9999"),
        (with_tokens(**MANY), MalformedResultError, "has 1000 tokens, and max_completion_tokens was 256"),
        (with_tokens(**MANY, completion_tokens=None), MalformedResultError, "has 1000 tokens, and max_completion"),
        (with_tokens(**MANY, completion_tokens=2), MalformedResultError, "usage.completion_tokens is 2, .* 1000 ids"),
        (with_tokens(completion_tokens=0), MalformedResultError, "usage.completion_tokens is 0, .* 2 ids"),
        (with_tokens(prompt_tokens=7), MalformedResultError, "usage.prompt_tokens is 7, .* 2 ids"),
    ],
)
async def test_an_answer_without_the_requested_tokens_is_an_error(response, error, text):
    with ChatServer(response) as server:
        async with ChatEndpoint(server.url, "m", return_token_ids=True) as endpoint:
            with pytest.raises(error, match=text):
                await endpoint.chat([user("hi")], sampling=SamplingParams())
            with pytest.raises(InvalidRequestError, match="returns no features of the media"):
                await endpoint.chat([user([{"image": PIXELS}])], sampling=SamplingParams())
    assert len(server.bodies) == 1
    assert (server.bodies[0]["return_token_ids"], server.bodies[0]["logprobs"]) == (True, True)


async def test_a_turn_whose_prompt_prints_earlier_turns_otherwise_has_the_whole_conversation():
    """The first prompt is 1 2, the second goes on from it without what was sampled, the third from nothing."""
    prompts = [1, 2], [1, 2, 6, 7], [3, 1, 2]
    with ChatServer(*(with_tokens(str(number), prompt=ids) for number, ids in enumerate(prompts))) as server:
        async with ChatEndpoint(server.url, "m", return_token_ids=True) as endpoint:
            episode = await run_episode(
                Questions("q0", "q1", "q2"),
                engine=endpoint,
                renderer=None,
                sampling=SamplingParams(max_tokens=8),
                max_turns=3,
            )
    nodes = [turn.node for turn in episode.turns]
    assert [episode.token_ids(node).tolist() for node in nodes] == [[*prompt, 8, 9] for prompt in prompts]
    contents = [[message["content"] for message in episode.to_messages(node)] for node in nodes]
    assert contents == [["q0", "0"], ["q0", "0", "q1", "1"], ["q0", "0", "q1", "1", "q2", "2"]]
    assert len(episode.leaves()) == 3


@pytest.mark.slow
async def test_a_model_that_hears_answers_what_the_engine_behind_the_server_does(tiny_audio_dir, hearing):
    with serving(tiny_audio_dir, hearing) as url:
        sounds = [{"type": "audio", "audio": level * SAMPLES, "sampling_rate": 22_050} for level in (1, 0)]
        answers = [await check_seeded_completion(url, tiny_audio_dir, hearing, [sound]) for sound in sounds]
    assert answers[0].message != answers[1].message  # silence


async def test_a_prompt_longer_than_the_context_is_an_overlong_prompt(served):
    async with ChatEndpoint(served, "policy", api_key=KEY) as endpoint:
        with pytest.raises(ContextLengthError) as raised:
            await endpoint.chat([user("a" * 5000)], sampling=SamplingParams(max_tokens=4))
    assert (raised.value.prompt_tokens > 5000, raised.value.limit) == (True, 4096)


@pytest.mark.slow
async def test_the_key_is_the_given_one_and_that_of_openai_goes_there_alone(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    with ChatServer(completion()) as server:
        for key in ("given", None):
            async with ChatEndpoint(server.url, "m", api_key=key) as endpoint:
                await endpoint.chat([user("a")], sampling=SamplingParams())
        monkeypatch.setattr("rollouts.engines.endpoint._OPENAI", f"{server.base_url}/")
        async with ChatEndpoint(server.url, "m") as endpoint:
            await endpoint.chat([user("a")], sampling=SamplingParams())
    keys = [headers.get("authorization") for headers in server.headers]
    assert keys == ["Bearer given", None, "Bearer of-openai"]


# Requests.


async def sent(messages, *, sampling=None, tools=None, seed=None, response=None, **options):
    """The body of the request for a conversation."""
    with ChatServer(response or completion()) as server:
        async with ChatEndpoint(server.url, "m", **options) as endpoint:
            await endpoint.chat(messages, sampling=sampling or SamplingParams(), tools=tools, seed=seed)
    return server.bodies[-1]


async def test_sampling_options_have_the_names_of_the_api_and_can_be_left_out():
    sampling = SamplingParams(max_tokens=9, top_p=0.25, seed=1, extra={"min_p": 0.1})
    body = await sent([user("a")], sampling=sampling)
    named = {"max_completion_tokens": 9, "temperature": 1.0, "top_p": 0.25, "seed": 1, "min_p": 0.1}
    assert body == {"model": "m", "messages": [user("a")], **named}
    sampling = SamplingParams(max_tokens=9, seed=1)
    body = await sent(
        [user("a")], sampling=sampling, max_tokens_field="max_tokens", omit=("temperature", "top_p", "seed")
    )
    assert body == {"model": "m", "messages": [user("a")], "max_tokens": 9}


@pytest.mark.parametrize(
    ("sampling", "options", "named"),
    [
        (SamplingParams(n=2), {}, "SamplingParams.n is 2.*call chat once for each"),
        (SamplingParams(top_k=5), {}, "SamplingParams.top_k is 5.*extra="),
        (SamplingParams(top_logprobs=5), {}, "SamplingParams.top_logprobs is 5.*without tokens"),
        (SamplingParams(stop_token_ids=(1,)), {}, r"SamplingParams.stop_token_ids is \(1,\).*stop strings"),
        (SamplingParams(extra={"n": 2}), {}, "extra .* sets 'n'; use the argument"),
        (SamplingParams(extra={"max_tokens": 2}), {}, "sets 'max_tokens'"),
        (SamplingParams(extra={"stop": object()}), {}, "cannot be written as JSON"),
        (SamplingParams(temperature=0.5), {"omit": ["temperature"]}, "temperature is 0.5, and this endpoint omits"),
    ],
)
async def test_sampling_options_that_the_api_does_not_have_are_refused(sampling, options, named):
    async with ChatEndpoint("http://127.0.0.1:9/v1", "m", **options) as endpoint:
        with pytest.raises(InvalidRequestError, match=named):
            await endpoint.chat([user("a")], sampling=sampling)


async def test_arguments_of_calls_are_sent_as_text_and_reasoning_as_the_server_gave_it():
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": {"row": 1, "é": None}}}]
    assistant = {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"}
    result = {"role": "tool", "tool_call_id": "c", "name": "look", "content": "red"}
    body = await sent(
        [user("a"), assistant, result], tools=[LOOK, LOOK["function"], {"type": "function", **LOOK["function"]}]
    )
    assert body["tools"] == [LOOK] * 3, "a bare schema, and a tool of the Responses API, are wrapped"
    written = body["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(written) == {"row": 1, "é": None}
    assert body["messages"][1]["reasoning_content"] == "hm"
    assert body["messages"][1]["content"] is None
    assert body["messages"][2] == result


async def test_images_of_every_form_are_sent_as_their_pixels():
    png = encoded(PIXELS)
    forms = [Image.fromarray(PIXELS), PIXELS, png, MediaSource.of(png), encoded(PIXELS, "WEBP", lossless=True)]
    forms.append(f"data:image/png;base64,{base64.b64encode(png).decode()}")
    body = await sent([user([{"type": "image", "image": form} for form in forms])])
    parts = body["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url"] * len(forms)
    for part in parts:
        assert part["image_url"]["url"].startswith("data:image/png;base64,")
        np.testing.assert_array_equal(pixels_of(part["image_url"]["url"]), PIXELS)


async def test_a_jpeg_is_sent_unchanged_with_the_detail_of_its_part():
    data = encoded(PIXELS, "JPEG")
    url = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
    given = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    assert (await sent([user([given])]))["messages"][0]["content"] == [given]


@pytest.mark.parametrize("form", ["WAV", "MP3"])
async def test_wav_and_mp3_files_are_sent_unchanged(form):
    data = sound_file(SAMPLES, 22_050, form)
    body = await sent([user([{"type": "audio", "audio": data}])])
    sound = {"data": base64.b64encode(data).decode(), "format": form.lower()}
    assert body["messages"][0]["content"] == [{"type": "input_audio", "input_audio": sound}]


async def test_other_sounds_are_sent_as_wav_at_their_own_rate():
    given = [
        {"type": "audio", "audio": SAMPLES, "sampling_rate": 22_050},
        {"type": "audio", "audio": (SAMPLES * 32767).astype(np.int16), "sampling_rate": 8_000},
        {"type": "audio", "audio": sound_file(SAMPLES, 22_050, "FLAC")},
    ]
    parts = (await sent([user(given)]))["messages"][0]["content"]
    assert [(part["type"], part["input_audio"]["format"]) for part in parts] == [("input_audio", "wav")] * 3
    decoded = [soundfile.read(io.BytesIO(base64.b64decode(part["input_audio"]["data"]))) for part in parts]
    assert [rate for _, rate in decoded] == [22_050, 8_000, 22_050]
    np.testing.assert_array_equal(decoded[0][0], SAMPLES)
    for samples, _ in decoded[1:]:
        np.testing.assert_allclose(samples, SAMPLES, atol=2**-14)


@pytest.mark.slow
async def test_a_path_is_read_only_below_an_allowed_directory(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(PIXELS))
    messages = [user([{"type": "image", "image": str(tmp_path / "a.png")}])]
    body = await sent(messages, policy=MediaPolicy(allowed_directories=(tmp_path,)))
    np.testing.assert_array_equal(pixels_of(body["messages"][0]["content"][0]["image_url"]["url"]), PIXELS)
    with pytest.raises(MediaPolicyError, match="message 0, part 0"):
        await sent(messages)


@pytest.mark.parametrize(
    ("content", "error", "named"),
    [
        ([{"type": "text", "text": "a"}, {"type": "video", "video": PIXELS[None]}], MessageError, "part 1: .*videos"),
        ([{"type": "image", "image": b"no image"}], MediaError, "message 0, part 0"),
        (
            [{"type": "audio", "audio": sound_file(SAMPLES, 22_050)[:2000]}],
            MediaError,
            "message 0, part 0: .*corrupt",
        ),
        ([{"type": "audio", "audio": SAMPLES}], MediaError, "message 0, part 0: .*not None"),
        ("half \ud800", MessageError, "message 0: half of a surrogate pair"),
        ([{"type": "text", "text": "\udc00"}], MessageError, "message 0, part 0: half of a surrogate pair"),
    ],
)
async def test_content_that_cannot_be_sent_is_refused_with_its_place(content, error, named):
    async with ChatEndpoint("http://127.0.0.1:9/v1", "m") as endpoint:
        with pytest.raises(error, match=named):
            await endpoint.chat([user(content)], sampling=SamplingParams())


def called(*call_ids):
    """A message with calls, and for each a result with a text and an image."""
    calls = [{"id": each, "type": "function", "function": {"name": "look", "arguments": {}}} for each in call_ids]
    parts = [{"type": "text", "text": "see"}, {"type": "image", "image": PIXELS}]
    results = [{"role": "tool", "tool_call_id": each, "content": parts} for each in call_ids]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


@pytest.mark.parametrize("of_openai", [False, True])
async def test_images_of_results_are_sent_in_the_results_or_by_the_user(monkeypatch, of_openai):
    """The default depends on the server."""
    messages = [user("a"), *called("x", "y"), {"role": "assistant", "content": "b"}, user("c")]
    with ChatServer(completion()) as server:
        if of_openai:
            monkeypatch.setattr("rollouts.engines.endpoint._OPENAI", f"{server.base_url}/")
        for chosen in ({}, {"tool_images": "user" if of_openai else "tool"}):
            async with ChatEndpoint(server.url, "m", **chosen) as endpoint:
                await endpoint.chat(messages, sampling=SamplingParams())
    assert server.bodies[0] == server.bodies[1]
    sent = server.bodies[0]["messages"]
    assert_results_answer_calls(sent)
    followed = ["user"] * 2 if of_openai else []
    assert [each["role"] for each in sent] == ["user", "assistant", "tool", "tool", *followed, "assistant", "user"]
    for number, call_id in enumerate("xy"):
        kinds = [part["type"] for part in sent[2 + number]["content"]]
        assert kinds == (["text", "text"] if of_openai else ["text", "image_url"])
        if of_openai:
            text, picture = sent[4 + number]["content"]
            assert f"call {call_id}:" in text["text"]
            np.testing.assert_array_equal(pixels_of(picture["image_url"]["url"]), PIXELS)


# Answers.


async def answer_of(body, **options):
    with ChatServer(body) as server:
        async with ChatEndpoint(server.url, "m") as endpoint:
            return await endpoint.chat([user("a")], sampling=SamplingParams(), **options)


PARTS = [
    {"type": "thinking", "thinking": [{"type": "text", "text": "let me "}, {"type": "text", "text": "see"}]},
    {"type": "text", "text": "It is "},
    {"type": "text", "text": "red."},
]


@pytest.mark.parametrize(
    ("message", "content", "reasoning"),
    [
        ({"content": None, "refusal": "I cannot."}, "I cannot.", None),
        ({"content": None, "reasoning": "hm"}, "", "hm"),
        ({"content": ""}, "", None),
        ({"content": PARTS}, "It is red.", "let me see"),
    ],
    ids=["refusal", "vLLM's name of reasoning", "nothing", "parts"],
)
async def test_other_forms_of_messages_are_read(message, content, reasoning):
    """Also without the fields that a server may leave out."""
    body = completion(**message)
    del body["usage"], body["model"]
    answer = await answer_of(body)
    assert (answer.message["content"], answer.message.get("reasoning_content")) == (content, reasoning)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.model) == (None, None, None)


async def test_ids_of_calls_without_one_are_those_of_no_other_call():
    calls = [call("{}", call_id=call_id) for call_id in (None, "call_0", None)]
    answer = await answer_of(completion("", tool_calls=calls, finish_reason="tool_calls"))
    ids = [one["id"] for one in answer.message["tool_calls"]]
    assert len(set(ids)) == 3
    assert ids[1] == "call_0"


@pytest.mark.parametrize(
    ("function_call", "status", "arguments"),
    [
        (call('{"row": 1}'), Status.OK, {"row": 1}),
        (call({"row": 1}), Status.OK, {"row": 1}),
        (call(""), Status.OK, {}),
        (call("{}", name="leap"), Status.UNKNOWN_TOOL, {}),
        (call('{"row": 1'), Status.INVALID_JSON, '{"row": 1'),
        (call('{"row": 1, "row": 2}'), Status.INVALID_JSON, '{"row": 1, "row": 2}'),
        (call("[1]"), Status.MALFORMED_STRUCTURE, None),
        (call('{"a":' * 70 + "1" + "}" * 70), Status.MALFORMED_STRUCTURE, None),
        (call("{}", name=""), Status.MISSING_NAME, None),
        ({"id": "x"}, Status.MISSING_NAME, None),
    ],
)
async def test_calls_have_the_status_that_our_parsers_give(function_call, status, arguments):
    answer = await answer_of(completion(None, tool_calls=[function_call]), tools=[LOOK])
    (attempt,) = answer.parsed.tool_calls
    assert (attempt.status, attempt.arguments) == (status, arguments)
    assert ("tool_calls" in answer.message) == status.is_well_formed
    assert answer.message["content"] == ("" if status.is_well_formed else attempt.raw)


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8")), st.none() | st.integers() | st.text(st.characters(codec="utf-8"))
    )
)
def test_arguments_return_from_the_server_as_they_were_sent(arguments):
    from rollouts.engines.chat_completions import _Function, _parsed_call, _sent_call

    text = _sent_call({"function": {"name": "look", "arguments": arguments}}, 0, 0)["function"]["arguments"]
    assert _parsed_call(None, _Function(name="look", arguments=text), ()).arguments == arguments


@pytest.mark.slow
async def test_an_episode_with_tools_answers_calls_of_the_server_and_malformed_ones(renderer):
    def look(row: int) -> Image.Image:
        """Look at a row."""
        return Image.fromarray(PIXELS + np.uint8(row))

    turns = [
        [call('{"row": 1', call_id="bad"), call('{"row": 2}', call_id="good")],
        [call('{"row": 3', call_id="bad again")],
        None,
    ]
    responses = [completion(None, tool_calls=calls) if calls else completion("red") for calls in turns]
    environment = ToolEnvironment(None, tools=[look], messages=lambda task: [user("Which?")], score=lambda *_: 1.0)
    with ChatServer(*responses) as server:
        async with ChatEndpoint(server.url, "m") as endpoint:
            sampling = SamplingParams(seed=1)
            trajectory = await run_episode(environment, engine=endpoint, renderer=None, sampling=sampling, max_turns=8)
    assert (trajectory.error, trajectory.reward) == ("", 1.0)
    outcomes = [one["outcome"] for turn in trajectory.turns for one in turn.info.get("tool_calls", ())]
    assert outcomes == ["malformed", "ok", "malformed"]
    assert len({body["seed"] for body in server.bodies}) == 3
    for body in server.bodies:
        assert_results_answer_calls(body["messages"])
    messages = server.bodies[-1]["messages"]
    (result,) = [message for message in messages if message["role"] == "tool"]
    np.testing.assert_array_equal(pixels_of(result["content"][0]["image_url"]["url"]), PIXELS + np.uint8(2))
    assert any("not valid JSON" in message["content"] for message in messages)
    # The gateway, which refuses results without a call, takes the same messages.
    engine = ScriptedEngine(["red"], renderer=renderer)
    with ServedInThread(Starlette(routes=Gateway(engine, renderer).routes())) as server:
        async with ChatEndpoint(f"{server.base_url}/v1", "m") as endpoint:
            answer = await endpoint.chat(messages, tools=environment.tools, sampling=SamplingParams())
    assert answer.message["content"] == "red"


def assert_results_answer_calls(messages):
    """OpenAI: after a message with calls, a result for each, and no result elsewhere."""
    waiting = set()
    for message in messages:
        if message["role"] == "tool":
            waiting.remove(message["tool_call_id"])
            continue
        assert not waiting
        waiting = {one["id"] for one in message.get("tool_calls", ())}
    assert not waiting


# The object.


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"base_url": "127.0.0.1:8000/v1"}, "base_url"),
        ({"base_url": "http://h/v1/chat/completions"}, "base_url .*before /chat/completions"),
        ({"base_url": "http://h/v1?key=secret"}, "base_url"),
        ({"base_url": "http://me:secret@h/v1", "api_key": "k"}, "base_url .*credentials"),
        ({"base_url": "http://h:99999/v1"}, "base_url"),
        ({"api_key": "secret\n"}, "api_key is '...'"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"max_retries": -1}, "max_retries"),
        ({"max_tokens_field": "tokens"}, "max_tokens_field"),
        ({"omit": "seed"}, "omit"),
        ({"tool_images": "assistant"}, "tool_images"),
        ({"omit": ["top_k"]}, "omit"),
    ],
)
def test_wrong_arguments_are_refused_without_their_secrets(arguments, named):
    with pytest.raises(ArgumentError, match=named) as raised:
        ChatEndpoint(**{"base_url": "http://h/v1", "model": "m", **arguments})
    assert "secret" not in str(raised.value)


async def test_a_closed_endpoint_refuses_requests():
    endpoint = ChatEndpoint("http://127.0.0.1:9/v1", "m")
    await endpoint.close()
    await endpoint.close()
    with pytest.raises(EngineClosedError):
        await endpoint.chat([user("a")], sampling=SamplingParams())


def test_an_endpoint_serves_one_event_loop_after_another_and_not_two_at_a_time():
    with ChatServer(completion()) as server:
        endpoint = ChatEndpoint(server.url, "m")

        async def ask():
            return (await endpoint.chat([user("a")], sampling=SamplingParams())).message["content"]

        assert [asyncio.run(ask()), asyncio.run(ask())] == ["fine", "fine"]

        async def ask_on_two_loops():
            await ask()
            return await asyncio.to_thread(asyncio.run, ask())

        with pytest.raises(EngineError, match="another event loop"):
            asyncio.run(ask_on_two_loops())
