"""The losses of a Trainer: each is its definition, worked out in numpy, and its gradient is the derivative of that."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_checks import SMALL, with_nonzero_adapter

from rollouts.errors import SampleError
from rollouts.models.architecture import architecture
from rollouts.training import TrainingSample
from rollouts.training.datums import check_data
from rollouts.training.named_losses import NAMED_LOSSES, Given, loss_options, named_loss
from rollouts.training.trainer import Datum, Trainer, datum_from_sample

# The terms of each loss as Tinker's guide defines them, of one row: log p, the sampler's log p, advantages, mask.
LOW, HIGH = 0.8, 1.2


def importance_sampling(new, old, advantages, mask):
    return -(np.exp(new - old) * advantages)


def ppo(new, old, advantages, mask):
    ratio = np.exp(new - old)
    return -np.minimum(ratio * advantages, np.clip(ratio, LOW, HIGH) * advantages)


def cispo(new, old, advantages, mask, constant=None):
    ratio = np.exp((new if constant is None else constant) - old)
    return -(np.clip(ratio, LOW, HIGH) * new * advantages)


def dro(new, old, advantages, mask):
    return -(new * advantages - 0.5 * 0.05 * (new - old) ** 2)


def gspo(new, old, advantages, mask, constant=None):
    constant = new if constant is None else constant
    mean = (constant - old)[mask].mean()
    ratio = np.exp(mean + new - constant)
    return -np.minimum(ratio * advantages, np.clip(ratio, 1 - 3e-4, 1 + 4e-4) * advantages)


#: Each definition, its options, and whether the gradient takes a part of it for a constant.
DEFINITIONS = {
    "importance_sampling": (importance_sampling, {}, False),
    "ppo": (ppo, {}, False),
    "cispo": (cispo, {}, True),
    "dro": (dro, {"beta": 0.05}, False),
    "gspo": (gspo, {}, True),
}


def rows(seed=0):
    """Log-probabilities of the trainer and the sampler, advantages and masks of three rows, float64 (n,) each."""
    random = np.random.default_rng(seed)
    found = []
    for length in (7, 12, 4):
        new = -random.random(length) * 3 - 0.1
        mask = np.arange(length) >= 2
        old = np.where(mask, new + random.normal(0, 0.2, length), 0.0)
        advantages = np.where(mask, random.normal(size=length), 0.0)
        found.append((new, old, advantages, mask))
    return found


def computed(name, data, options=None):
    """The loss over all rows in one pass, and the gradient with respect to their log-probabilities, float64."""
    columns = [np.concatenate(column) for column in zip(*data, strict=True)]
    logprobs = torch.from_numpy(columns[0])[None]
    given = {"logprobs": columns[1], "advantages": columns[2]}
    if name == "gspo":
        given["sequence_ratio_mask"] = columns[3]
    inputs = {key: torch.from_numpy(column)[None] for key, column in named_loss(name).inputs_of(given).items()}
    ids = torch.from_numpy(np.repeat(np.arange(len(data)), [len(row[0]) for row in data]))[None]
    logprobs.requires_grad_(True)
    outcome = named_loss(name).compute(Given(logprobs, inputs, ids, loss_options(name, options)))
    outcome.loss.backward()
    return outcome, logprobs.grad[0].numpy()


def derivative(definition, row, has_constant, step=1e-6):
    new, *others = row
    gradient = np.zeros_like(new)
    more = {"constant": new} if has_constant else {}
    for index in range(len(new)):
        moved = [new.copy(), new.copy()]
        moved[0][index] += step
        moved[1][index] -= step
        up, down = (definition(each, *others, **more).sum() for each in moved)
        gradient[index] = (up - down) / (2 * step)
    return gradient


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_loss_and_its_gradient_are_those_of_its_definition(name):
    definition, options, has_constant = DEFINITIONS[name]
    data = rows()
    outcome, gradient = computed(name, data, options)
    assert float(outcome.loss) == pytest.approx(sum(definition(*row).sum() for row in data), rel=1e-9)
    expected = np.concatenate([derivative(definition, row, has_constant) for row in data])
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    assert np.abs(expected).max() > 1e-3
    with_teacher = {"reverse_kl", "forward_kl", "jsd"}  # test_distillation.py
    assert set(DEFINITIONS) | {"cross_entropy"} | with_teacher == set(NAMED_LOSSES)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_thresholds_of_the_options_take_the_place_of_the_defaults(name):
    data = rows()
    wide, _ = computed(name, data, {"clip_low_threshold": 0.0, "clip_high_threshold": 1e6})
    usual, _ = computed(name, data)
    assert float(wide.loss) != pytest.approx(float(usual.loss), rel=1e-6)
    assert (wide.clipped, usual.clipped > 0) == (0.0, True)
    if name == "ppo":
        assert float(wide.loss) == pytest.approx(sum(importance_sampling(*row).sum() for row in data))


def test_cross_entropy_weighs_every_target_and_counts_all_of_them_without_weights():
    logprobs = torch.tensor([[-1.0, -2.0, -4.0]])
    ids = torch.zeros(1, 3, dtype=torch.int64)
    compute = named_loss("cross_entropy").compute
    weights = {"weights": torch.tensor([[1.0, 0.0, -0.5]])}
    assert float(compute(Given(logprobs, weights, ids, {})).loss) == 1.0 - 2.0
    assert float(compute(Given(logprobs, {}, ids, {})).loss) == 7.0


@pytest.fixture(scope="module")
def trainer(tiny_model_dir):
    return Trainer.from_pretrained(tiny_model_dir, device="cpu", tokens_per_pass=20)


def sample(length, seed):
    random = np.random.default_rng(seed)
    mask = np.arange(length) > 2
    return TrainingSample(
        random.integers(3, 300, length).astype(np.int32),
        mask,
        np.where(mask, -random.random(length) * 6, 0).astype(np.float32),
        np.where(mask, random.normal(size=length), 0).astype(np.float32),
    )


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_trainer_sums_a_loss_over_all_rows_and_leaves_out_tokens_that_were_not_sampled(trainer, name, request):
    definition, options, _ = DEFINITIONS[name]
    samples = [sample(length, seed) for seed, length in enumerate([9, 14, 6])]
    data = [datum_from_sample(each, name) for each in samples]
    with_nonzero_adapter(trainer, name, [datum_from_sample(each, "cross_entropy") for each in samples])
    request.addfinalizer(lambda: trainer.unload(name))
    result = trainer.forward(name, data, name, options)
    expected = 0.0
    for found, each in zip(result.logprobs, samples, strict=True):
        mask = each.loss_mask[1:]
        row = (found.astype(np.float64)[mask], each.logprobs[1:][mask], each.advantages[1:][mask], mask[mask])
        expected += definition(*row).sum()
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    assert result.metrics.keys() == {"loss:sum", "ratio:mean", "clipped:mean"}
    assert trainer.forward_backward(name, data, name, options).metrics == pytest.approx(result.metrics, rel=1e-5)


def test_without_a_mask_dro_counts_the_prompt_too_and_the_others_do_not(trainer, request):
    samples = [sample(9, 1)]
    trainer.create_model("a", lora=SMALL)
    request.addfinalizer(lambda: trainer.unload("a"))
    for name, options in (("ppo", None), ("cispo", None), ("importance_sampling", None), ("dro", {"beta": 0.05})):
        masked = [datum_from_sample(each, name) for each in samples]
        bare = [replace(each, inputs={key: each.inputs[key] for key in ("logprobs", "advantages")}) for each in masked]
        one, other = (trainer.forward("a", data, name, options).metrics["loss:sum"] for data in (masked, bare))
        assert (one == pytest.approx(other)) is (name != "dro")


def with_inputs(**inputs):
    return Datum(np.arange(3, 6), np.arange(4, 7), {key: np.array(value) for key, value in inputs.items()})


@pytest.mark.parametrize(
    ("loss", "datum", "reason"),
    [
        ("ppo", with_inputs(logprobs=[0.0] * 3), "the loss needs the input 'advantages'"),
        ("cross_entropy", with_inputs(logprobs=[0.0] * 3), "no input 'logprobs'; it takes weights"),
        ("ppo", with_inputs(logprobs=["a"] * 3, advantages=[1.0] * 3), "logprobs is <U1"),
        (
            "gspo",
            with_inputs(logprobs=[0.0] * 3, advantages=[0.0, 1.0, 1.0], sequence_ratio_mask=[0, 0, 1]),
            "token 1 has an advantage, and sequence_ratio_mask is 0 there",
        ),
    ],
)
def test_inputs_that_a_loss_does_not_take_are_errors_of_their_row(trainer, loss, datum, reason):
    with pytest.raises(SampleError, match=rf"data\[0\]: .*{reason}"):
        check_data([datum], named_loss(loss), architecture(trainer.model), 300)
