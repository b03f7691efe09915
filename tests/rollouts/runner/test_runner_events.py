"""The events of a run: what a listener receives, in which order, and that the counts agree with them."""

from collections import Counter

from runner_world import Counting, run_groups, tasks

from rollouts.runner.events import (
    EpisodeEnded,
    EpisodeStarted,
    EpisodeWaiting,
    GroupDelivered,
    GroupFinished,
    TurnFinished,
)
from rollouts.testing import ScriptedEngine


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


def test_counts_and_events_agree_when_episodes_fail(renderer):
    class FailsForOddTasks(Counting):
        def step(self, assistant):
            if self.task.data % 2:
                raise KeyError("odd")
            return super().step(assistant)

    events = []
    engine = ScriptedEngine(lambda request: "yes", renderer=renderer)
    groups, runner = run_groups(
        renderer, tasks(4), FailsForOddTasks, engine=engine, group_size=2, listeners=[events.append]
    )
    counts, metrics = Counter(type(event).__name__ for event in events), runner.metrics()
    assert counts["EpisodeStarted"] == metrics["episodes_started"] == 8
    # Of the failed episodes too, whose turn is in their trajectory.
    turns = [(event.failed, event.turn) for event in events if isinstance(event, TurnFinished)]
    assert Counter(turns) == {(False, 0): 4, (False, 1): 4, (True, 0): 4}
    assert metrics["turns"] == 12
    assert counts["GroupFinished"] == metrics["groups_finished"] == metrics["groups_delivered"] == 4
    assert (metrics["episodes_ended/done"], metrics["episodes_ended/failed"]) == (4, 4)
    recorded = sum(len(node.logprobs) for group in groups.values() for e in group.episodes for node in e.nodes)
    sampled = sum(event.completion_tokens for event in events if isinstance(event, TurnFinished))
    assert sampled == recorded == metrics["completion_tokens"]
    assert sum(len(event.total_rewards) for event in events if isinstance(event, GroupFinished)) == 8
