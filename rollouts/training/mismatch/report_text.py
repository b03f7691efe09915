"""A report of the mismatch as text for people."""

import itertools
from collections.abc import Callable, Iterable, Sequence

from rollouts.training.mismatch.report import MismatchGroup, MismatchOutlier, MismatchReport

#: Token ids to text, for example `renderer.tokenizer.decode`.
Decode = Callable[[list[int]], str]


_REPEATS_SHOWN = 2


def report_text(report: MismatchReport, *, decode: Decode | None = None) -> str:
    """The report for people: figures, groups and outliers, one a line.

    `decode` turns token ids into text (`renderer.tokenizer.decode`); without it outliers show ids. Of images
    the 12 with the largest mean are listed.
    """
    lines = [f"mismatch over {report.tokens} sampled tokens, in nats", *_table(report)]
    if report.outliers:
        lines += ["", "largest differences (the token is in [[ ]])"]
        for outlier in report.outliers:
            lines.append(
                f"  {outlier.difference:.1e}  sampler {outlier.sampler:.3f}  trainer {outlier.trainer:.3f}  sample "
                f"{outlier.sample}, turn {outlier.turn}, token {outlier.position}: {_context(outlier, decode)}"
            )
    return "\n".join(lines)


def _table(report: MismatchReport) -> list[str]:
    groups = [MismatchGroup("all tokens", report.statistics)]
    for label, figures in (*report.by_turn, *report.by_modality, *report.by_lag):
        groups.append(MismatchGroup(f"  {label}", figures))
    for name, members in (("image", report.by_image), ("sample", report.by_sample)):
        worst = sorted(members, key=lambda group: -group.statistics.mean_abs)[:12]
        groups += [MismatchGroup(f"  {name} {label:.40}", figures) for label, figures in worst]
    width = max(len(group.label) for group in groups)
    heading = f"{'':{width}}  {'tokens':>8}  {'mean':>8}  {'max':>8}  {'k1':>8}  {'k3':>8}"
    rows = (
        f"{group.label:{width}}  {group.statistics.tokens:>8}  "
        + "  ".join(f"{value:>8.1e}" for value in group.statistics[1:])
        for group in groups
    )
    return [heading, *rows]


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
