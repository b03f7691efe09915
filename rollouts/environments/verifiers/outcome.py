"""What verifiers says of a rollout, as rewards, metrics and state of its trajectory."""

from __future__ import annotations

from verifiers.v1.trace import Trace

from rollouts.trajectory.tree import Trajectory
from rollouts.values import finite_number

_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
# Of a trace only this is converted to plain values.
_OUTCOME = {
    "task": {"key": True, "data": {"idx"}},
    "agent": {"name", "trainable"},
    **dict.fromkeys(("rewards", "metrics", "ok", "errors", "stop_condition", "calls", "timing"), True),
}


def record_outcome(trajectory: Trajectory, trace: Trace) -> None:
    """Record what verifiers' scoring and stages said of a rollout.

    The sum of the weighted rewards is recorded on the last turn, whose info has `rewards` (each with score
    and weight), `stop_condition`, `agent` and `task`.
    """
    record = trace.model_dump(mode="json", include=_OUTCOME)
    rewards = {name: reward for name, reward in (record.get("rewards") or {}).items() if reward is not None}
    agent, task = record.get("agent") or {}, record.get("task") or {}
    info = {
        "rewards": {name: {"score": each["score"], "weight": each["weight"]} for name, each in rewards.items()},
        "stop_condition": record.get("stop_condition"),
        "agent": {"name": agent.get("name"), "trainable": agent.get("trainable", True)},
        "task": {"index": (task.get("data") or {}).get("idx"), "key": task.get("key")},
    }
    if trajectory.turns:
        trajectory.record_reward(sum(each["score"] * each["weight"] for each in rewards.values()), info)
    values = {name: finite_number(value) for name, value in (record.get("metrics") or {}).items()}
    trajectory.metrics |= {name: value for name, value in values.items() if value is not None}
    errors = record.get("errors") or ()
    if not record.get("ok"):
        trajectory.error = f"{errors[-1]['type']}: {errors[-1]['message']}" if errors else "the rollout did not end"
    answered = [call for call in record.get("calls") or () if not call.get("error")]
    cut_off = bool(answered) and answered[-1].get("finish_reason") == "length"
    trajectory.truncated = record.get("stop_condition") in _LIMITS or cut_off
    trajectory.done = bool(record.get("ok")) and not trajectory.truncated
    timing = record.get("timing") or {}
    trajectory.started_at = finite_number(timing.get("start")) or 0.0
    ends = [finite_number((timing.get(stage) or {}).get("end")) or 0.0 for stage in ("agent", "finalize", "scoring")]
    trajectory.seconds = max(max(ends) - trajectory.started_at, 0.0)
