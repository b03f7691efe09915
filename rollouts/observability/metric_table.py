"""The metrics of a run: name, kind, unit and meaning of each. A key of `RunMetrics.metrics()` is a name of this table.

A metric with a label has one key for each value of it: `episodes_waiting/engine`.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. A "counter" only grows; a "gauge" is a present value; a "histogram" has a count and a sum.

    `unit` is that of the value: "episodes", "seconds", "tokens". `label` names what its values are divided
    by.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    label: str = ""


METRICS = (
    Metric("episodes_started", "counter", "episodes", "attempts at episodes that began"),
    Metric("episodes_ended", "counter", "episodes", "ended attempts: done, truncated, failed, cancelled", "outcome"),
    Metric("episodes_retried", "counter", "episodes", "failed attempts that were repeated"),
    Metric("forks", "counter", "turns", "turns of ended attempts that did not extend the turn before them"),
    Metric("length_stops", "counter", "turns", "cut turns of ended attempts: max_tokens or the context ended them"),
    Metric("episodes_running", "gauge", "episodes", "attempts that began and have not ended"),
    Metric("episodes_waiting", "gauge", "episodes", "attempts by what they wait for, also for a retry", "waiting_for"),
    Metric("longest_wait_seconds", "gauge", "seconds", "how long the episode that waits longest has waited"),
    Metric("episode_seconds", "histogram", "seconds", "duration of an attempt"),
    Metric("turns", "counter", "turns", "finished turns"),
    Metric("turn_seconds", "histogram", "seconds", "time of a turn by part: engine, renderer, environment", "part"),
    Metric("prompt_tokens", "counter", "tokens", "lengths of the prompts of finished turns, each prompt as a whole"),
    Metric("completion_tokens", "counter", "tokens", "sampled tokens of finished turns"),
    Metric("prompt_images", "counter", "items", "images and videos in the prompts of finished turns"),
    Metric("prompt_sounds", "counter", "items", "sounds in the prompts of finished turns"),
    Metric("turns_per_second", "gauge", "turns per second", "over the last 10 to 40 seconds"),
    Metric("completion_tokens_per_second", "gauge", "tokens per second", "over the last 10 to 40 seconds"),
    Metric("groups_finished", "counter", "groups", "groups whose episodes all ended"),
    Metric("groups_delivered", "counter", "groups", "groups that the consumer received"),
    Metric("groups_skipped", "counter", "groups", "finished groups that were not delivered", "reason"),
    Metric("groups_stale", "counter", "groups", "groups older than allowed: drop, downweight", "action"),
    Metric("groups_queued", "gauge", "groups", "finished groups that wait for the consumer"),
    Metric("group_seconds", "histogram", "seconds", "time from the start of a group to its end"),
    Metric("total_reward_mean", "gauge", "reward", "environment reward + group reward, of the last 64 finished groups"),
    Metric("environment_reward_mean", "gauge", "reward", "sum over the turns of an episode, of the same groups"),
    Metric(
        "group_reward_mean", "gauge", "reward", "what the group rewards add, with their weights, of the same groups"
    ),
    Metric("reward_part_mean", "gauge", "reward", "named reward without its weight, of the same groups", "part"),
    Metric("staleness_mean", "gauge", "versions", "mean over the last 64 delivered groups"),
    Metric("staleness_max", "gauge", "versions", "maximum over the last 64 delivered groups"),
    Metric("weight_updates", "counter", "updates", "updates of the engine's weights that succeeded"),
    Metric("weight_update_failures", "counter", "updates", "updates that failed"),
    Metric("weight_update_seconds", "histogram", "seconds", "duration of an update that succeeded"),
    Metric("run_seconds", "gauge", "seconds", "time since these metrics were made"),
    # Of workers in other processes.
    Metric("workers", "gauge", "workers", "workers that are connected"),
    Metric("worker_slots", "gauge", "episodes", "episodes that the workers can run at once"),
    Metric("worker_slots_used", "gauge", "episodes", "episodes that run on workers"),
    Metric("worker_jobs_waiting", "gauge", "episodes", "episodes that wait for a slot of a worker"),
    Metric("worker_jobs_moved", "counter", "episodes", "times that an episode began again because its worker was gone"),
    Metric("workers_lost", "counter", "workers", "workers that ended or could not be reached"),
    # Of the engine and the renderer.
    Metric("engine_requests_running", "gauge", "requests", "requests that the engine generates, of all its clients"),
    Metric("engine_requests_waiting", "gauge", "requests", "requests in the engine's queue"),
    Metric("engine_kv_cache_usage_ratio", "gauge", "ratio", "used part of the engine's KV cache, 0 to 1"),
    Metric("engine_preemptions", "counter", "requests", "running requests that lost their blocks of the KV cache"),
    Metric("engine_prefix_cache_queries", "counter", "tokens", "prompt tokens looked up in the prefix cache"),
    Metric("engine_prefix_cache_hits", "counter", "tokens", "prompt tokens found in the prefix cache"),
    Metric("engine_media_cache_queries", "counter", "items", "source files looked up in the cache of processed media"),
    Metric("engine_media_cache_hits", "counter", "items", "source files found there; vLLM does not count features"),
    Metric("engine_read_errors", "counter", "errors", "failed readings of the engine's metrics"),
    Metric("media_items_sent", "counter", "items", "media items whose data requests carried to the server"),
    Metric("media_items_omitted", "counter", "items", "media items sent by name alone: the server had their data"),
    Metric("media_sent_bytes", "counter", "bytes", "data of media items that requests carried"),
    Metric("media_omitted_bytes", "counter", "bytes", "data of media items that were sent by name alone"),
    Metric("bridges", "counter", "prompts", "prompts that extend the previous prompt and completion"),
    Metric("bridges_refused", "counter", "prompts", "prompts that had to be rendered again, by reason", "reason"),
)
