"""A client that sends back what it got continues the sampled tokens, in each dialect and across them."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
from agents_of_dialects import (
    BODIES,
    DIALECTS,
    PATHS,
    Answer,
    Result,
    User,
    answer_of,
    streamed_answer_of,
)
from gateway_server import IMAGE, OTHER_IMAGE, SteppedEngine, plain_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from transformers import AutoModelForImageTextToText

from renderers import RendererOptions, load_renderer
from rollouts import SamplingParams
from rollouts.engines.local import LocalEngine
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import ScriptedEngine
from rollouts.training import TrainingBatch, mismatch_report, samples_from_trajectory, token_logprobs

SYSTEM = "You look."
TEXTS = st.text(alphabet='ab é🙂\n."\\', min_size=1, max_size=12).filter(str.strip)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["row", "a b", "é"]), st.integers(-9, 9) | st.booleans() | TEXTS, max_size=3
)
PARTS = st.lists(TEXTS | st.sampled_from([IMAGE, OTHER_IMAGE]), min_size=1, max_size=3)


@st.composite
def completions(draw: st.DrawFn) -> str:
    """What the model samples: thinking, text and calls, each or none of them."""
    thinking = draw(st.none() | TEXTS)
    calls = draw(st.lists(ARGUMENTS, max_size=3))
    text = draw(TEXTS if not calls else st.just("") | TEXTS)
    blocks = [json.dumps({"name": "look", "arguments": arguments}, ensure_ascii=False) for arguments in calls]
    thought = "" if thinking is None else f"<think>\n{thinking}\n</think>\n\n"
    return thought + text + "".join(f"\n<tool_call>\n{block}\n</tool_call>" for block in blocks)


@st.composite
def plays(draw: st.DrawFn) -> Any:
    """The completions of a conversation, and for each turn its dialect, whether it streams, and what follows it."""
    script = draw(st.lists(completions(), min_size=2, max_size=4))
    dialect = draw(st.none() | st.sampled_from(DIALECTS))
    turns = [
        (
            draw(st.sampled_from(DIALECTS)) if dialect is None else dialect,
            draw(st.booleans()),
            draw(PARTS),
            draw(st.booleans()),
        )
        for _ in script
    ]
    return script, turns


def play(
    renderer: Any, script: Any, turns: Any, *, is_live: bool = False, by_id: bool = False, engine: Any = None
) -> tuple[Any, Any]:
    """The trajectory of a conversation in one session, and the session's figures.

    `by_id`: after a response, the client of Responses sends what is new alone, and its id.
    """
    engine = engine or (SteppedEngine(script, renderer) if is_live else ScriptedEngine(script, renderer=renderer))

    async def talk() -> Any:
        gateway = Gateway(engine, renderer, sampling=SamplingParams(max_tokens=400, temperature=0.0))
        transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            conversation: list[Any] = [User(["Which?", IMAGE])]
            new: list[Any] = []
            previous = None
            for dialect, stream, parts, is_error in turns:
                named = previous if by_id and dialect == "responses" else None
                body = {**BODIES[dialect](SYSTEM, new if named else conversation), "stream": stream}
                if named:
                    body["previous_response_id"] = named
                response = await client.post(f"/sessions/s/v1/{PATHS[dialect]}", json=body)
                assert response.status_code == 200, response.text
                received = streamed_answer_of(dialect, response.text) if stream else response.json()
                answer = answer_of(dialect, received)
                previous = received["id"] if dialect == "responses" else None
                new = [Result(call.id, parts, is_error) for call in answer.calls] or [User(parts)]
                conversation += [answer, *new]
            figures = (await client.get("/sessions/s")).json()
        trajectory = gateway.trajectory("s")
        await gateway.close()
        return trajectory, figures

    return asyncio.run(talk())


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(plays(), st.booleans(), st.booleans())
def test_a_client_that_sends_back_what_it_got_never_forks_in_any_dialect_or_mix_of_them(
    renderer, drawn, is_live, by_id
):
    script, turns = drawn
    trajectory, figures = play(renderer, script, turns, is_live=is_live, by_id=by_id)
    assert (figures["branches"], figures["forks"], figures["metrics"]) == (1, 0, {})
    chat, _ = play(renderer, script, [("chat", False, *others) for _, _, *others in turns])
    assert plain_tree(trajectory) == plain_tree(chat)


CALL = '\n<tool_call>\n{"name": "look", "arguments": {"row": 1}}\n</tool_call>'


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_thinking_and_parallel_calls_are_continued_in_each_dialect(renderer, dialect, stream, is_live):
    script = [f"<think>\nhm\n</think>\n\nI look.{CALL}{CALL}", f"Again.{CALL}", "Red."]
    turns = [(dialect, stream, ["red", OTHER_IMAGE], False)] * 3
    trajectory, figures = play(renderer, script, turns, is_live=is_live)
    assert (figures["turns"], figures["branches"], figures["forks"]) == (3, 1, 0)
    roles = [message["role"] for message in trajectory.to_messages(trajectory.leaves()[0])]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]


@pytest.mark.slow
def test_what_a_model_samples_in_three_dialects_has_its_log_probabilities(tiny_model_dir):
    model = AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32)
    renderer, engine = load_renderer(tiny_model_dir), LocalEngine(model)
    images = [IMAGE, OTHER_IMAGE, IMAGE]
    turns = [(dialect, True, ["And?", image], False) for dialect, image in zip(DIALECTS, images, strict=True)]
    trajectory, figures = play(renderer, [], turns, engine=engine)
    assert (figures["turns"], figures["branches"]) == (3, 1)
    samples = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    with torch.no_grad():
        report = mismatch_report(batch, token_logprobs(model, batch))
    assert report.tokens == sum(len(trajectory.nodes[turn.node]) for turn in trajectory.turns)
    assert report.max_abs < 1e-5


def changed(answer: Answer, **changes: Any) -> Answer:
    """An answer that a client has changed, in a form that it did not receive."""
    return answer._replace(dialect="changed", **changes)


def other(role: str) -> str:
    return f"the first other message has the role {role}"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda system, talk: (system, talk), None),
        (lambda system, talk: (system, [talk[0], changed(talk[1], thinking=""), *talk[2:]]), None),
        (lambda system, talk: (f"{system} Today.", talk), other("system")),
        (lambda system, talk: (system, [User(["Summary."]), User(["Go on."])]), other("user")),
        (
            lambda system, talk: (system, [talk[0], changed(talk[1], text="No."), *talk[2:]]),
            other("assistant"),
        ),
        (
            lambda system, talk: (system, [talk[0], changed(talk[1], thinking="Else."), *talk[2:]]),
            "other reasoning or ids of calls",
        ),
        (lambda system, talk: ("", talk), other("user")),
        (lambda system, talk: (system, talk[:1]), "no new message"),
    ],
)
async def test_what_a_client_changed_is_the_named_reason_of_a_fork(renderer, dialect, change, reason):
    figures = await figures_after(
        renderer, dialect, lambda answer: change(SYSTEM, [User(["Which?"]), answer, User(["And now?"])])
    )
    expected = {f"forks/{reason}": 1 for reason in filter(None, [reason])}
    assert (figures["metrics"], figures["forks"]) == (expected, len(expected))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda talk: [*talk[:2], User(["B!"]), *talk[3:]], other("user")),
        (lambda talk: [*talk[:3], changed(talk[3], text="TWO"), *talk[4:]], other("assistant")),
        (lambda talk: [*talk[:2], *talk[4:]], other("user")),
        (lambda talk: talk[:3], "no new message"),
        (lambda talk: [*talk[:2], User(["Else?"])], "an earlier turn is continued"),
    ],
)
async def test_an_edit_behind_recorded_turns_is_named_as_one_of_the_first_turn_is(renderer, dialect, edit, reason):
    engine = ScriptedEngine(["One.", "Two.", "Three.", "Four."], renderer=renderer)
    gateway = Gateway(engine, renderer, sampling=SamplingParams(max_tokens=40, temperature=0.0))
    transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

        async def answered(talk):
            response = await client.post(f"/sessions/s/v1/{PATHS[dialect]}", json=BODIES[dialect](SYSTEM, talk))
            assert response.status_code == 200, response.text
            return answer_of(dialect, response.json())

        talk = [User(["A"])]
        for text in ("B", "C", "D"):
            talk += [await answered(talk), User([text])]
        await answered(edit(talk))
        figures = (await client.get("/sessions/s")).json()
    await gateway.close()
    assert figures["metrics"] == {f"forks/{reason}": 1}


FORGETFUL = RendererOptions(
    thinking_retention="template",
    chat_template="""{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.reasoning_content and loop.last -%}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}""",
)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_reason_for_which_a_bridge_is_refused_is_that_of_the_fork(tiny_model_dir, dialect):
    renderer = load_renderer(tiny_model_dir, config=FORGETFUL)
    figures = await figures_after(
        renderer, dialect, lambda answer: (SYSTEM, [User(["Which?"]), answer, User(["Now?"])])
    )
    ((reason, count),) = figures["metrics"].items()
    assert (count, reason.startswith("forks/the bridge was refused: the template drops earlier reasoning here")) == (
        1,
        True,
    )


class SmallContext(ScriptedEngine):
    """Its context has room for two tokens of a completion."""

    async def generate(self, request, listen=None):
        most = min(request.sampling.max_tokens, 2)
        return await super().generate(replace(request, sampling=replace(request.sampling, max_tokens=most)))


async def test_completions_that_the_context_ends_are_counted_and_have_the_stop_reason_of_messages(renderer):
    gateway = Gateway(SmallContext(lambda request: "Red.", renderer=renderer), renderer)
    transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        body = {"messages": [{"role": "user", "content": "Which?"}]}
        answers = [
            (await client.post(f"/sessions/s/v1/{path}", json={**body, "max_tokens": most})).json()
            for path in ("messages", "chat/completions")
            for most in (2, 200_000)
        ]
        figures = (await client.get("/sessions/s")).json()
    await gateway.close()
    assert [answer["stop_reason"] for answer in answers[:2]] == ["max_tokens", "model_context_window_exceeded"]
    assert [answer["choices"][0]["finish_reason"] for answer in answers[2:]] == ["length"] * 2
    assert figures["metrics"] == {"completions_ended_by_context": 2, "forks/no new message": 3}


async def figures_after(renderer, dialect, second):
    """The figures of a session of two turns; `second(answer)` gives the system text and the talk of the second one."""
    engine = ScriptedEngine(["<think>\nhm\n</think>\n\nRed.", "Blue."], renderer=renderer)
    gateway = Gateway(engine, renderer)
    transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        path = f"/sessions/s/v1/{PATHS[dialect]}"
        response = await client.post(path, json=BODIES[dialect](SYSTEM, [User(["Which?"])]))
        body = BODIES[dialect](*second(answer_of(dialect, response.json())))
        assert (await client.post(path, json=body)).status_code == 200
        figures = (await client.get("/sessions/s")).json()
    await gateway.close()
    return figures


IN_PIECES: dict[str, Any] = {
    "chat": {"role": "assistant", "content": [{"type": "text", "text": "Re"}, {"type": "text", "text": "d."}]},
    "messages": [
        {"type": "text", "text": "Re"},
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "d."},
    ],
    "responses": [
        {"role": "assistant", "content": "Re"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "m"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "d."}]},
    ],
}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_answer_that_is_sent_back_in_pieces_is_continued(renderer, dialect):
    pieces = Answer(dialect, IN_PIECES[dialect], "", "", [])
    figures = await figures_after(
        renderer, dialect, lambda answer: (SYSTEM, [User(["Which?"]), pieces, User(["And now?"])])
    )
    assert (figures["turns"], figures["forks"]) == (2, 0)


async def test_other_tools_an_earlier_turn_and_another_choice_are_reasons_of_forks(renderer):
    gateway = Gateway(ScriptedEngine(lambda request: "Red.", renderer=renderer), renderer)
    transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        url = "/sessions/s/v1/chat/completions"
        talk = [User(["Which?"])]
        body = BODIES["chat"](SYSTEM, talk)
        first = await client.post(url, json=body)
        talk += [answer_of("chat", first.json()), User(["And now?"])]
        for again in (0, 1):
            await client.post(url, json=BODIES["chat"](SYSTEM, [*talk[:2], User([f"Which {again}?"])]))
        await client.post(url, json={**body, "tools": []})
        await client.post(url, json={**body, "tools": [], "n": 2})
        figures = (await client.get("/sessions/s")).json()
    await gateway.close()
    reasons = ["an earlier turn is continued", "other tools", "no new message", "another choice"]
    assert (figures["metrics"], figures["forks"]) == ({f"forks/{reason}": 1 for reason in reasons}, 4)
