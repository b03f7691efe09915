"""TRL's own GRPOTrainer and data collator on our inputs: their losses are ours."""

import functools

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from rollouts.training import (
    TrainingBatch,
    TrainingSample,
    cispo_loss,
    kl_loss,
    policy_gradient_loss,
    sequence_ratio_loss,
    sft_loss,
    token_logprobs,
)
from rollouts.training.adapters import trl_grpo_inputs, trl_sft_batch, trl_sft_row

datasets = pytest.importorskip("datasets")


def supervised(sample: TrainingSample) -> TrainingSample:
    count = len(sample)
    columns = {"logprobs": np.zeros(count, np.float32), "advantages": np.ones(count, np.float32)}
    return TrainingSample(sample.token_ids, sample.loss_mask, media=sample.media, name=sample.name, **columns)


@pytest.fixture(scope="module")
def trainer(trl, tiny_model_dir, tmp_path_factory):
    # The trainer changes its model's methods, so it has one of its own.
    own = AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32)
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=4,
        num_generations=2,
        report_to=[],
        loss_type="dapo",
    )
    rows = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}]}] * 4)
    return trl.GRPOTrainer(
        own,
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=arguments,
        train_dataset=rows,
        processing_class=AutoProcessor.from_pretrained(tiny_model_dir),
    )


@pytest.mark.slow
@pytest.mark.parametrize("images", [(0, 0, 0), (1, 2, 1), (1, 0, 2)])
def test_the_loss_of_the_trainer_is_the_policy_gradient_of_our_log_probabilities(trainer, make_sample, images):
    samples = [make_sample(seed, images=count) for seed, count in zip((3, 7, 5), images, strict=True)]
    inputs = trl_grpo_inputs(samples, pad_id=0)
    inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"]
    trainer.model.eval()
    with torch.no_grad():
        loss = trainer._compute_loss(trainer.model, inputs)
        batch = TrainingBatch.from_samples(samples, pad_id=0)
        logprobs = token_logprobs(trainer.model, batch)
    # The formula of DAPO (arXiv:2503.14476): the clipped ratio, a mean over all tokens.
    ratio = (logprobs - batch.logprobs).exp()
    clipped = ratio.clamp(1 - trainer.epsilon_low, 1 + trainer.epsilon_high)
    surrogate = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)[batch.loss_mask]
    assert loss.item() == pytest.approx(-surrogate.mean().item(), abs=1e-5)


#: its loss_type, its importance_sampling_level, and our loss of log-probabilities, old ones, advantages and a mask.
LOSSES = {
    "PPO, mean over tokens": ("dapo", "token", policy_gradient_loss, {"clip": (0.2, 0.28)}),
    "GRPO": ("grpo", "token", policy_gradient_loss, {"clip": (0.2, 0.28), "mean_over": "sequences"}),
    "Dr. GRPO": ("dr_grpo", "token", policy_gradient_loss, {"clip": (0.2, 0.28), "normaliser": 3 * 11}),
    "CISPO": ("cispo", "token", cispo_loss, {"clip": (1.0, 0.28)}),
    "GSPO": ("grpo", "sequence", sequence_ratio_loss, {"clip": (0.2, 0.28)}),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_its_losses_are_ours_and_so_are_their_gradients(trainer, make_sample, monkeypatch, name, beta):
    loss_type, level, our_loss, options = LOSSES[name]
    inputs = trl_grpo_inputs([make_sample(seed) for seed in (3, 7, 5)], pad_id=0)
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    generator = torch.Generator().manual_seed(0)
    new, old, reference = (0.3 * torch.randn(3, *mask.shape, generator=generator) - 1).unbind()
    advantages = torch.randn(len(mask), 1, generator=generator).expand(mask.shape)
    inputs |= {"old_per_token_logps": old, "ref_per_token_logps": reference, "advantages": advantages[:, 0]}
    settings = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": beta,
        "epsilon_low": 0.2,
        "epsilon_high": 1.28 if loss_type == "cispo" else 0.28,  # for CISPO it is the largest ratio
        "max_completion_length": 11,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (new, torch.zeros_like(new), None),
    }
    for attribute, value in settings.items():
        monkeypatch.setattr(trainer, attribute, value)
    monkeypatch.setattr(trainer.args, "use_bias_correction_kl", False)
    trainer.model.eval()
    new.requires_grad_()
    theirs = trainer._compute_loss(trainer.model, inputs)
    (their_gradient,) = torch.autograd.grad(theirs, new)
    sequence_ids = torch.arange(len(mask))[:, None].expand(mask.shape)
    mean = {name: value for name, value in options.items() if name != "clip"}
    mean = {"mean_over": "sequences"} if our_loss is sequence_ratio_loss else mean
    ours = our_loss(new, old, advantages, mask, sequence_ids=sequence_ids, **options).loss
    ours = ours + beta * kl_loss(new, reference, mask, sequence_ids=sequence_ids, **mean)
    (our_gradient,) = torch.autograd.grad(ours, new)
    assert theirs.item() == pytest.approx(ours.item(), abs=1e-6)
    torch.testing.assert_close(their_gradient, our_gradient)


def test_its_shuffling_and_splitting_keep_images_and_versions_with_their_rows(trl, make_sample):
    from trl.trainer.utils import (
        shuffle_sequence_dict,
        split_pixel_values_by_grid,
        split_tensor_dict,
        unsplit_pixel_values_by_grid,
    )

    samples = [make_sample(seed, images=1 + seed % 2) for seed in range(1, 5)]
    inputs = trl_grpo_inputs(samples, pad_id=0)
    parts = split_tensor_dict(shuffle_sequence_dict(split_pixel_values_by_grid(inputs)), 2)
    for part in map(unsplit_pixel_values_by_grid, parts):
        for row, (count, spans) in enumerate(zip(part["num_images"], part["weight_spans"], strict=True)):
            index = int(spans[0][0]) - 1  # the version of a sample's weights is its seed
            assert count == len(samples[index].media)
            width = int(part["completion_mask"][row].sum())
            assert part["completion_ids"][row, :width].tolist() == samples[index].token_ids[-width:].tolist()


def test_the_models_loss_on_a_supervised_batch_is_our_negative_log_likelihood(make_sample, model):
    samples = [supervised(make_sample(seed, images=seed % 2)) for seed in (2, 3, 5)]
    collator = functools.partial(trl_sft_batch, pad_id=0)
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    with torch.no_grad():
        loss = model(**collator(samples)).loss
        ours = sft_loss(token_logprobs(model, batch), batch.loss_mask)
    assert loss.item() == pytest.approx(ours.item(), abs=1e-5)


def test_rows_of_text_go_through_its_data_collator(trl, make_sample):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    samples = [supervised(make_sample(seed)) for seed in (2, 6)]
    collated = DataCollatorForLanguageModeling(pad_token_id=0)([trl_sft_row(sample) for sample in samples])
    ours = trl_sft_batch(samples, pad_id=0)
    assert collated.keys() == ours.keys()
    for name, tensor in collated.items():
        assert torch.equal(tensor, ours[name])


def test_the_argument_for_media_tokens_has_the_name_that_the_model_has_for_it(make_sample):
    sample = supervised(make_sample(1, images=1))
    assert "token_type_ids" in trl_sft_batch([sample], pad_id=0, type_ids="token_type_ids")
    assert trl_grpo_inputs([sample], pad_id=0, type_ids=None).keys() & {"token_type_ids", "mm_token_type_ids"} == set()
