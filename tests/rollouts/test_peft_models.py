"""Models with adapters of the real PEFT: the log-probabilities and gradients are those of the adapted model."""

import peft
import pytest
import torch
from family_rows import LoadedFamily

from rollouts.errors import UnsupportedModelError
from rollouts.training import TrainingBatch, model_inputs, token_logprobs


@pytest.mark.parametrize("modules", ["all-linear", ["q_proj", "lm_head"]])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3"])
def test_an_adapted_model_is_scored_and_trained_through_its_adapters(name, layout, modules, tmp_path):
    family = LoadedFamily(name, tmp_path)
    lora = peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(family.model, lora)
    batch = TrainingBatch.from_samples([row.sample for row in family.rows()], pad_id=0, layout=layout)

    logprobs = token_logprobs(model, batch)
    logits = model(**model_inputs(batch, model), use_cache=False).logits[:, :-1]
    plain = torch.log_softmax(logits.float(), -1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(logprobs[batch.loss_mask], plain[batch.loss_mask[:, 1:]], atol=1e-5, rtol=0)

    with model.disable_adapter(), torch.no_grad():
        without = token_logprobs(model, batch)
    assert (logprobs - without).abs().max() > 0.1

    logprobs.sum().backward()
    trained = [name for name, value in model.named_parameters() if value.grad is not None and value.grad.any()]
    assert trained
    assert all("lora_" in name for name in trained)
    assert any("lm_head" in name for name in trained) == ("lm_head" in modules)


@pytest.mark.parametrize("option", [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}])
def test_an_output_layer_with_more_than_lora_is_refused(option, tmp_path):
    family = LoadedFamily("qwen3_vl", tmp_path)
    model = peft.get_peft_model(family.model, peft.LoraConfig(r=4, target_modules=["lm_head"], **option)).train()
    batch = TrainingBatch.from_samples([family.row("text").sample], pad_id=0)
    with pytest.raises(UnsupportedModelError, match="Merge adapters"):
        token_logprobs(model, batch)
