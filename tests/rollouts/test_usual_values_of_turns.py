"""The short ways of usual values in a turn agree with the general ones."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers import MultiModalData, RenderedTokens
from rollouts import GenerateRequest, SamplingParams, StepResult, run_episode
from rollouts.engines.protocol import request_of_checked, sampling_of_request
from rollouts.episodes import environment_calls
from rollouts.episodes.errors import EnvironmentProtocolError
from rollouts.testing import ScriptedEngine

TEXTS = st.one_of(st.text(), st.just("\ud800"))
ROLES = st.sampled_from(["user", "system", "assistant", "tool", "nobody", "\ud800", None, 1])
CONTENTS = st.one_of(TEXTS, st.none(), st.integers(), st.lists(TEXTS, max_size=2))
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.just("user"), "content": CONTENTS}),
    st.fixed_dictionaries({}, optional={"role": ROLES, "content": CONTENTS, "name": CONTENTS}),
    st.integers(),
)


class Quiz:
    pass


class Text(str):
    __slots__ = ()


def outcome(messages):
    try:
        return environment_calls._checked_messages(messages, Quiz(), "step")
    except EnvironmentProtocolError as error:
        return str(error)


@given(st.one_of(st.lists(MESSAGES, max_size=3), st.lists(MESSAGES, max_size=3).map(tuple), st.text(), MESSAGES))
def test_messages_in_the_usual_form_get_the_outcome_of_the_whole_check(messages):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment_calls, "_is_text_of_user", lambda message: False)
        whole = outcome(messages) if messages else []
    if messages:
        assert outcome(messages) == whole


def test_the_list_of_an_environment_is_copied():
    own = [{"role": "user", "content": "Go on."}]
    checked = outcome(own)
    assert checked == own
    assert checked is not own


def test_texts_of_a_subclass_get_the_whole_check():
    """They are refused where they are stored, as before."""
    assert "Quiz.step: messages" in outcome([{"role": "user", "content": Text("Go on.")}])


@pytest.mark.parametrize("extra", [{}, {"min_p": 0.1}])
def test_the_parameters_of_a_request_are_those_that_dataclasses_replace_makes(extra):
    given = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.25, top_k=3, n=1, stop_token_ids=(4,), extra=extra)
    made = sampling_of_request(given, 5, 7)
    assert made == dataclasses.replace(given, max_tokens=5, seed=7)
    assert made.extra is not given.extra


def test_parameters_of_a_subclass_keep_their_class():
    class Own(SamplingParams):
        pass

    assert type(sampling_of_request(Own(), 5, None)) is Own


@pytest.mark.parametrize("media", [None, MultiModalData()])
def test_the_request_for_a_checked_prompt_is_the_one_that_the_class_makes(media):
    rendered = RenderedTokens([1, 2, 3], multi_modal_data=media, placeholder_token_ids={"image": 2})
    sampling = SamplingParams()
    assert request_of_checked(rendered, sampling, [(0, 1)], "episode", "episode-0") == GenerateRequest(
        [1, 2, 3],
        sampling,
        media,
        "episode",
        "episode-0",
        placeholder_token_ids={"image": 2},
        sampled=[(0, 1)],
    )


class Subclassed(StepResult):
    """A result whose values are those of the general way."""


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
