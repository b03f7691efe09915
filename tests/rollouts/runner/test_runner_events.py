"""The events of a run: what a listener receives, in which order, and that the counts agree with them."""

from runner_world import run_groups, tasks

from rollouts.runner.events import (
    EpisodeEnded,
    EpisodeStarted,
    EpisodeWaiting,
    GroupDelivered,
    TurnFinished,
)


def test_an_episode_reports_its_parts_and_turns_in_their_order(renderer):
    events = []
    groups, _ = run_groups(renderer, tasks(1), listeners=[events.append])
    (episode,) = groups["t0"].episodes
    names = [event.waiting_for if isinstance(event, EpisodeWaiting) else type(event).__name__ for event in events]
    turn = ["engine", "renderer", "environment.step", "TurnFinished"]
    assert names == [
        "EpisodeStarted",
        "environment.make",
        "environment.reset",
        "renderer",
        *turn,
        "renderer",
        *turn,
        "EpisodeEnded",
        "GroupFinished",
        "GroupDelivered",
    ]
    assert events[0] == EpisodeStarted("t0/0.0", "t0", 0, 0)
    turns = [event for event in events if isinstance(event, TurnFinished)]
    assert [event.turn for event in turns] == [0, 1]
    paths = [episode.token_ids(turn.node) for turn in episode.turns]
    assert [event.prompt_tokens + event.completion_tokens for event in turns] == [len(path) for path in paths]
    assert all(event.renderer_seconds > 0 and event.engine_seconds > 0 for event in turns)
    (ended,) = [event for event in events if isinstance(event, EpisodeEnded)]
    assert (ended.outcome, ended.environment_reward, ended.error) == ("done", 2.0, "")
    (delivered,) = [event for event in events if isinstance(event, GroupDelivered)]
    assert delivered == GroupDelivered("t0", 0)
