"""A mixture of experts computes with the experts that the sampler took, and gradients go through their weights."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from family_rows import loaded_family
from model_families import text_config, with_seed
from prefix_trees import computed_rows, of_a_wide_model
from routed_samples import MODELS, routers_of, sampled, tiny
from transformers import AutoModelForCausalLM

from rollouts.errors import SampleError, UnsupportedModelError
from rollouts.models import prefix_tree
from rollouts.training import TrainingBatch, candidate_logprobs, token_logprobs, token_logprobs_and_entropy
from rollouts.training.trainer import LoraOptions, Trainer, datum_from_sample


def batch_of(samples, **layout):
    return TrainingBatch.from_samples(samples, pad_id=0, **layout)


def scored(model, batch, **options):
    with torch.no_grad():
        return token_logprobs(model, batch, **{"routed_experts": True, **options})


def largest(batch, logprobs):
    return float((logprobs - batch.logprobs).abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_with_the_sampler_s_experts_are_the_sampler_s(name):
    model = tiny(name)
    batch = batch_of(sampled(model, 0.3))
    assert largest(batch, scored(model, batch)) < 1e-5
    with torch.no_grad():
        assert largest(batch, token_logprobs(model, batch)) > 1e-2, "the model itself takes others"
        assert largest(batch, token_logprobs_and_entropy(model, batch, routed_experts=True).logprobs) < 1e-5
        several = candidate_logprobs(model, batch, batch.input_ids[..., None], routed_experts=True)
        assert largest(batch, several[..., 0]) < 1e-5
    own = batch_of(sampled(model, 0.0))
    assert largest(own, scored(model, own)) < 1e-5


def test_padded_and_packed_rows_take_the_experts_of_their_samples():
    model = tiny("qwen3_moe")
    samples = [replace(each, name=str(length)) for length in (40, 25) for each in sampled(model, 0.3, 2, length)]
    for layout in ("padded", "packed"):
        batch = batch_of(samples, layout=layout)
        assert largest(batch, scored(model, batch)) < 1e-5


def test_rows_with_images_take_the_experts_of_their_samples():
    family = loaded_family("qwen3_vl_moe")
    sample, chosen = family.row("one", images=[family.pixels(32, 48)]).sample, []
    hooks = [
        each.register_forward_hook(lambda *call: chosen.append(call[2][2].numpy())) for each in routers_of(family.model)
    ]
    own = scored(family.model, batch_of([sample]), routed_experts=False)
    for hook in hooks:
        hook.remove()
    experts = np.stack(chosen[-len(hooks) :], axis=1)
    predicting = np.concatenate([experts[:1], experts[:-1]])
    with_own = scored(family.model, batch_of([replace(sample, routed_experts=predicting)]))
    torch.testing.assert_close(with_own, own, rtol=0, atol=1e-5)
    with_others = scored(family.model, batch_of([replace(sample, routed_experts=(predicting + 1) % 4)]))
    assert (with_others - own).abs().max() > 1e-2


def test_gradients_are_those_of_finite_differences():
    """Of a weight of a router, of an expert and of the embeddings, in the direction of the gradient."""
    model = tiny("qwen3_moe").double()
    model.set_experts_implementation("eager")  # the others compute no float64
    batch = batch_of(sampled(tiny("qwen3_moe"), 0.3))
    token_logprobs(model, batch, routed_experts=True).sum().backward()
    layer = model.model.layers[0].mlp
    for parameter in (layer.gate.weight, layer.experts.down_proj, model.model.embed_tokens.weight):
        gradient = parameter.grad
        direction, values = gradient / gradient.norm(), []
        for step in (1e-3, -1e-3):
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
                values.append(float(scored(model, batch).double().sum()))
                parameter.sub_(direction, alpha=step)
        assert (values[0] - values[1]) / 2e-3 == pytest.approx(float(gradient.norm()), rel=1e-3)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradients_of_layers_that_the_backward_pass_computes_again_are_equal():
    gradients = []
    for again in (False, True):
        model = tiny("mixtral").train()
        batch = batch_of(sampled(tiny("mixtral"), 0.3))
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        token_logprobs(model, batch, routed_experts=True).sum().backward()
        gradients.append(model.model.layers[0].mlp.gate.weight.grad)
    torch.testing.assert_close(*gradients)


# Prefix trees.


def branches(model, change=None):
    """Two samples with a prompt of 16 tokens, and the second one's experts of a token of it changed."""
    one, two = sampled(model, 0.3, 2, shared=16)
    if change is not None:
        experts = two.routed_experts.copy()
        experts[change + 1] = (experts[change + 1] + 1) % 4
        two = replace(two, routed_experts=experts)
    return batch_of([one, two])


def shared_tokens(model, batch):
    """How many tokens stood for two, after a comparison with rows that share nothing."""
    with of_a_wide_model(), computed_rows() as rows:
        shared = scored(model, batch)
    torch.testing.assert_close(shared, scored(model, batch, share_prefixes=False), rtol=0, atol=1e-5)
    return int(batch.lengths.sum()) - sum(int(each.attention_mask.sum()) for each in rows)


