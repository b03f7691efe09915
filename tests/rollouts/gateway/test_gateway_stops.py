"""Stop strings, stop tokens, and requests that allow no tool call."""

import numpy as np
import pytest
from gateway_server import CALL, TOOLS, SteppedEngine, served, user
from hypothesis import given
from hypothesis import strategies as st

from rollouts import Completion, FinishReason, WeightSpan
from rollouts.engines.local import LocalEngine
from rollouts.engines.stop_strings import cut_at_stop, sendable_length
from rollouts.testing import ScriptedEngine

#: Tokens of a language in which the id of a token is its length and its letter.
PIECES = ["", "a", "b", "ab", "ba", "aab", "é"]


def decode(ids):
    return "".join(PIECES[token] for token in ids)


def completion_of(ids):
    half = len(ids) // 2
    return Completion(
        index=0,
        token_ids=np.array(ids, np.int32),
        logprobs=-np.arange(len(ids), dtype=np.float32),
        finish_reason=FinishReason.LENGTH,
        weight_spans=(WeightSpan("0", 0, half), WeightSpan("1", half, len(ids))),
        routed_experts=np.arange(3 + len(ids) - 1)[:, None, None],
        sampling_masks=tuple(np.array([token], np.int32) for token in ids),
    )


STOPS = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


@given(st.lists(st.integers(1, len(PIECES) - 1), min_size=1, max_size=30), STOPS)
def test_a_completion_ends_with_the_first_token_that_completes_a_stop_string(ids, stop):
    cut, string = cut_at_stop(completion_of(ids), stop, decode)
    lengths = [length for length in range(1, len(ids) + 1) if any(one in decode(ids[:length]) for one in stop)]
    if not lengths:
        assert string is None
        assert cut.token_ids.tolist() == ids
        return
    length = lengths[0]
    assert cut.token_ids.tolist() == ids[:length]
    assert string in decode(ids[:length])
    assert cut.finish_reason is FinishReason.STOP
    assert len(cut.logprobs) == len(cut.sampling_masks) == length
    assert len(cut.routed_experts) == 3 + length - 1
    assert sum(span.end - span.start for span in cut.weight_spans) == length


@pytest.mark.parametrize(("echoed", "leaves"), [("ab", 1), ("ab</code>", 1), ("a</code>", 2)])
def test_an_agent_may_write_the_stop_string_back(renderer, echoed, leaves):
    engine = ScriptedEngine(["ab</code>more", "Red."], renderer=renderer)
    with served(engine, renderer) as server:
        client = server.client("s")
        client.chat.completions.create(model="m", messages=[user("a")], stop="</code>")
        messages = [user("a"), {"role": "assistant", "content": echoed}, user("b")]
        client.chat.completions.create(model="m", messages=messages)
        assert len(server.trajectory("s").leaves()) == leaves


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nObservation: red", "\nObservation:", "hm", ""),
        ("<think>\nObservation: red\n</think>\n\none", "\nObservation:", "", ""),
        ("<think>\nhm\n</think>\n\nObserve.\nObservation: red", "\nObservation:", "hm", "Observe."),
        ("Observation: red", "\nObservation:", "", "Observation: red"),
    ],
)
def test_a_stop_string_that_begins_with_line_breaks_of_the_layout_is_not_sent(
    renderer, live, text, stop, reasoning, content
):
    """The line breaks behind reasoning are not part of the content."""
    engine = SteppedEngine([text], renderer) if live else ScriptedEngine([text], renderer=renderer)
    with served(engine, renderer) as server:
        deltas = [
            chunk.choices[0].delta
            for chunk in server.client("s").chat.completions.create(
                model="m", messages=[user("a")], stop=stop, stream=True
            )
        ]
    assert "".join(delta.content or "" for delta in deltas) == content
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == reasoning


def test_stop_token_ids_are_added_to_those_of_the_template(renderer):
    engine = ScriptedEngine(["one"], renderer=renderer)
    with served(engine, renderer) as server:
        server.client("s").chat.completions.create(model="m", messages=[user("a")], extra_body={"stop_token_ids": [70]})
    assert engine.requests[0].sampling.stop_token_ids == (*renderer.get_stop_token_ids(), 70)


def test_sampling_options_reach_the_engine_under_its_names(renderer):
    engine = ScriptedEngine(["one"], renderer=renderer)
    with served(engine, renderer) as server:
        server.client("s").chat.completions.create(
            model="m",
            messages=[user("a")],
            temperature=0.5,
            top_p=0.9,
            max_completion_tokens=7,
            seed=3,
            frequency_penalty=0.25,
            presence_penalty=0,
            extra_body={"top_k": 5, "min_p": 0.1},
        )
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 7)
    assert (sampling.seed, sampling.top_k, sampling.n) == (3, 5, 1)
    assert sampling.extra == {"frequency_penalty": 0.25, "min_p": 0.1}


def test_without_tool_choice_the_prompt_has_no_tools_and_calls_are_text(renderer):
    engine = ScriptedEngine([f"Hm.{CALL}"], renderer=renderer)
    with served(engine, renderer) as server:
        response = server.client("s").chat.completions.create(
            model="m", messages=[user("a")], tools=TOOLS, tool_choice="none"
        )
    (choice,) = response.choices
    assert choice.message.tool_calls is None
    assert '"name": "look"' in choice.message.content
    assert "look" not in renderer.tokenizer.decode(engine.requests[0].prompt_ids)


# Ending a request early.


LONG = 150


class CountingEngine(LocalEngine):
    """Keeps how many tokens each streamed request has sampled."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.sampled = []

    async def generate(self, request, listen=None):
        result = await super().generate(request, listen)
        if listen is not None:
            self.sampled.append([len(completion.token_ids) for completion in result.completions])
        return result


@pytest.fixture
def engine(tiny_model_dir):
    return CountingEngine.from_pretrained(tiny_model_dir)


def long_samples(client, n=1):
    """Options of a request, and its completions of `LONG` tokens each."""
    for seed in range(100):
        options = {"model": "m", "messages": [user("a")], "seed": seed, "max_tokens": LONG, "n": n}
        choices = client.chat.completions.create(**options, extra_body={"return_token_ids": True}).choices
        if all(choice.finish_reason == "length" for choice in choices):
            return options, choices
    raise AssertionError("no seed gives long completions")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_stops_sampling_once_a_stop_string_is_complete(engine, renderer, stream):
    decode = renderer.tokenizer.decode
    with served(engine, renderer) as server:
        client = server.client("s")
        options, (whole,) = long_samples(client)
        stop = decode(whole.token_ids)[12:14]
        answer = client.chat.completions.create(**options, stop=[stop], stream=stream)
        if stream:
            content = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
        else:
            content = answer.choices[0].message.content
        trajectory = server.trajectory("s")
    turn = trajectory.turns[-1]
    sampled = trajectory.nodes[turn.node].token_ids.tolist()
    assert sampled == whole.token_ids[: len(sampled)]
    assert stop in decode(sampled)
    assert stop not in decode(sampled[:-1])
    assert content == whole.message.content.partition(stop)[0]
    assert turn.finish_reason is FinishReason.STOP
    ((tokens,),) = engine.sampled
    assert len(sampled) <= tokens < LONG


# Text that is sent before its end is known.


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_sent_before_the_end_holds_no_beginning_of_a_stop_string_at_its_end(text, stop):
    length = sendable_length(text, stop)
    beginnings = {string[:size] for string in stop for size in range(1, len(string))}
    longest = max((size for size in range(1, len(text) + 1) if text[-size:] in beginnings), default=0)
    assert length == len(text) - longest
