"""The order in which versions of the weights came into use, and the staleness of episodes."""

import logging

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from rollouts import Trajectory, WeightSpan
from rollouts.runner.version_history import VersionHistory, oldest_place, staleness
from rollouts.trajectory.token_node import TokenNode

names = st.lists(st.text("0123456789ab", min_size=1, max_size=3), min_size=1, max_size=8, unique=True)


def node(parent, sampled, *spans):
    """A node of 2 tokens of a prompt, or of `sampled` sampled ones with spans (version, start, end)."""
    count = sampled or 2
    return TokenNode(
        parent=parent,
        token_ids=np.arange(count, dtype=np.int32),
        sampled=np.full(count, bool(sampled)),
        logprobs=np.full(sampled, -1.0, np.float32),
        weight_spans=tuple(WeightSpan(*span) for span in spans),
    )


def history_of(*versions):
    history = VersionHistory(versions[0])
    for version in versions[1:]:
        history.start_using(version)
    return history


def test_a_version_that_the_engine_reports_and_nobody_set_is_the_newest_and_is_logged_once(caplog):
    history = VersionHistory("a", lambda: "b")
    with caplog.at_level(logging.WARNING):
        assert history.current == "b"
        assert [history.place("b"), history.place("b"), history.place("a")] == [1, 1, 0]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_token_without_a_version_counts_as_sampled_when_the_episode_began():
    history = history_of("0", "1", "2")
    unlabelled = Trajectory("e", nodes=[node(-1, 0), node(0, 4)])
    assert oldest_place(unlabelled, history, began=1) == 1
    partly = Trajectory("e", nodes=[node(-1, 0), node(0, 4, ("2", 1, 4))])
    assert oldest_place(partly, history, began=1) == 1
    labelled = Trajectory("e", nodes=[node(-1, 0), node(0, 4, ("2", 0, 4))])
    assert oldest_place(labelled, history, began=1) == 2


@given(names, names)
@example(["1", "0", "00"], ["1", "0"])  # "00" of the earlier process was made after the weights that are loaded again
def test_after_any_earlier_processes_the_last_version_is_the_newest_that_this_process_has_used(earlier, now):
    history = VersionHistory(now[0])
    history.restore(earlier)
    for version in now[1:]:
        history.start_using(version)
    assert history.current == now[-1]
    places = [history.place(version) for version in now]
    assert places == sorted({*places})
    assert set(history.versions) == {*earlier, *now}
    assert history.place(history.current) == history.current_place


def test_tokens_of_an_update_whose_call_has_not_returned_are_the_newest(caplog):
    reported = ["1"]
    history = VersionHistory("1", lambda: reported[0])
    history.expected = "0"  # neither the order of the texts nor of the numbers
    with caplog.at_level(logging.WARNING, "rollouts.runner"):
        early = Trajectory("early", nodes=[node(-1, 2, ("0", 0, 2))])
        place = oldest_place(early, history, history.current_place)
        assert staleness(history, place) == 0
        assert history.current == "1", "the engine still reports it"
        reported[0] = "0"
        history.start_using("0")
        history.expected = ""
    assert history.versions == ("1", "0")
    assert staleness(history, oldest_place(early, history, 0)) == 0
    assert staleness(history, history.place("1")) == 1
    assert not caplog.records
