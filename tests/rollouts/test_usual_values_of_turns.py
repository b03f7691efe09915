"""Values of turns in their usual and in unusual forms."""

from hypothesis import given
from hypothesis import strategies as st

from rollouts.episodes import environment_calls
from rollouts.episodes.errors import EnvironmentProtocolError
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
