"""Live progress of a run on a terminal, lines of text elsewhere."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rollouts.observability.engine_load import PeriodicThread
from rollouts.observability.run_metrics import RunMetrics
from rollouts.terminal.text import printable_line
from rollouts.values import check_positive

Values = Mapping[str, float]


class ProgressDisplay:
    """Shows the metrics of a run: on a terminal a few lines that are updated four times a second, elsewhere
    one line of text every `seconds` and one at the end.

        metrics = RunMetrics(sources=[RendererStats(renderer)])
        with ProgressDisplay(metrics, total_groups=1000):
            async with Runner(..., listeners=[metrics]) as runner:
                ...

    A thread writes, at this rate however many episodes run. `total_groups` is the number of tasks, if it is
    known. `console` is that of standard output unless given. Raises `ArgumentError` for `seconds` that are
    not above 0.
    """

    def __init__(
        self,
        metrics: RunMetrics,
        *,
        total_groups: int | None = None,
        console: Console | None = None,
        seconds: float = 10.0,
    ) -> None:
        number = check_positive("seconds", seconds, "pass a number of seconds above 0")
        self._metrics = metrics
        self._total_groups = total_groups
        self._console = console or Console()
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._rows_as_text)
            self._thread = PeriodicThread(self._live.refresh, 0.25, "rollouts-progress")
        else:
            self._thread = PeriodicThread(self._print_line, number, "rollouts-progress")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.stop()
        with suppress(OSError):  # nobody reads the output any more, or the terminal is closed; the run goes on
            if self._live is not None:
                self._live.refresh()
                self._live.stop()
            else:
                self._print_line()

    def line(self) -> str:
        """The present state on one line, without colours."""
        return "; ".join(
            f"{label} {text}" for label, text in progress_rows(self._metrics.metrics(), self._total_groups)
        )

    def _print_line(self) -> None:
        # Not through the console: rich exits the process where nobody reads the output any more.
        self._console.file.write(f"{self.line()}\n")
        self._console.file.flush()

    def _rows_as_text(self) -> Group:
        rows = progress_rows(self._metrics.metrics(), self._total_groups)
        lines = [Text(f"{label:<10}", "bold").append(Text(text, "default")) for label, text in rows]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)


def progress_rows(values: Values, total_groups: int | None = None) -> Iterator[tuple[str, str]]:
    """(label, text) of each row for metrics of `RunMetrics.metrics()`; rows about what does not occur are left out."""
    total = "" if total_groups is None else f" of {total_groups:,}"
    seconds = int(values.get("run_seconds", 0))
    yield "time", f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    yield (
        "groups",
        _joined(
            f"{_count(values, 'groups_finished')}{total} finished",
            f"{_count(values, 'groups_queued')} queued",
            f"{_count(values, 'groups_delivered')} delivered",
            *_nonzero(values, groups_skipped="skipped", groups_stale="stale"),
        ),
    )
    yield (
        "episodes",
        _joined(
            f"{_count(values, 'episodes_running')} running",
            *(f"{_number(count)} {outcome}" for outcome, count in _labelled(values, "episodes_ended")),
            *_nonzero(values, episodes_retried="retried"),
        ),
    )
    if waits := _labelled(values, "episodes_waiting"):
        counts = (f"{_number(count)} {what}" for what, count in waits)
        yield "waiting", _joined(*counts, f"longest {values.get('longest_wait_seconds', 0.0):.0f} s")
    yield (
        "turns",
        _joined(
            _count(values, "turns"),
            f"{values.get('turns_per_second', 0.0):,.1f}/s",
            f"{values.get('completion_tokens_per_second', 0.0):,.0f} tokens/s",
            *_nonzero(values, length_stops="cut at max_tokens"),
        ),
    )
    if "total_reward_mean" in values:
        names = ("total", "environment", "group") if values.get("group_reward_mean") else ("total",)
        sums = (f"{name} {values[key]:.3f}" for name in names if (key := f"{name}_reward_mean") in values)
        parts = (f"{name} {value:.3f}" for name, value in _labelled(values, "reward_part_mean"))
        yield "reward", _joined(*sums, *parts)
    if "staleness_mean" in values:
        yield "staleness", f"{values['staleness_mean']:.2f}, at most {values['staleness_max']:.0f}"
    if engine := _engine_texts(values):
        yield "engine", _joined(*engine)
    if prompts := _prompt_texts(values):
        yield "prompts", _joined(*prompts)
    if weights := _nonzero(values, weight_updates="updates", weight_update_failures="failed"):
        yield "weights", _joined(*weights)


def _engine_texts(values: Values) -> list[str]:
    texts = []
    if "engine_requests_running" in values:
        texts.append(f"{_count(values, 'engine_requests_running')} running")
        texts.append(f"{_count(values, 'engine_requests_waiting')} queued")
    if "engine_kv_cache_usage_ratio" in values:
        texts.append(f"KV cache {values['engine_kv_cache_usage_ratio']:.0%}")
    for name, hits, queries in (
        ("prefix", "engine_prefix_cache_hits", "engine_prefix_cache_queries"),
        ("media", "engine_media_cache_hits", "engine_media_cache_queries"),
    ):
        if values.get(queries):
            texts.append(f"{name} cache hits {values.get(hits, 0.0) / values[queries]:.0%}")
    if values.get("engine_read_errors") and "engine_requests_running" not in values:
        texts.append("its metrics cannot be read")
    return texts


def _prompt_texts(values: Values) -> list[str]:
    texts = []
    sent, omitted = values.get("media_items_sent", 0), values.get("media_items_omitted", 0)
    if sent + omitted:
        texts.append(f"media sent by name {omitted / (sent + omitted):.0%}")
    refused = sum(count for _, count in _labelled(values, "bridges_refused"))
    if refused or values.get("bridges"):
        texts.append(f"bridged {values.get('bridges', 0) / (values.get('bridges', 0) + refused):.0%}")
    return texts


def _joined(*texts: str) -> str:
    return ", ".join(map(printable_line, texts))


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _count(values: Values, key: str) -> str:
    return _number(values.get(key, 0))


def _labelled(values: Values, name: str) -> list[tuple[str, float]]:
    """(label, value) of the keys of a metric with a label, sorted."""
    return sorted((key.partition("/")[2], value) for key, value in values.items() if key.partition("/")[0] == name)


def _nonzero(values: Values, **nouns: str) -> list[str]:
    """Number and noun of each metric that is not 0; the values of one with a label are added up."""
    totals = {
        name: values.get(name, 0) + sum(value for label, value in _labelled(values, name) if label) for name in nouns
    }
    return [f"{_number(total)} {nouns[name]}" for name, total in totals.items() if total]
