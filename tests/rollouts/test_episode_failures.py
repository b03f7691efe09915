"""Whatever an environment, an engine or a renderer does, an episode ends with its completed turns and can be stored."""

import asyncio
from dataclasses import replace

import misbehaviour as wrong
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from misbehaviour import ASKED, GOOD, Talkative, named
from scripted_chat import ScriptedChat

from rollouts import GenerateResult, SamplingParams, ThreadedEnvironment, run_episode
from rollouts.engines.protocol import Engine
from rollouts.episodes.errors import EnvironmentFailedError, EpisodeError
from rollouts.errors import ArgumentError, EngineFailedError, RolloutsError
from rollouts.testing import ScriptedEngine
from rollouts.trajectory.packed_episodes import pack_episodes
from transport import decode, encode


def failure_of(environment, engine, renderer, **options):
    """The error that the episode ends in, its trajectory checked."""
    options = {"sampling": SamplingParams(), "max_turns": 4, **options}
    ended = []
    with pytest.raises(EpisodeError) as caught:
        asyncio.run(run_episode(environment, engine=engine, renderer=renderer, on_end=ended.append, **options))
    trajectory = caught.value.trajectory
    assert ended == [trajectory]
    assert trajectory.finished
    assert trajectory.error
    assert not trajectory.done
    assert str(caught.value).encode()
    stored = decode(encode(pack_episodes([trajectory], pixels="source"))).episodes[0]
    assert stored.num_turns == trajectory.num_turns
    assert stored.error == trajectory.error
    return caught.value


def scripted(renderer):
    return ScriptedEngine(["a", "b", "c"], renderer=renderer)


# Environments.


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in wrong.WRONG_FIELDS.items() for value in values],
    ids=[f"{field}-{name}" for field, values in wrong.WRONG_FIELDS.items() for name in named(values)],
)
def test_a_field_of_a_step_that_is_not_what_it_has_to_be(renderer, field, value):
    class Odd(Talkative):
        def step(self, assistant):
            result = super().step(assistant)
            return replace(result, **{field: value}) if self.turns == 2 else result

    error = failure_of(Odd(), scripted(renderer), renderer)
    if field in ("reward", "info") and not isinstance(error.__cause__, KeyError | OSError):  # which the value raised
        assert f"the {field} of turn 1" in str(error)
    # Messages whose form is right are only known to be wrong when they are rendered: the turn is paid then.
    assert [turn.reward for turn in error.trajectory.turns] in ([0.25, 0.0], [0.25, 0.25])


@pytest.mark.parametrize("value", wrong.WRONG_STEPS, ids=named(wrong.WRONG_STEPS))
@pytest.mark.parametrize("wrapped", [False, True], ids=["on the loop", "in a thread"])
def test_a_step_that_returns_something_else(renderer, value, wrapped):
    class Odd(Talkative):
        def step(self, assistant):
            result = super().step(assistant)
            return value if self.turns == 2 else result

    error = failure_of(ThreadedEnvironment(Odd()) if wrapped else Odd(), scripted(renderer), renderer)
    assert [turn.reward for turn in error.trajectory.turns] == [0.25, 0.0]


@pytest.mark.parametrize("value", wrong.WRONG_RESETS, ids=named(wrong.WRONG_RESETS))
def test_a_reset_that_returns_something_else(renderer, value):
    class Odd(Talkative):
        def reset(self, seed):
            return value

    assert failure_of(Odd(), scripted(renderer), renderer).trajectory.num_turns == 0


