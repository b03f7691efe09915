"""The mismatch: the difference between the sampler's and the trainer's log-probabilities of the sampled tokens."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from rollouts.errors import ArgumentError, MismatchError, MissingExtraError
from rollouts.training.mismatch.compared import ComparedTokens, compare_tokens, concat_tokens
from rollouts.values import check_choice, check_positive
from transport import wire_type

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes

    from rollouts.training.batch import TrainingBatch


class DifferenceStatistics(NamedTuple):
    """Figures of d = log p(trainer) - log p(sampler) over `tokens` sampled tokens, in nats.

    `mean_abs` and `max_abs` are of |d|. `k1`, the mean of -d, and `k3`, the mean of exp(d) - 1 - d, estimate
    KL(sampler || trainer) from tokens that the sampler drew: both without bias, k3 is never negative and varies less
    (Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html).
    """

    tokens: int = 0
    mean_abs: float = 0.0
    max_abs: float = 0.0
    k1: float = 0.0
    k3: float = 0.0


class MismatchGroup(NamedTuple):
    """The statistics of the tokens that `label` names."""

    label: str
    statistics: DifferenceStatistics


def difference_statistics(difference: np.ndarray) -> DifferenceStatistics:
    """The figures of `difference`, trainer - sampler, float64 (n,); all 0 for no tokens."""
    if not len(difference):
        return DifferenceStatistics()
    absolute = np.abs(difference)
    with np.errstate(over="ignore", invalid="ignore"):
        k1 = -difference.mean()
        k3 = np.expm1(difference) - difference
    return DifferenceStatistics(
        tokens=len(difference),
        mean_abs=float(absolute.mean()),
        max_abs=float(absolute.max()),
        k1=float(k1) + 0.0,  # + 0.0: never -0.0
        k3=float(np.where(np.isnan(k3), np.inf, k3).mean()),
    )


def _groups(tokens: ComparedTokens, number: np.ndarray, labels: Sequence[str]) -> tuple[MismatchGroup, ...]:
    """One group for each label with tokens; `number` (n,) is the index of each token's label, -1 for none."""
    order = np.argsort(number, kind="stable")
    difference = tokens.difference[order]
    bounds = np.searchsorted(number[order], np.arange(len(labels) + 1))
    return tuple(
        MismatchGroup(label, difference_statistics(difference[start:end]))
        for label, start, end in zip(labels, bounds[:-1], bounds[1:], strict=True)
        if end > start
    )


_OUTLIERS = 8
_TOKENS_BEFORE, _TOKENS_AFTER = 16, 4


@wire_type("rollouts.MismatchOutlier")
@dataclass(frozen=True, slots=True, eq=False)
class MismatchOutlier:
    """A token with one of the largest differences. `sampler` and `trainer` are its log-probabilities, in nats.

    `sample` is the name of its sample, `position` its position there. `before` and `after` int32 hold the ids of up to
    16 tokens before it and up to 4 after it.
    """

    sample: str
    position: int
    turn: int
    token_id: int
    sampler: float
    trainer: float
    before: np.ndarray
    after: np.ndarray

    @property
    def difference(self) -> float:
        """|trainer - sampler|, infinite where it is not a number."""
        difference = abs(self.trainer - self.sampler)
        return difference if difference == difference else np.inf


