"""Chunked log-probabilities and entropy against a softmax of all logits, their gradients, and the memory they take."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.models.output_head import LowRank
from rollouts.training import sequence_logprobs


def inputs(positions=7, words=11, width=5, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(positions, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(words, width, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(words, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, words, (positions,), generator=generator)
    return hidden, weight, bias, targets


def by_formula(hidden, weight, bias, targets, softcap=None, scale=1.0, temperature=1.0, low_rank=None):
    """All logits at once, differentiated by autograd."""
    if low_rank is not None:
        weight = weight + low_rank.scale * low_rank.up @ low_rank.down
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = logits.float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    distribution = torch.distributions.Categorical(logits=logits / temperature, validate_args=False)
    return distribution.log_prob(targets), distribution.entropy()


def gradients(results, weights, leaves):
    loss = sum((result * weight).sum() for result, weight in zip(results, weights, strict=True))
    return torch.autograd.grad(loss, leaves)


@pytest.mark.slow
@given(
    positions=st.integers(0, 9),
    words=st.integers(1, 12),
    chunks=st.tuples(st.integers(1, 10), st.integers(1, 13)),
    has_bias=st.booleans(),
    rank=st.sampled_from([0, 1, 3]),
    softcap=st.sampled_from([None, 0.7, 30.0]),
    scale=st.sampled_from([1.0, 0.25]),
    temperature=st.sampled_from([1.0, 0.6]),
    seed=st.integers(0, 50),
)
def test_every_division_into_chunks_gives_the_values_and_gradients_of_all_logits_at_once(
    positions, words, chunks, has_bias, rank, softcap, scale, temperature, seed
):
    hidden, weight, bias, targets = inputs(positions, words, seed=seed)
    bias = bias if has_bias else None
    generator = torch.Generator().manual_seed(seed + 2)
    down, up = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((rank, 5), (words, rank)))
    low_rank = LowRank(down, up, 0.5) if rank else None
    head = {"softcap": softcap, "scale": scale, "temperature": temperature, "low_rank": low_rank}
    result = sequence_logprobs(
        hidden, weight, targets, bias=bias, chunk_positions=chunks[0], chunk_vocabulary=chunks[1], **head
    )
    expected = by_formula(hidden, weight, bias, targets, **head)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None] + ([down, up] if rank else [])
    weights = torch.randn(2, positions, generator=torch.Generator().manual_seed(seed + 1))
    for one, other in zip(gradients(result, weights, leaves), gradients(expected, weights, leaves), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_logits_far_from_zero_neither_overflow_nor_lose_the_small_probability():
    hidden = torch.tensor([[1.0], [1.0]])
    weight = torch.tensor([[1000.0], [900.0], [-1000.0]])
    result = sequence_logprobs(hidden, weight, torch.tensor([0, 2]), chunk_vocabulary=1)
    assert result.logprobs.tolist() == [pytest.approx(-math.exp(-100)), -2000.0]
    assert result.entropy.tolist() == [pytest.approx(100 * math.exp(-100)), pytest.approx(100 * math.exp(-100))]


@pytest.mark.parametrize("chunk", [3, 16])
def test_the_size_of_the_logits_is_in_no_rounding_of_a_log_probability(chunk):
    steps = torch.arange(16.0)[torch.randperm(16, generator=torch.Generator().manual_seed(0))] / 8
    found = sequence_logprobs(torch.ones(16, 1), 4096 + steps[:, None], torch.arange(16), chunk_vocabulary=chunk)
    torch.testing.assert_close(found.logprobs, torch.log_softmax(steps.double(), 0).float(), rtol=0, atol=5e-7)


def test_bfloat16_logits_are_normalised_and_their_gradients_summed_in_float32():
    hidden, weight, _, targets = inputs(positions=64, words=600, width=32, dtype=torch.bfloat16)
    result = sequence_logprobs(hidden, weight, targets, chunk_positions=8, chunk_vocabulary=50)
    assert result.logprobs.dtype == result.entropy.dtype == torch.float32
    logits = (hidden @ weight.T).detach().float()
    torch.testing.assert_close(
        result.logprobs.detach(), torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0], atol=1e-5, rtol=1e-5
    )
    result.logprobs.sum().backward()
    exact = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    by_formula(*exact, None, targets)[0].sum().backward()
    for tensor, reference in zip((hidden, weight), exact, strict=True):
        assert tensor.grad.dtype == torch.bfloat16
        error = (tensor.grad.float() - reference.grad).norm() / reference.grad.norm()
        assert error < 0.01  # one rounding to bfloat16 is 0.002


def test_under_autocast_both_passes_use_its_dtype():
    hidden, weight, bias, targets = inputs(positions=20, words=40, width=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = sequence_logprobs(hidden, weight, targets, bias=bias)
    halves = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight, bias)]
    expected = sequence_logprobs(halves[0], halves[1], targets, bias=halves[2])
    assert torch.equal(result.logprobs, expected.logprobs)
    result.logprobs.sum().backward()
    expected.logprobs.sum().backward()
    assert torch.equal(hidden.grad, halves[0].grad.float())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
@pytest.mark.slow
def test_no_tensor_of_all_logits_is_ever_allocated():
    """4,096 positions x 16,000 words are 250 MB of logits, and 1,000 MB with what their gradient needs."""
    program = """
import torch

def peak_mb():
    # Not ru_maxrss, which begins at that of the process that started this one.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

from rollouts.training import sequence_logprobs
hidden = torch.randn(4_096, 8, requires_grad=True)
weight = torch.randn(16_000, 8, requires_grad=True)
targets = torch.randint(0, 16_000, (4_096,))
sequence_logprobs(hidden[:8], weight, targets[:8]).logprobs.sum().backward()
before = peak_mb()
sum(part.sum() for part in sequence_logprobs(hidden, weight, targets)).backward()
print(peak_mb() - before)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 200