@pytest.mark.parametrize("kind", ["on the loop", "async", "in a thread"])
@pytest.mark.parametrize("raised", wrong.EXCEPTIONS, ids=named(wrong.EXCEPTIONS))
def test_a_step_that_raises(renderer, raised, kind):
    class Raising(Talkative):
        def step(self, assistant):
            result = super().step(assistant)
            if self.turns == 2:
                raise raised
            return result

    class RaisingLater(Raising):
        async def step(self, assistant):
            await asyncio.sleep(0)
            if isinstance(raised, StopIteration) and self.turns == 1:
                raise RuntimeError("Python turns a StopIteration of a coroutine into this")
            return Raising.step(self, assistant)

    environment = {
        "on the loop": Raising,
        "async": RaisingLater,
        "in a thread": lambda: ThreadedEnvironment(Raising()),
    }[kind]()
    error = failure_of(environment, scripted(renderer), renderer)
    assert error.trajectory.num_turns == 2
    assert isinstance(error.__cause__, EnvironmentFailedError)
    assert "step raised" in str(error)


@pytest.mark.parametrize("wrapped", [False, True], ids=["on the loop", "in a thread"])
@pytest.mark.parametrize(
    "raised", [OSError("x"), AttributeError("inner"), wrong.UnprintableError()], ids=lambda error: type(error).__name__
)
def test_a_tools_property_that_raises_is_not_taken_for_having_none(renderer, raised, wrapped):
    class Raising(Talkative):
        @property
        def tools(self):
            raise raised

    environment = ThreadedEnvironment(Raising()) if wrapped else Raising()
    assert f"tools raised {type(raised).__name__}" in str(failure_of(environment, scripted(renderer), renderer))


@pytest.mark.parametrize("value", wrong.WRONG_TOOLS, ids=named(wrong.WRONG_TOOLS))
def test_tools_that_are_none(renderer, value):
    environment = Talkative()
    environment.tools = value
    assert failure_of(environment, scripted(renderer), renderer).trajectory.num_turns == 0


# Engines.


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in wrong.WRONG_COMPLETIONS.items() for value in values],
    ids=[f"{field}-{name}" for field, values in wrong.WRONG_COMPLETIONS.items() for name in named(values)],
)
def test_a_completion_that_is_not_what_it_has_to_be(renderer, field, value):
    engine = wrong.ReturningEngine(renderer, GenerateResult("r", [replace(GOOD, **{field: value})]))
    error = failure_of(Talkative(), engine, renderer)
    assert [turn.reward for turn in error.trajectory.turns] == [0.25]
    assert isinstance(error.__cause__, RolloutsError), "an error of ours, and not what it stumbled over"


def test_the_good_completion_passes(renderer):
    """Planted: without it, the table above could fail for reasons of its own."""
    slack = replace(GOOD, logprobs=np.array([5e-5, -1, -2], np.float32))
    for completion in (GOOD, slack):
        engine = wrong.ReturningEngine(renderer, GenerateResult("r", [completion]))
        trajectory = asyncio.run(
            run_episode(Talkative(), engine=engine, renderer=renderer, sampling=SamplingParams(), max_turns=4)
        )
        assert (trajectory.num_turns, trajectory.done) == (3, True)


@pytest.mark.parametrize("value", wrong.WRONG_RESULTS, ids=named(wrong.WRONG_RESULTS))
def test_an_engine_that_returns_something_else(renderer, value):
    error = failure_of(Talkative(), wrong.ReturningEngine(renderer, value), renderer)
    assert error.trajectory.num_turns == 1
    assert isinstance(value, GenerateResult) or "not a GenerateResult" in str(error)


@pytest.mark.parametrize("raised", wrong.ENGINE_EXCEPTIONS, ids=named(wrong.ENGINE_EXCEPTIONS))
def test_an_engine_that_raises(renderer, raised):
    error = failure_of(Talkative(), wrong.RaisingEngine(renderer, raised), renderer)
    assert [turn.reward for turn in error.trajectory.turns] == [0.25]


def test_an_engine_that_raises_when_it_is_asked_for_its_context(renderer):
    class Asked(wrong.ReturningEngine):
        async def context_length(self):
            raise ZeroDivisionError("by zero")

    error = failure_of(Talkative(), Asked(renderer, None), renderer)
    assert isinstance(error.__cause__, EngineFailedError)
    assert "Asked raised ZeroDivisionError: by zero" in str(error)