@wire_type("rollouts.MismatchReport")
@dataclass(frozen=True, slots=True, eq=False)
class MismatchReport:
    """The differences between the sampler's and the trainer's log-probabilities of sampled tokens, in nats.

    `compared` has both for every token, `outliers` the tokens that differ most. The properties sum them up:
    over all tokens, and by turn, modality, version lag, image and sample. `report_text` and `report_json`
    print them, `plot_mismatch` plots them, `check_mismatch` compares them with thresholds. A log-probability
    that is not a number counts as an infinite difference.

    `trainer_version` is that of `mismatch_report`. Causes are tested by `diagnose_mismatch`.
    """

    compared: ComparedTokens = field(default_factory=ComparedTokens)
    outliers: tuple[MismatchOutlier, ...] = ()
    trainer_version: str | None = None

    def __repr__(self) -> str:
        figures = self.statistics
        return (
            f"<MismatchReport: {figures.tokens} tokens, mean {figures.mean_abs:.1e}, max {figures.max_abs:.1e}, "
            f"k3 {figures.k3:.1e} nats>"
        )

    @property
    def statistics(self) -> DifferenceStatistics:
        """The figures over all tokens."""
        return difference_statistics(self.compared.difference)

    @property
    def tokens(self) -> int:
        """The number of compared tokens."""
        return len(self.compared)

    @property
    def max_abs(self) -> float:
        """The largest |difference|; 0 without tokens."""
        return self.statistics.max_abs

    @property
    def mean_abs(self) -> float:
        """The mean |difference|; 0 without tokens."""
        return self.statistics.mean_abs

    @property
    def kl(self) -> float:
        """The k3 estimate of KL(sampler || trainer), see `DifferenceStatistics`."""
        return self.statistics.k3

    @property
    def worst(self) -> str:
        """The name of the sample with the largest |difference|; empty without tokens."""
        if not self.tokens:
            return ""
        largest = int(np.abs(self.compared.difference).argmax())
        return self.compared.names[int(self.compared.sample[largest])]

    @property
    def by_turn(self) -> tuple[MismatchGroup, ...]:
        """Labels "turn 0", "turn 1"...: the runs of trained tokens of each sample, in order."""
        turn = self.compared.turn
        return _groups(self.compared, turn, [f"turn {each}" for each in range(int(turn.max(initial=-1)) + 1)])

    @property
    def by_modality(self) -> tuple[MismatchGroup, ...]:
        """Labels "text", "image", "video", "audio": by the last medium before a token, text where there is none."""
        labels = ("text", "image", "video", "audio")
        modality = self.compared.modality()
        number = np.select([modality == label for label in labels], range(len(labels)), default=-1)
        return _groups(self.compared, number, labels)

    @property
    def by_lag(self) -> tuple[MismatchGroup, ...]:
        """Labels "lag 0", "lag 1"...: by how many versions the weights that sampled a token are behind the trainer's.

        "version ..." instead where versions are no integers; empty where samples have none.
        """
        tokens = self.compared
        lag = tokens.lag(self.trainer_version)
        if lag is None:
            return _groups(tokens, tokens.version, [f"version {version}" for version in tokens.versions])
        lags, number = np.unique(lag, return_inverse=True)
        return _groups(tokens, number, [f"lag {each}" for each in lags.tolist()])

    @property
    def by_image(self) -> tuple[MismatchGroup, ...]:
        """Labels are `mm_hash`es: the tokens after an image, video or sound and before the next, over all samples."""
        return _groups(self.compared, self.compared.item, self.compared.media_hashes)

    @property
    def by_sample(self) -> tuple[MismatchGroup, ...]:
        """Labels are the names of samples."""
        return _groups(self.compared, self.compared.sample, self.compared.names)


def mismatch_report(
    batch: TrainingBatch, logprobs: torch.Tensor, *, trainer_version: str | int | None = None
) -> MismatchReport:
    """Compare the sampler's log-probabilities of a batch with the trainer's, `logprobs` floating (B, T).

    The trainer's must be of the weights that sampled the batch, before any optimizer step. `trainer_version` is the
    version of these weights, from which the lag of each token is counted (by default from the newest in the batch).

    Raises `ArgumentError` for log-probabilities of another shape.
    """
    version = None if trainer_version is None else str(trainer_version)
    compared = compare_tokens(batch, logprobs)
    return MismatchReport(compared, _outliers(batch, compared), version)


def merge_reports(reports: Iterable[MismatchReport]) -> MismatchReport:
    """One report over the tokens of all `reports`, with the trainer's version of the first that has tokens."""
    nonempty = [report for report in reports if report.tokens]
    if not nonempty:
        return MismatchReport()
    outliers = sorted((one for report in nonempty for one in report.outliers), key=lambda one: -one.difference)
    return MismatchReport(
        concat_tokens([report.compared for report in nonempty]),
        tuple(outliers[:_OUTLIERS]),
        nonempty[0].trainer_version,
    )


def _outliers(batch: TrainingBatch, compared: ComparedTokens) -> tuple[MismatchOutlier, ...]:
    absolute = np.abs(compared.difference)
    largest = np.argsort(-absolute, kind="stable")[:_OUTLIERS]
    return tuple(_outlier(batch, compared, int(token)) for token in largest if absolute[token] > 0)


def _outlier(batch: TrainingBatch, compared: ComparedTokens, token: int) -> MismatchOutlier:
    sample, position = batch.samples[compared.sample[token]], int(compared.position[token])
    return MismatchOutlier(
        sample=sample.name,
        position=position,
        turn=int(compared.turn[token]),
        token_id=int(sample.token_ids[position]),
        sampler=float(compared.sampler[token]),
        trainer=float(compared.trainer[token]),
        before=sample.token_ids[max(0, position - _TOKENS_BEFORE) : position].copy(),
        after=sample.token_ids[position + 1 : position + 1 + _TOKENS_AFTER].copy(),
    )


