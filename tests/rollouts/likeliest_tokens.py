"""Compares the likeliest tokens that an engine reports with a model's own log-probabilities."""

import numpy as np
import torch

from rollouts.training import TrainingBatch, TrainingSample
from rollouts.training.model_inputs import model_inputs


def all_logprobs(model, request, ids):
    """log p of every token in the place of each of prompt and completion but the first: (n - 1, vocabulary)."""
    row = np.array([*request.prompt_ids, *ids], np.int32)
    zeros = np.zeros(len(row), np.float32)
    sample = TrainingSample(row, np.arange(len(row)) > 0, zeros, zeros, tuple(request.media))
    with torch.no_grad():
        inputs = model_inputs(TrainingBatch.from_samples([sample], pad_id=0), model)
        return torch.log_softmax(model(**inputs, use_cache=False).logits[0, :-1].float(), -1)


def check_top(top, expected, k):
    """The ids may differ from the model's where two tokens are as likely as rounding tells."""
    assert (top.token_ids.dtype, top.logprobs.dtype) == (np.int32, np.float32)
    assert top.token_ids.shape == top.logprobs.shape == (len(expected), k)
    np.testing.assert_allclose(top.logprobs, expected.topk(k).values, atol=1e-4)
    of_ids = expected.gather(1, torch.from_numpy(top.token_ids.astype(np.int64)))
    np.testing.assert_allclose(of_ids, top.logprobs, atol=1e-4)
    assert all(len(set(row)) == k for row in top.token_ids.tolist())
