"""Off-policy correction: each rule against its formula in numpy, and the losses that take its weights and mask."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollouts.errors import ArgumentError
from rollouts.training import (
    Correction,
    cispo_loss,
    dro_loss,
    forward_kl_loss,
    generalised_jsd_loss,
    importance_sampling_loss,
    kl_loss,
    policy_gradient_loss,
    reverse_kl_loss,
    rollout_correction,
    sequence_ratio_loss,
    sft_loss,
)

INF = math.inf


def reference(rows, options):
    """Weights, kept tokens and figures of rows of (policy, sampler) log-probabilities, by the formulas of the papers.

    For each row a list of weights and one of whether a token is kept, float64.
    """
    differences = [np.array([max(p, -1e4) - max(s, -1e4) for p, s in row], np.float64) for row in rows]
    rules = {name: [] for name in ("token", "product", "mean", "veto")}
    weights, kept = [], []
    for x in differences:
        total = x.sum()
        outside = {
            "token": np.array([not _within(each, options, "token") for each in x], bool),
            "product": np.full(len(x), not _within(total, options, "product")),
            "mean": np.full(len(x), not _within(total / max(1, len(x)), options, "mean")),
            "veto": np.full(
                len(x), any(each < math.log(options.get("veto", 1e-300)) for each in x) and "veto" in options
            ),
        }
        for name, rejected in outside.items():
            rules[name].append(rejected)
        if "sequence_weights" in options:
            weights.append(np.full(len(x), min(total, math.log(options["sequence_weights"]))))
        elif "token_weights" in options:
            weights.append(np.minimum(x, math.log(options["token_weights"])))
        else:
            weights.append(np.zeros(len(x)))
        kept.append(~np.any(list(outside.values()), axis=0))
    if "sequence_weights" in options:
        used = np.array([w[0] for w, k in zip(weights, kept, strict=True) if k.any()])
    else:
        used = np.concatenate([w[k] for w, k in zip(weights, kept, strict=True)])
    logarithm = np.logaddexp.reduce  # of the sum of exponentials
    if options.get("normalise") and len(used):
        weights = [w - logarithm(used) + math.log(len(used)) for w in weights]
    weights = [
        np.exp(np.where(k, w, 0.0)) for w, k in zip(weights, kept, strict=True)
    ]  # of a rejected one it may overflow
    count = max(1, sum(map(len, rows)))
    x = np.minimum(np.concatenate(differences), 20)
    totals = np.minimum([each.sum() for each in differences if len(each)], 20)
    given_rules = {name for name in rules if {name, f"{name}_low", f"{name}_high"} & options.keys()}
    figures = {
        "rejected": sum(int((~k).sum()) for k in kept) / count,
        **{f"rejected_{name}": sum(int(r.sum()) for r in rules[name]) / count for name in given_rules},
        "ess": math.exp(2 * logarithm(used) - logarithm(2 * used)) / len(used) if len(used) else 0.0,
        "chi2_token": (np.exp(2 * x) - 1).sum() / count,
        "chi2_sequence": (np.exp(2 * totals) - 1).sum() / max(1, len(totals)),
        "kl_sampler_policy": (np.exp(x) - 1 - x).sum() / count,
        "kl_policy_sampler": (np.exp(x) * x - np.exp(x) + 1).sum() / count,
    }
    return weights, kept, figures


def _within(log_ratio, options, rule):
    low, high = options.get(f"{rule}_low", 0), options.get(f"{rule}_high", INF)
    return (math.log(low) if low else -INF) <= log_ratio <= math.log(high)


def padded(rows):
    """Policy, sampler, mask and sequence ids; a token that is not trained is before each row, and padding after it."""
    width = 2 + max(map(len, rows))
    shape = (len(rows), width)
    policy, sampler = np.full(shape, np.nan), np.full(shape, np.nan)  # what is not trained must not matter
    mask, ids = np.zeros(shape, bool), np.full(shape, -1)
    for number, row in enumerate(rows):
        places = slice(1, 1 + len(row))
        policy[number, places], sampler[number, places] = np.array(row, np.float64).reshape(-1, 2).T
        mask[number, places], ids[number, : 1 + len(row)] = True, number
    return tuple(map(torch.from_numpy, (policy, sampler, mask, ids)))


def packed(rows):
    of_rows = [padded([row]) for row in rows]
    ids = [torch.where(row[3] < 0, -1, number) for number, row in enumerate(of_rows)]
    return (*(torch.cat([row[column] for row in of_rows], 1) for column in range(3)), torch.cat(ids, 1))


LOGPROBS = st.floats(-4, 0) | st.sampled_from([-INF, -60.0, 0.0])
ROWS = st.lists(st.lists(st.tuples(LOGPROBS, LOGPROBS), max_size=4), min_size=1, max_size=4)
RULES = {
    "token_low": st.sampled_from([0.51, 0.013]),
    "token_high": st.sampled_from([2.03, 1e6]),
    "product_low": st.just(0.31),
    "product_high": st.just(3.7),
    "mean_low": st.just(0.77),
    "mean_high": st.just(1.3),
    "veto": st.just(1.1e-4),
}
WEIGHTS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"token_weights": st.sampled_from([0.7, 2.0])}, optional={"normalise": st.just(True)}),
    st.fixed_dictionaries({"sequence_weights": st.sampled_from([2.0, 1e9])}, optional={"normalise": st.just(True)}),
)
OPTIONS = st.builds(lambda rules, weights: {**rules, **weights}, st.fixed_dictionaries({}, optional=RULES), WEIGHTS)


@settings(max_examples=300, deadline=None)
@given(rows=ROWS, options=OPTIONS)
@example(rows=[[(-INF, -1.0)]], options={"token_weights": 2.0})  # a ratio of 0: its weight is 0, and it counts
@example(rows=[[(-1.0, -INF)]], options={"sequence_weights": 2.0, "normalise": True})  # an infinite ratio
@example(rows=[[(-INF, -INF), (-1.0, -1.0)]], options={"veto": 1.1e-4, "token_high": 2.03})  # none is stranger
@example(rows=[[(-4.0, -1.0), (-1.0, -1.0)]], options={"veto": 0.1, "token_weights": 2.0, "normalise": True})
@example(rows=[[]], options={"sequence_weights": 2.0, "normalise": True, "mean_low": 0.9})
# The products of long rows of an old policy are below every number: the weights are 2 / (1 + e) and 2 e / (1 + e).
@example(rows=[[(-1e3, 0.0), (-1.0, 0.0)], [(-1e3, 0.0)]], options={"sequence_weights": 2.0, "normalise": True})
@example(rows=[[(-1e3, 0.0)], [(-1e3, 0.0)]], options={"sequence_weights": 2.0})
@example(rows=[[(0.0, -1.0)], [(-INF, 0.0)]], options={"mean_high": 1.3, "token_weights": 0.7, "normalise": True})
def test_weights_rejections_and_figures_are_those_of_the_formulas_in_padded_and_packed_batches(rows, options):
    weights, kept, figures = reference(rows, options)
    for layout in (padded, packed):
        policy, sampler, mask, ids = layout(rows)
        found = rollout_correction(policy, sampler, mask, ids, options)
        assert found.mask[mask].tolist() == np.concatenate(kept).tolist()
        expected = np.where(np.concatenate(kept), np.concatenate(weights), 0)
        np.testing.assert_allclose(found.weights[mask].numpy(), expected, rtol=1e-9)
        assert not found.mask[~mask].any()
        assert not found.weights[~mask].any()
        assert found.figures == pytest.approx(figures, rel=1e-9, abs=1e-12)


def test_older_tokens_are_rejected_by_their_lag_and_need_it():
    policy, sampler, mask, ids = padded([[(-1.0, -1.0)] * 3])
    lags = torch.tensor([[9, 0, 2, 3, 9]])
    found = rollout_correction(policy, sampler, mask, ids, {"max_lag": 2}, lags=lags)
    assert found.mask.tolist() == [[False, True, True, False, False]]
    assert found.figures["rejected_lag"] == pytest.approx(1 / 3)
    with pytest.raises(ArgumentError, match="max_lag needs the lag of each token: pass token_lags"):
        rollout_correction(policy, sampler, mask, ids, {"max_lag": 2})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"token_limit": 2.0}, "'token_limit'.*there is no such option; pass token_weights, sequence_weights"),
        ({"token_weights": 0.0}, "token_weights.*above 0"),
        ({"sequence_weights": 1e40}, "sequence_weights.*above 0"),
        ({"veto": math.nan}, "veto.*a finite number above 0"),
        ({"normalise": "yes", "token_weights": 2.0}, "normalise.*True or False"),
        ({"token_weights": 2.0, "sequence_weights": 2.0}, "a token has one weight"),
    ],
)
def test_other_options_are_refused_with_what_is_taken(options, reason):
    with pytest.raises(ArgumentError, match=reason):
        rollout_correction(*padded([[(-1.0, -1.0)]]), options)


# What the losses do with a correction.


def _teacher(batch, other=0.0):
    return torch.stack([batch["logprobs"] - 0.7, batch["logprobs"] - 1.9 + other], -1)


LOSSES = {
    "sft": lambda b, mask, **o: sft_loss(b["logprobs"], mask, **o),
    "importance sampling": lambda b, mask, **o: importance_sampling_loss(*_policy(b), mask, **o).loss,
    "ppo": lambda b, mask, **o: policy_gradient_loss(*_policy(b), mask, **o).loss,
    "cispo": lambda b, mask, **o: cispo_loss(*_policy(b), mask, clip=(0.4, 0.5), **o).loss,
    "dro": lambda b, mask, **o: dro_loss(*_policy(b), mask, beta=0.3, **o).loss,
    "kl": lambda b, mask, **o: kl_loss(b["logprobs"], b["old"], mask, **o),
    "reverse kl": lambda b, mask, **o: reverse_kl_loss(b["logprobs"], b["old"], b["teacher"], mask, **o).loss,
    "forward kl": lambda b, mask, **o: forward_kl_loss(_teacher(b), b["top"], mask, **o),
    "jsd": lambda b, mask, **o: generalised_jsd_loss(_teacher(b), b["top"], mask, **o),
    "gspo": lambda b, mask, **o: sequence_ratio_loss(*_policy(b), mask, clip=0.2, **o).loss,
}


def _policy(batch):
    return batch["logprobs"], batch["old"], batch["advantages"]


def batch_of(lengths, layout, seed=0):
    """Log-probabilities and advantages in float64, and a correction that rejects about a third of the tokens."""
    random = np.random.default_rng(seed)
    rows = [[tuple(-random.random(2) * 3 - 0.1) for _ in range(length)] for length in lengths]
    policy, sampler, mask, ids = layout(rows)
    shape = policy.shape
    advantages, teacher = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    advantages[mask] = torch.from_numpy(random.normal(size=sum(lengths)))
    teacher[mask] = torch.from_numpy(-random.random(sum(lengths)))
    top = torch.log(torch.tensor([0.6, 0.2], dtype=torch.float64)).expand(*shape, 2)
    correction = rollout_correction(policy, sampler, mask, ids, {"token_weights": 1.5, "token_low": 0.5})
    assert 0 < correction.figures["rejected"] < 1
    columns = {"logprobs": policy + 0.1, "old": policy, "advantages": advantages, "teacher": teacher, "top": top}
    return columns, correction, ids


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mean_over", ["tokens", "sequences"])
@pytest.mark.parametrize("layout", [padded, packed])
def test_a_rejected_token_is_no_part_of_the_sum_nor_of_the_number_that_divides_it(name, mean_over, layout):
    loss, (batch, correction, ids) = LOSSES[name], batch_of([5, 3, 6], layout)
    value = loss(batch, correction, mean_over=mean_over, sequence_ids=ids)
    # The terms one by one, from the loss itself with a mask of one token; of GSPO with the ratio of its sequence.
    total, sequences = 0.0, 0
    for number in range(3):
        own = correction.mask & (ids == number)
        sequences += bool(own.any())
        for row, column in own.nonzero().tolist():
            weight = float(correction.weights[row, column])
            if name == "gspo":
                of_one = Correction(torch.zeros_like(correction.weights), own, {})
                of_one.weights[row, column] = 1
                term = float(loss(batch, of_one, sequence_ids=ids, mean_over="tokens", normaliser=1.0))
            else:
                one = torch.zeros_like(own)
                one[row, column] = True
                term = float(loss(batch, one, normaliser=1.0))
            total += weight * term / (int(own.sum()) if mean_over == "sequences" else 1)
    number = sequences if mean_over == "sequences" else int(correction.mask.sum())
    assert float(value) == pytest.approx(total / number, rel=1e-9)
    assert float(loss(batch, correction, mean_over=mean_over, sequence_ids=ids, normaliser=7.0)) == pytest.approx(
        total / 7
    )


def with_constants(batch, correction, ids):
    """CISPO and GSPO with the ratios of `batch`, which their gradients take for a constant, as functions of log p."""
    ratio = (batch["logprobs"] - batch["old"]).exp()
    counts = {number: int((correction.mask & (ids == number)).sum()) for number in ids.unique().tolist()}
    number = sum(count > 0 for count in counts.values())
    over = torch.tensor([[max(1, counts[each]) * number for each in row] for row in ids.tolist()])

    def cispo(logprobs):
        return -(correction.weights * ratio.clamp(0.6, 1.5) * batch["advantages"] * logprobs / over)[
            correction.mask
        ].sum()

    def gspo(logprobs):
        mean = {
            each: (batch["logprobs"] - batch["old"])[correction.mask & (ids == each)].mean().item() for each in counts
        }
        means = torch.tensor([[mean[each] for each in row] for row in ids.tolist()], dtype=torch.float64)
        r = (means + logprobs - batch["logprobs"]).exp()
        terms = torch.minimum(r * batch["advantages"], r.clamp(0.8, 1.2) * batch["advantages"])
        return -(correction.weights * terms / over)[correction.mask].sum()

    return {"cispo": cispo, "gspo": gspo}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_a_corrected_loss_is_its_derivative_and_0_on_rejected_tokens(name):
    batch, correction, ids = batch_of([4, 2], padded)

    def loss(logprobs):
        return LOSSES[name]({**batch, "logprobs": logprobs}, correction, mean_over="sequences", sequence_ids=ids)

    logprobs = batch["logprobs"].clone().requires_grad_()
    value = loss(logprobs)
    value.backward()
    function = with_constants(batch, correction, ids).get(name, loss)
    derivative = torch.zeros_like(batch["logprobs"])
    for row, column in correction.mask.nonzero().tolist():
        step = torch.zeros_like(derivative)
        step[row, column] = 1e-6
        up, down = (float(function(batch["logprobs"] + sign * step)) for sign in (1, -1))
        derivative[row, column] = (up - down) / 2e-6
    assert derivative.abs().max() > 1e-3
    torch.testing.assert_close(logprobs.grad, derivative, atol=1e-7, rtol=1e-5)


def test_the_public_mistake_is_not_repeated():
    """Weights of 0 in place of rejections keep the rejected tokens in the denominator: 0.49 in place of 1.23."""
    ratios = [1.11, 0.22, 2.23, 5e-5, 1.35]  # https://github.com/THUDM/slime/pull/657
    policy, sampler, mask, ids = padded([[(math.log(ratio), 0.0) for ratio in ratios]])
    found = rollout_correction(policy, sampler, mask, ids, {"token_weights": 9, "token_low": 0.5, "token_high": 2})
    assert float(sft_loss(torch.full_like(policy, -1.0), found)) == pytest.approx((1.11 + 1.35) / 2)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mean_over", ["tokens", "sequences"])
def test_a_loss_of_rejected_tokens_alone_is_0_and_has_a_gradient_of_0(name, mean_over):
    batch, _, ids = batch_of([2, 2], padded)
    nothing = Correction(torch.zeros_like(batch["old"]), torch.zeros_like(ids, dtype=torch.bool), {})
    logprobs = batch["logprobs"].clone().requires_grad_()
    loss = LOSSES[name]({**batch, "logprobs": logprobs}, nothing, mean_over=mean_over, sequence_ids=ids)
    loss.backward()
    assert loss.item() == 0
    assert not logprobs.grad.nan_to_num(nan=1.0).any()


def test_log_probabilities_of_minus_infinity_leave_a_supervised_loss_finite():
    logprobs = torch.tensor([[-INF, -1.0]], requires_grad=True)
    loss = sft_loss(logprobs, torch.ones(1, 2, dtype=torch.bool))
    loss.backward()
    assert loss.item() == pytest.approx((1e4 + 1) / 2)
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_no_number_is_refused_with_its_place_where_it_is_trained(name):
    batch, correction, ids = batch_of([4, 2], padded)
    row, column = correction.mask.nonzero()[-1].tolist()
    for key in batch:
        planted = {**batch, key: batch[key].clone()}
        planted[key][row, column] = math.nan
        is_used = LOSSES[name](batch, correction, sequence_ids=ids) != LOSSES[name](
            {**batch, key: batch[key] - 0.25}, correction, sequence_ids=ids
        )
        if is_used:
            with pytest.raises(ArgumentError, match=rf"\[{row}, {column}\] is nan; the mask trains this position"):
                LOSSES[name](planted, correction, sequence_ids=ids)


def test_numbers_of_sequences_may_be_of_any_size():
    batch, correction, ids = batch_of([5, 3, 6], packed)
    large = torch.where(ids < 0, ids, 2**60 - ids * 2**40)
    options = {"sequence_weights": 2.0, "mean_low": 0.9, "normalise": True}
    mask = correction.mask
    one, other = (rollout_correction(batch["old"], batch["teacher"], mask, each, options) for each in (ids, large))
    torch.testing.assert_close(one.weights, other.weights)
    assert one.figures == pytest.approx(other.figures)
    for name in ("ppo", "gspo"):
        expected = LOSSES[name](batch, correction, mean_over="sequences", sequence_ids=ids)
        assert LOSSES[name](batch, correction, mean_over="sequences", sequence_ids=large) == pytest.approx(expected)


def test_weights_of_another_shape_are_refused():
    batch, correction, _ = batch_of([2, 2], padded)
    with pytest.raises(ArgumentError, match="the shape of weights"):
        sft_loss(batch["logprobs"], correction._replace(weights=correction.weights[:1]))
