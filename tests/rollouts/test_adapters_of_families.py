"""Adapters with the tensors of other processors than Qwen-VL's: a model's own loss on our batch is our loss."""

import pytest
import torch
from family_rows import LoadedFamily

from rollouts.training import TrainingBatch, sft_loss, token_logprobs
from rollouts.training.adapters import trl_sft_batch

TYPE_IDS = {"qwen2_5_vl": "mm_token_type_ids", "gemma3": "token_type_ids"}


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    return LoadedFamily(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "gemma3", "llava_next", "internvl", "idefics3", "mistral3"], indirect=True
)
def test_a_collated_batch_has_the_loss_of_our_log_probabilities(family):
    rows = [family.row("one", [family.pixels(32, 48)]), family.row("two", [family.pixels(48, 32)] * 2)]
    samples = [row.sample for row in rows]
    omit = ("logprobs", "advantages")
    collated = trl_sft_batch(samples, pad_id=0, type_ids=TYPE_IDS.get(family.name), omit=omit)
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    with torch.no_grad():
        ours = sft_loss(token_logprobs(family.model, batch), batch.loss_mask)
        assert family.model(**collated).loss.item() == pytest.approx(ours.item(), abs=1e-4)
