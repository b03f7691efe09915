"""The mismatch: the difference between the sampler's and the trainer's log-probabilities of the sampled tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from transport import wire_type


@wire_type("rollouts.MismatchReport")
@dataclass(frozen=True, slots=True)
class MismatchReport:
    """|log p(sampler) - log p(trainer)| over `tokens` sampled tokens.

    `max_abs` and `mean_abs` are in nats; `kl` is the k3 estimate of KL(sampler || trainer), mean of
    exp(d) - 1 - d with d = trainer - sampler (Schulman 2020, "Approximating KL divergence"). `worst` names the row of
    the largest difference; `max_abs_media` and `max_abs_text` are the largest in rows with and without media.
    """

    tokens: int = 0
    max_abs: float = 0.0
    mean_abs: float = 0.0
    kl: float = 0.0
    max_abs_media: float = 0.0
    max_abs_text: float = 0.0
    worst: str = ""


def mismatch_report(
    sampler: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor, *, has_media: torch.Tensor, names: Iterable[str]
) -> MismatchReport:
    """Compare log-probabilities (B, T) where `mask` (B, T) is True; `has_media` bool (B,), `names` one per row.

    A difference of NaN counts as infinite, so that it exceeds every threshold.
    """
    mask_array = mask.cpu().numpy()
    difference = np.where(mask_array, (trainer.detach().cpu() - sampler.cpu()).numpy().astype(np.float64), 0.0)
    absolute = np.nan_to_num(np.abs(difference), nan=np.inf)
    tokens = int(mask_array.sum())
    if not tokens:
        return MismatchReport()
    per_row = absolute.max(axis=1)
    media = has_media.cpu().numpy()
    with np.errstate(over="ignore"):
        k3 = np.exp(difference) - 1 - difference
    return MismatchReport(
        tokens=tokens,
        max_abs=float(per_row.max()),
        mean_abs=float(absolute.sum() / tokens),
        kl=float(k3[mask_array].mean()),
        max_abs_media=float(per_row[media].max(initial=0.0)),
        max_abs_text=float(per_row[~media].max(initial=0.0)),
        worst=list(names)[int(per_row.argmax())],
    )


def merge_reports(reports: Iterable[MismatchReport]) -> MismatchReport:
    """One report over the tokens of all `reports`."""
    nonempty = [report for report in reports if report.tokens]
    if not nonempty:
        return MismatchReport()
    tokens = sum(report.tokens for report in nonempty)
    return MismatchReport(
        tokens=tokens,
        max_abs=max(report.max_abs for report in nonempty),
        mean_abs=sum(report.mean_abs * report.tokens for report in nonempty) / tokens,
        kl=sum(report.kl * report.tokens for report in nonempty) / tokens,
        max_abs_media=max(report.max_abs_media for report in nonempty),
        max_abs_text=max(report.max_abs_text for report in nonempty),
        worst=max(nonempty, key=lambda report: report.max_abs).worst,
    )