def test_a_tree_shares_a_token_only_where_the_experts_agree():
    model = tiny("qwen3_moe")
    assert shared_tokens(model, branches(model)) == 16
    assert shared_tokens(model, branches(model, change=10)) == 10
    assert shared_tokens(model, branches(model, change=0)) == 0


def test_experts_of_equal_hash_are_not_shared():
    model = tiny("qwen3_moe")
    batch = branches(model, change=10)
    zeros = mock.Mock(integers=lambda _, size: np.zeros(size, np.int64))
    with mock.patch.object(prefix_tree.np.random, "default_rng", return_value=zeros):
        assert shared_tokens(model, batch) == 10


# The trainer.


def test_a_trainer_computes_rows_with_the_experts_of_the_sampler(tmp_path):
    model = tiny("qwen3_moe")
    samples = sampled(model, 0.3)
    data = [datum_from_sample(sample, "ppo") for sample in samples]

    def largest_of(trainer):
        trainer.create_model("policy", lora=LoraOptions(rank=2, seed=0, train_mlp=False))
        result = trainer.forward_backward("policy", data, "ppo")
        pairs = zip(result.logprobs, samples, strict=True)
        return max(np.abs((own - sample.logprobs[1:])[sample.loss_mask[1:]]).max() for own, sample in pairs)

    assert largest_of(Trainer(model, tmp_path, routed_experts=True)) < 1e-5
    assert largest_of(Trainer(model, tmp_path)) > 1e-2, "without the option"


# Refusals.


def test_a_trained_row_without_experts_is_named(tmp_path):
    model = tiny("qwen3_moe")
    samples = sampled(model, 0.3)
    without = replace(samples[1], routed_experts=None)
    with pytest.raises(SampleError, match="s1: it has no routed_experts to compute with; let the server report them"):
        token_logprobs(model, batch_of([samples[0], without]), routed_experts=True)
    trainer = Trainer(model, tmp_path, routed_experts=True)
    trainer.create_model("policy", lora=LoraOptions(rank=2, train_mlp=False))
    with pytest.raises(SampleError, match=r"data\[1\]: it has no experts"):
        trainer.forward("policy", [datum_from_sample(each, "ppo") for each in (samples[0], without)], "ppo")
    untrained = replace(without, loss_mask=np.zeros_like(without.loss_mask), weight_spans=())
    batch = batch_of([samples[0], untrained])
    assert largest(batch_of(samples[:1]), scored(model, batch)[:1]) < 1e-5


def test_rows_of_two_samplers_are_named():
    model = tiny("qwen3_moe")
    one, other = sampled(model, 0.3, 2)
    batch = batch_of([one, replace(other, routed_experts=other.routed_experts[:, :1])])
    with pytest.raises(SampleError, match=r"s1: its experts are of \(1, 2\) layers and experts a token"):
        token_logprobs(model, batch, routed_experts=True)


def weighted_by_its_own(router, hidden_states):
    """The weights of its own choice, in the order of the experts that `topk` returns."""
    logits = hidden_states.reshape(-1, router.hidden_dim) @ router.weight.T
    _, experts = torch.topk(logits, router.top_k)
    return logits, logits.sort(descending=True).values[:, : router.top_k].softmax(-1), experts


def chosen_without_topk(router, hidden_states):
    logits = hidden_states.reshape(-1, router.hidden_dim) @ router.weight.T
    experts = logits.sort(descending=True).indices[:, : router.top_k]
    return logits, logits.gather(1, experts).softmax(-1), experts


def ignored(router, hidden_states):
    logits, weights, experts = chosen_without_topk(router, hidden_states)
    torch.topk(logits, router.top_k)
    return logits, weights, experts


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (weighted_by_its_own, "'qwen3_moe': the hidden states of Qwen3MoeModel with its experts in another order"),
        (chosen_without_topk, "its routers call topk over all 4 experts 0 times instead of once"),
        (ignored, "the experts that its routers return do not change its hidden states"),
    ],
)
def test_routers_that_cannot_take_given_experts_are_refused_with_the_reason(forward, reason):
    model = tiny("qwen3_moe")
    batch = batch_of(sampled(model, 0.3))
    router_class = type(routers_of(model)[0])
    with (
        mock.patch.object(router_class, "forward", forward),
        pytest.raises(UnsupportedModelError, match=reason),
    ):
        token_logprobs(model, batch, routed_experts=True)


def test_a_model_without_experts_is_refused():
    model = with_seed(lambda: AutoModelForCausalLM.from_config(text_config("qwen3")))
    batch = batch_of(sampled(tiny("qwen3_moe"), 0.3))
    with pytest.raises(UnsupportedModelError, match="does not name the modules that choose its experts"):
        token_logprobs(model, batch, routed_experts=True)