#: Token ids to text, for example `renderer.tokenizer.decode`.
Decode = Callable[[list[int]], str]

_GROUPS_SHOWN = 12
_LABEL_WIDTH = {"image": 12, "sample": 40}
_REPEATS_SHOWN = 2


def report_text(report: MismatchReport, *, decode: Decode | None = None) -> str:
    """The report for people: figures, groups and outliers, one a line.

    `decode` turns token ids into text (`renderer.tokenizer.decode`); without it outliers show ids. Of images the 12
    with the largest mean are listed.
    """
    lines = [f"mismatch over {report.tokens} sampled tokens, in nats", *_table("all tokens", report)]
    if report.outliers:
        lines += ["", "largest differences (the token is in [[ ]])"]
        for outlier in report.outliers:
            lines.append(
                f"  {outlier.difference:.1e}  sampler {outlier.sampler:.3f}  trainer {outlier.trainer:.3f}  sample "
                f"{outlier.sample}, turn {outlier.turn}, token {outlier.position}: {_context(outlier, decode)}"
            )
    return "\n".join(lines)


def report_json(report: MismatchReport, *, decode: Decode | None = None, indent: int | None = None) -> str:
    """The report as strict JSON: an object with the figures, the groups and the outliers.

    A number that is not finite is the text "Infinity", "-Infinity" or "NaN". `decode` adds `text` to the outliers.
    """
    content = {
        **_figures(report.statistics),
        "groups": {
            name: [{"label": group.label, **_figures(group.statistics)} for group in groups]
            for name, groups in _group_lines(report)
        },
        "outliers": [_outlier_object(outlier, decode) for outlier in report.outliers],
    }
    return json.dumps(content, indent=indent, allow_nan=False)


def _group_lines(report: MismatchReport) -> list[tuple[str, tuple[MismatchGroup, ...]]]:
    return [
        ("turn", report.by_turn),
        ("modality", report.by_modality),
        ("lag", report.by_lag),
        ("image", report.by_image),
        ("sample", report.by_sample),
    ]


def _table(title: str, report: MismatchReport) -> list[str]:
    groups = [MismatchGroup(title, report.statistics)]
    for name, members in _group_lines(report):
        if name in ("image", "sample"):
            worst = sorted(members, key=lambda group: -group.statistics.mean_abs)[:_GROUPS_SHOWN]
            members = tuple(MismatchGroup(f"{name} {label:.{_LABEL_WIDTH[name]}}", figures) for label, figures in worst)
        groups += [MismatchGroup(f"  {label}", figures) for label, figures in members]
    width = max(len(group.label) for group in groups)
    heading = f"{'':{width}}  {'tokens':>8}  {'mean':>8}  {'max':>8}  {'k1':>8}  {'k3':>8}"
    return [
        heading,
        *(
            f"{group.label:{width}}  {group.statistics.tokens:>8}  "
            + "  ".join(f"{value:>8.1e}" for value in group.statistics[1:])
            for group in groups
        ),
    ]


def _context(outlier: MismatchOutlier, decode: Decode | None) -> str:
    before, after = _readable(outlier.before.tolist(), decode), _readable(outlier.after.tolist(), decode)
    return f"{before}[[{_readable([outlier.token_id], decode)}]]{after}"


def _readable(ids: Sequence[int], decode: Decode | None) -> str:
    """The ids as text in which a longer run of one id, such as the placeholder tokens of an image, is written once."""
    if decode is None:
        return f" {' '.join(map(str, ids))} "
    pieces: list[str] = []
    for run in _runs(ids):
        text = decode(run if len(run) <= _REPEATS_SHOWN or len(set(run)) > 1 else run[:1])
        pieces.append(text if len(set(run)) > 1 or len(run) <= _REPEATS_SHOWN else f"{text}(x{len(run)})")
    return repr("".join(pieces))[1:-1]


def _runs(ids: Iterable[int]) -> list[list[int]]:
    """The ids cut at runs of more than two equal ids: these are lists of their own."""
    runs: list[list[int]] = []
    open_ended = False
    for _, equal in itertools.groupby(ids):
        run = list(equal)
        if len(run) <= _REPEATS_SHOWN and open_ended:
            runs[-1] += run
        else:
            runs.append(run)
        open_ended = len(run) <= _REPEATS_SHOWN
    return runs


def _figures(statistics: DifferenceStatistics) -> dict[str, Any]:
    return {name: _json_number(value) for name, value in statistics._asdict().items()}


