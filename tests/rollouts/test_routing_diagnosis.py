"""A mismatch of a mixture of experts whose sampler took other experts is confirmed by replaying them."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from model_families import text_config, with_seed
from routed_samples import sampled, tiny
from transformers import AutoModelForCausalLM

from renderers import RenderedTokens
from rollouts import Completion, FinishReason, Trajectory
from rollouts.errors import ArgumentError, SampleError, TrajectoryError
from rollouts.models.architecture import architecture
from rollouts.models.expert_routing import replayed_experts
from rollouts.training import (
    TrainingBatch,
    diagnose_mismatch,
    diagnosis_text,
    replace_tokens,
    samples_from_trajectory,
    truncate_sample,
)
from rollouts.training.mismatch import Cause


def diagnosed(model, samples):
    return diagnose_mismatch(model, TrainingBatch.from_samples(samples, pad_id=0))


def routing_of(diagnosis):
    (found,) = [each for each in diagnosis.tested if each.cause is Cause.MOE_ROUTING]
    return found


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_other_experts_of_the_sampler_are_confirmed_by_replaying_them(name):
    model = tiny(name)
    before = {id(module): module.forward for module in model.modules()}
    diagnosis = diagnosed(model, sampled(model, 0.3))
    assert (diagnosis.side, diagnosis.unexplained) == ("sampler", ())
    (found,) = diagnosis.causes
    assert found.cause is Cause.MOE_ROUTING
    assert found.after < 1e-5 < 1e-3 < found.before
    assert "MoE routing: the sampler's experts, in 3 samples" in diagnosis_text(diagnosis)
    assert all(module.forward == before[id(module)] for module in model.modules())


def test_a_mismatch_with_equal_experts_is_not_routing():
    model = tiny("qwen3_moe")
    samples = sampled(model, 0.0)
    with torch.no_grad():
        model.lm_head.weight *= 1.1
    diagnosis = diagnosed(model, samples)
    assert Cause.MOE_ROUTING not in {each.cause for each in diagnosis.causes}
    assert routing_of(diagnosis).explained == ()


def test_samples_without_recorded_experts_say_what_is_missing():
    model = tiny("gpt_oss")
    samples = [replace(sample, routed_experts=None) for sample in sampled(model, 0.3)]
    diagnosis = diagnosed(model, samples)
    assert diagnosis.causes == ()
    assert routing_of(diagnosis).skipped.startswith("the samples have no routed_experts")
    dense = diagnosed(with_seed(lambda: AutoModelForCausalLM.from_config(text_config("qwen3"))), samples)
    assert not [each for each in dense.tested if each.cause is Cause.MOE_ROUTING], "it has no experts"


def test_experts_recorded_for_all_layers_belong_to_those_with_routers():
    model = tiny("deepseek_v3")
    (sample,) = sampled(model, 0.3, 1)
    experts = sample.routed_experts
    of_all = np.concatenate([np.zeros_like(experts[:, :1]), experts], axis=1)  # the first layer has none
    diagnosis = diagnosed(model, [replace(sample, routed_experts=of_all)])
    assert [each.cause for each in diagnosis.causes] == [Cause.MOE_ROUTING]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda experts: experts[:, :1], r"the number of layers of experts is 1; pass those of the 2 layers"),
        (lambda experts: experts + 4, r"an expert is [4-7]; pass those of this model, from 0 to 3"),
    ],
)
def test_experts_of_another_model_are_refused_with_the_reason(change, reason):
    model = tiny("gpt_oss")
    samples = [replace(sample, routed_experts=change(sample.routed_experts)) for sample in sampled(model, 0.3)]
    diagnosis = diagnosed(model, samples)
    assert diagnosis.causes == ()
    assert re.match(reason, routing_of(diagnosis).skipped)
    experts = samples[0].routed_experts[None, 1:]
    with pytest.raises(ArgumentError, match=reason), replayed_experts(architecture(model), experts):
        pass


def test_another_number_of_experts_a_token_is_not_replayed_and_the_reason_says_it():
    model = tiny("gpt_oss")
    samples = [
        replace(sample, routed_experts=np.repeat(sample.routed_experts, 2, axis=2)) for sample in sampled(model, 0.3)
    ]
    diagnosis = diagnosed(model, samples)
    assert diagnosis.causes == ()
    assert "the number of experts a token is 4; pass 2 for this model" in routing_of(diagnosis).skipped


# Samples and batches.


def experts_of(ids):
    return (np.arange(len(ids))[:, None, None] + np.zeros((1, 2, 1))).astype(np.uint8)


def episode(*, second=True, layers=2):
    trajectory = Trajectory("e")
    said = {"role": "assistant", "content": ""}
    ids = np.array([3, 4], np.int32)
    logprobs = np.array([-1, -2], np.float32)
    first = Completion(0, ids, logprobs, FinishReason.STOP, routed_experts=experts_of([1, 2, 3, 4])[:-1])
    trajectory.add_turn(RenderedTokens([1, 2]), first, said)
    experts = np.zeros((6, layers, 1), np.uint8) + 9 if second else None
    then = Completion(0, ids, logprobs, FinishReason.STOP, routed_experts=experts)
    trajectory.add_turn(RenderedTokens([1, 2, 3, 4, 5]), then, said)
    return trajectory


def samples_of(trajectory):
    return samples_from_trajectory(trajectory, advantage=1.0, processors={})


def test_a_sample_has_the_experts_of_its_path_and_none_where_a_turn_lacks_them():
    (sample,) = samples_of(episode())
    assert sample.routed_experts[1:, 0, 0].tolist() == [0, 1, 2, 9, 9, 9]
    assert [each.routed_experts for each in samples_of(episode(second=False))] == [None]
    with pytest.raises(TrajectoryError, match="routed_experts"):
        samples_of(episode(layers=3))


@pytest.mark.parametrize("experts", [np.zeros((7, 2), np.uint8), np.zeros((6, 2, 1), np.uint8), np.zeros((7, 2, 1))])
def test_experts_that_do_not_fit_the_tokens_are_refused(experts):
    (sample,) = samples_of(episode())
    with pytest.raises(SampleError, match=r"routed_experts is .*; pass integers \(7, layers, experts"):
        replace(sample, routed_experts=experts)


def test_experts_follow_their_tokens_through_cuts_selections_and_files(tmp_path):
    (sample,) = samples_of(episode())
    cut, _ = truncate_sample(sample, 4)
    np.testing.assert_array_equal(cut.routed_experts, sample.routed_experts[:4])
    assert replace_tokens(sample, 0, 1, [7]).routed_experts is None, "the experts of other tokens are not known"
    batch = TrainingBatch.from_samples([sample, cut], pad_id=0)
    batch[[0]].save(tmp_path / "batch")
    (again,) = TrainingBatch.load(tmp_path / "batch").samples
    np.testing.assert_array_equal(again.routed_experts, sample.routed_experts)
    other = replace(sample, routed_experts=sample.routed_experts + 1)
    assert batch == TrainingBatch.from_samples([sample, cut], pad_id=0)
    assert batch != TrainingBatch.from_samples([other, cut], pad_id=0)
    assert batch != TrainingBatch.from_samples([replace(sample, routed_experts=None), cut], pad_id=0)