def test_an_engine_of_a_user_needs_no_parameter_for_streams(renderer):
    class Old(Engine):
        async def generate(self, request):
            return GenerateResult(request.request_id, [GOOD])

        async def close(self): ...

    episode = run_episode(
        Talkative(), engine=Old(), renderer=renderer, sampling=SamplingParams(max_tokens=8), max_turns=1
    )
    assert asyncio.run(episode).num_turns == 1


def test_an_id_past_the_vocabulary_that_an_engine_states_is_refused(renderer):
    class Stating(wrong.ReturningEngine):
        vocab_size = 280

    past = replace(GOOD, token_ids=np.array([40, 41, 280]))
    error = failure_of(Talkative(), Stating(renderer, GenerateResult("r", [past])), renderer)
    assert "token 2 has id 280; ids run from 0 to 279" in str(error)


# Renderers.


@pytest.mark.parametrize("method", ["render", "parse_response", "bridge_to_next_turn", "get_stop_token_ids"])
@pytest.mark.parametrize(
    "raised",
    [ValueError("x"), wrong.UnprintableError(), StopIteration(), KeyError("\ud800"), wrong.PanicError("x")],
    ids=lambda error: type(error).__name__,
)
def test_a_renderer_that_raises_something_of_its_own(renderer, monkeypatch, method, raised):
    def fail(*args, **kwargs):
        raise raised

    engine = scripted(renderer)
    engine._renderer = None
    engine._script = iter([[40], [41], [42]])
    monkeypatch.setitem(vars(renderer), method, fail)
    error = failure_of(Talkative(), engine, renderer)
    assert f"TemplateRenderer.{method} raised" in str(error)
    assert error.trajectory.num_turns == (method == "bridge_to_next_turn")


# Arguments.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampling": SamplingParams(n=3)}, "sampling.n is 3"),
        ({"sampling": None}, "sampling is None"),
        ({"max_turns": True}, "max_turns is True"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"on_end": 5}, "on_end is 5"),
        ({"engine": "http://x"}, "engine is 'http://x'; pass an engine, such as"),
        ({"engine": ScriptedEngine}, "engine is <class"),
        ({"renderer": "directory"}, "renderer is 'directory'; pass a renderer"),
        ({"engine": ScriptedChat("a")}, "renderer is .*; pass None: a chat endpoint renders the messages itself"),
        ({"environment": None}, "environment is None; pass an instance of a class that has reset and step"),
        ({"environment": Talkative}, "environment is <class .*Talkative'>; pass an instance"),
    ],
)
def test_arguments_that_no_episode_can_be_played_with(renderer, options, words):
    engine = scripted(renderer)
    arguments = {"environment": Talkative(), "engine": engine, "renderer": renderer, "max_turns": 4}
    with pytest.raises(ArgumentError, match=f"^{words}"):
        asyncio.run(run_episode(**{**arguments, "sampling": SamplingParams(), **options}))
    assert engine.requests == []


# Anything at all.

PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(st.characters(codec=None), max_size=5),
        st.binary(max_size=5),
        st.complex_numbers(),
        st.just(object()),
        st.just(ASKED),
        st.builds(np.float32, st.floats(width=32)),
        st.builds(np.array, st.lists(st.integers(0, 5), max_size=3)),
    ),
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.tuples(parts, parts),
        st.dictionaries(st.one_of(st.text(max_size=3), st.tuples(st.integers())), parts, max_size=3),
        st.builds(lambda content: [{"role": "user", "content": content}], parts),
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("messages", "reward", "done", "info"), PLAIN)))
def test_whatever_a_step_holds_the_first_turn_is_kept_and_can_be_stored(renderer, fields):
    class Anything(Talkative):
        def step(self, assistant):
            return replace(super().step(assistant), **fields)

    options = {"engine": scripted(renderer), "renderer": renderer, "sampling": SamplingParams(), "max_turns": 3}
    try:
        trajectory = asyncio.run(run_episode(Anything(), **options))
    except EpisodeError as error:
        trajectory = error.trajectory
        assert trajectory.num_turns >= 1
    assert trajectory.finished
    decode(encode([trajectory]))
