"""Training batches, log-probabilities and the embedded engine on a CUDA device, beside the same on the CPU.

Selected by `-n 0 -m gpu`; they need no vLLM.
"""

import asyncio

import numpy as np
import pytest
import torch
from family_rows import loaded_family
from model_families import MEDIA_FAMILIES, TEXT_MODELS, text_config, with_seed
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rollouts import GenerateRequest, LocalEngine, SamplingParams
from rollouts.training import TrainingBatch, TrainingSample, model_inputs, sequence_logprobs, token_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYOUTS = {"padded": {"layout": "padded", "side": "left"}, "packed": {"layout": "packed", "multiple_of": 8}}


@pytest.fixture(autouse=True)
def _full_precision():
    """TF32 has 10 bits of mantissa: the comparisons in float32 would be of its rounding."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture
def family(request):
    family = loaded_family(request.param)
    yield family
    family.model.to("cpu", torch.float32)


def text_samples(*lengths):
    rng = np.random.default_rng(0)
    made = []
    for length in lengths:
        zeros = np.zeros(length, np.float32)
        ids = rng.integers(3, 300, length).astype(np.int32)
        made.append(TrainingSample(ids, np.arange(length) >= max(1, length - 6), zeros, zeros))
    return made


def logprobs_and_gradient(model, batch):
    """Of the trained tokens in order of samples, and of the parameters together, on the CPU."""
    model.zero_grad()
    scored = token_logprobs(model, batch)
    scored.sum().backward()
    parts = [scored[(batch.sequence_ids == index) & batch.loss_mask] for index in range(len(batch.samples))]
    gradient = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
    return torch.cat(parts).detach().cpu(), gradient.cpu()


def assert_gpu_equals_cpu(model, samples):
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    expected, expected_gradient = logprobs_and_gradient(model, batch)
    model.to("cuda")
    for layout in LAYOUTS.values():
        batch = TrainingBatch.from_samples(samples, pad_id=0, **layout).pin_memory().to("cuda")
        assert batch.input_ids.is_cuda
        logprobs, gradient = logprobs_and_gradient(model, batch)
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
        scale = expected_gradient.abs().max()
        torch.testing.assert_close(gradient / scale, expected_gradient / scale, atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", list(MEDIA_FAMILIES), indirect=True)
def test_rows_with_media_have_the_log_probabilities_and_gradients_of_the_cpu_in_both_layouts(family):
    assert_gpu_equals_cpu(family.model, [row.sample for row in family.rows()])


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_text_rows_have_the_log_probabilities_and_gradients_of_the_cpu_in_both_layouts(name):
    model = with_seed(lambda: AutoModelForCausalLM.from_config(text_config(name)))
    assert_gpu_equals_cpu(model, text_samples(5, 23, 9, 40))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "idefics3"], indirect=True)
def test_a_model_in_bfloat16_has_the_log_probabilities_of_its_own_forward(family):
    model = family.model.to("cuda", torch.bfloat16)
    samples = [row.sample for row in family.rows()]
    batch = TrainingBatch.from_samples(samples, pad_id=0).to("cuda")
    with torch.no_grad():
        ours = token_logprobs(model, batch)[batch.loss_mask]
        logits = model(**model_inputs(batch, model), use_cache=False).logits[:, :-1]
    assert logits.dtype == torch.bfloat16
    stock = torch.log_softmax(logits.float(), -1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    assert ours.dtype == torch.float32
    # The logits of the model's own forward are rounded to bfloat16; ours are not.
    rounding = logits.float().abs().max() * 2**-7
    assert (ours - stock[batch.loss_mask[:, 1:]]).abs().max() < rounding


def test_sequence_logprobs_in_bfloat16_agrees_with_float64_and_needs_little_memory():
    positions, words, width = 4096, 151_936, 256
    hidden = torch.randn(positions, width, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(words, width, device="cuda") / 16).bfloat16().requires_grad_()
    targets = torch.randint(0, words, (positions,), device="cuda")
    sequence_logprobs(hidden[:2], weight, targets[:2])[0].sum().backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, entropy = sequence_logprobs(hidden, weight, targets)
    (logprobs.sum() + entropy.sum()).backward()
    beyond = torch.cuda.max_memory_allocated() - before - 2 * (hidden.numel() + weight.numel())
    assert beyond < 400e6, f"{beyond / 1e6:.0f} MB; all logits in float32 are {4 * positions * words / 1e6:.0f} MB"
    few = slice(0, 64)
    exact = torch.log_softmax(hidden[few].double() @ weight.double().T, -1)
    chosen = exact.gather(1, targets[few, None])[:, 0]
    torch.testing.assert_close(logprobs[few].double(), chosen, atol=0.05, rtol=0)
    torch.testing.assert_close(entropy[few].double(), -(exact.exp() * exact).sum(-1), atol=0.05, rtol=0)


def test_the_embedded_engine_on_a_gpu_reports_what_the_trainer_computes(renderer, tiny_model_dir):
    model = AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32).to("cuda")
    engine = LocalEngine(model)
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    parts = [{"type": "image", "image": pixels}, {"type": "text", "text": "Which?"}]
    rendered = renderer.render([{"role": "user", "content": parts}], add_generation_prompt=True)
    request = GenerateRequest(rendered.token_ids, SamplingParams(max_tokens=16, seed=3, n=3), rendered.multi_modal_data)
    result = asyncio.run(engine.generate(request))
    samples = []
    for completion in result.completions:
        ids = np.array([*rendered.token_ids, *completion.token_ids], np.int32)
        zeros = np.zeros(len(ids), np.float32)
        sampler = np.concatenate([zeros[: len(rendered.token_ids)], completion.logprobs])
        media = tuple(rendered.multi_modal_data.items_with_ranges())
        samples.append(TrainingSample(ids, np.arange(len(ids)) >= len(rendered.token_ids), sampler, zeros, media))
    batch = TrainingBatch.from_samples(samples, pad_id=0, layout="packed").to("cuda")
    with torch.no_grad():
        scored = token_logprobs(model, batch)
    assert (scored - batch.logprobs)[batch.loss_mask].abs().max() < 1e-4
