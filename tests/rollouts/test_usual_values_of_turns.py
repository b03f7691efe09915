"""Values of turns in their usual and in unusual forms."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollouts import SamplingParams, StepResult, run_episode
from rollouts.episodes import environment_calls
from rollouts.episodes.errors import EnvironmentProtocolError
from rollouts.testing import ScriptedEngine
from transport import encode

TEXTS = st.one_of(st.text(), st.just("\ud800"))
ROLES = st.sampled_from(["user", "system", "assistant", "tool", "nobody", "\ud800", None, 1])
CONTENTS = st.one_of(TEXTS, st.none(), st.integers(), st.lists(TEXTS, max_size=2))
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.just("user"), "content": CONTENTS}),
    st.fixed_dictionaries({}, optional={"role": ROLES, "content": CONTENTS, "name": CONTENTS}),
    st.integers(),
)


class Text(str):
    __slots__ = ()


def outcome(messages):
    try:
        return environment_calls._checked_messages(messages, "Quiz.step")
    except EnvironmentProtocolError as error:
        return str(error)


@given(st.one_of(st.lists(MESSAGES, max_size=3), st.lists(MESSAGES, max_size=3).map(tuple), st.text(), MESSAGES))
def test_messages_of_an_environment_are_refused_or_can_be_stored(messages):
    checked = outcome(messages)
    if not isinstance(checked, str):
        encode(checked)


def test_messages_with_texts_of_a_subclass_are_refused():
    assert "Quiz.step: messages" in outcome([{"role": "user", "content": Text("Go on.")}])


class Subclassed(StepResult):
    pass


async def test_results_of_a_subclass_and_numpy_booleans_are_played_as_usual_ones(renderer):
    class Steps:
        def reset(self, seed):
            return [{"role": "user", "content": "Begin."}]

        async def step(self, assistant):
            return Subclassed([{"role": "user", "content": "Go on."}], 0.5, np.bool_(False))

    engine = ScriptedEngine(lambda request: "yes", renderer=renderer)
    episode = await run_episode(Steps(), engine=engine, renderer=renderer, sampling=SamplingParams(), max_turns=3)
    assert [turn.reward for turn in episode.turns] == [0.5] * 3
    assert episode.truncated


async def test_sampling_options_that_change_between_turns_reach_the_next_request(renderer):
    sampling, received = SamplingParams(max_tokens=20, extra={"k": 0}), []

    class Recording(ScriptedEngine):
        async def generate(self, request):
            received.append(dict(request.sampling.extra))
            return await super().generate(request)

    class Changing:
        def reset(self, seed):
            return [{"role": "user", "content": "Go"}]

        def step(self, assistant):
            sampling.extra["k"] += 1
            return StepResult([{"role": "user", "content": "Go on"}])

    engine = Recording(["left"] * 3, renderer=renderer)
    await run_episode(Changing(), engine=engine, renderer=renderer, sampling=sampling, max_turns=3)
    assert received == [{"k": 0}, {"k": 1}, {"k": 2}]