def _outlier_object(outlier: MismatchOutlier, decode: Decode | None) -> dict[str, Any]:
    return {
        "sample": outlier.sample,
        "position": outlier.position,
        "turn": outlier.turn,
        "sampler": _json_number(outlier.sampler),
        "trainer": _json_number(outlier.trainer),
        "before": outlier.before.tolist(),
        "token_id": outlier.token_id,
        "after": outlier.after.tolist(),
        **({} if decode is None else {"text": _context(outlier, decode)}),
    }


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


#: Differences of 0 are drawn at this value, because the axis is logarithmic.
_SMALLEST = 1e-8
_MODALITY_COLOURS = {"text": "tab:blue", "image": "tab:orange", "video": "tab:green", "audio": "tab:purple"}
_IMAGES_SHOWN = 12


def plot_mismatch(report: MismatchReport, path: str | Path) -> None:
    """Write a figure of the report to `path`; its ending selects the format (PNG, SVG, PDF).

    Four plots: the trainer's against the sampler's log-probabilities, by modality; |difference| by position in the
    turn; the mean |difference| by turn, modality and version lag; the mean |difference| of the 12 worst images. Raises
    `MissingExtraError` without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("plot_mismatch", "plot", "matplotlib") from error
    figure = Figure(figsize=(12, 9))
    FigureCanvasAgg(figure)
    (scatter, position), (groups, images) = figure.subplots(2, 2)
    _plot_scatter(scatter, report)
    _plot_positions(position, report)
    _plot_bars(groups, [*report.by_turn, *report.by_modality, *report.by_lag], "mean |difference| (nats)")
    worst = sorted(report.by_image, key=lambda group: -group.statistics.mean_abs)[:_IMAGES_SHOWN]
    _plot_bars(images, worst, "mean |difference| after an image (nats)")
    figure.suptitle(f"{report!r:.100}".replace("<", "").replace(">", ""))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _plot_scatter(axes: Axes, report: MismatchReport) -> None:
    compared = report.compared
    modality = compared.modality()
    for name, colour in _MODALITY_COLOURS.items():
        chosen = modality == name
        if chosen.any():
            axes.scatter(compared.sampler[chosen], compared.trainer[chosen], s=4, color=colour, label=name)
    finite = compared.sampler[np.isfinite(compared.sampler)]
    lowest = float(finite.min(initial=-1.0))
    axes.plot([lowest, 0], [lowest, 0], color="0.7", linewidth=1)
    axes.set(xlabel="log p(sampler)", ylabel="log p(trainer)")
    if report.tokens:
        axes.legend(loc="upper left")


def _plot_positions(axes: Axes, report: MismatchReport) -> None:
    compared = report.compared
    finite = np.isfinite(compared.difference)
    absolute = np.maximum(np.abs(compared.difference[finite]), _SMALLEST)
    axes.scatter(compared.turn_position[finite], absolute, s=4, color="0.6")
    axes.set(yscale="log", xlabel="position in the turn", ylabel="|difference| (nats)")


def _plot_bars(axes: Axes, groups: list[MismatchGroup], label: str) -> None:
    labels = [f"{group.label:.12}" for group in groups]
    values: Any = [min(max(group.statistics.mean_abs, _SMALLEST), 1e6) for group in groups]
    axes.barh(range(len(groups)), values, color="0.6")
    axes.set_yticks(range(len(groups)), labels)
    axes.set(xscale="log", xlabel=label)
    axes.invert_yaxis()


Action = Literal["error", "warning"]


class MismatchWarning(UserWarning):
    """The mismatch is above a threshold."""


def check_mismatch(
    report: MismatchReport,
    *,
    max_abs: float | None = None,
    mean_abs: float | None = None,
    k3: float | None = None,
    action: Action = "error",
) -> None:
    """Compare figures of the report with thresholds in nats; None is no threshold.

    A figure above its threshold raises `MismatchError`, or with action="warning" warns with `MismatchWarning`. Either
    text names the figure, the threshold and the sample with the largest difference. Raises
    `ArgumentError` for a threshold that is not above 0, without any threshold, and for another action.
    """
    thresholds = {"max_abs": max_abs, "mean_abs": mean_abs, "k3": k3}
    given = {name: value for name, value in thresholds.items() if value is not None}
    if not given:
        raise ArgumentError("max_abs", max_abs, "pass at least one of max_abs, mean_abs and k3")
    for name, value in given.items():
        check_positive(name, value, "pass a number of nats above 0")
    check_choice("action", action, Action)
    figures = report.statistics._asdict()
    exceeded = [(name, figures[name], value) for name, value in given.items() if not figures[name] <= value]
    if not exceeded:
        return
    error = MismatchError(exceeded, report.tokens, report.worst)
    if action == "error":
        raise error
    warnings.warn(str(error), MismatchWarning, stacklevel=2)
