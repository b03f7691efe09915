"""Log-probabilities of completions by the models themselves: of transformers, and of PEFT for an adapter over one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from transformers import AutoModelForImageTextToText

from rollouts import Completion, GenerateRequest
from rollouts.training import TrainingBatch, TrainingSample, token_logprobs


def plain_model(directory: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


def scored(directory: Path, adapter: Path | None, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """The log-probability of each token of a completion by the checkpoint of a directory, with an adapter or None."""
    model = plain_model(directory)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    count, length = len(request.prompt_ids), len(request.prompt_ids) + len(completion.token_ids)
    sample = TrainingSample(
        token_ids=np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int32),
        loss_mask=np.arange(length) >= count,
        logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        media=tuple(request.media),
    )
    with torch.no_grad():
        return token_logprobs(model, TrainingBatch.from_samples([sample], pad_id=0))[0, count:].numpy()


def difference(directory: Path, adapter: Path | None, request: GenerateRequest, completion: Completion) -> float:
    """The largest difference of the log-probabilities of a completion from those of `scored`."""
    return float(np.abs(scored(directory, adapter, request, completion) - completion.logprobs).max())
