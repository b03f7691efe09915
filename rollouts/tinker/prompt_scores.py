"""What a request asks for in the places of its prompt: log-probabilities of chosen tokens, and drawn ones."""

from dataclasses import replace

import numpy as np
import torch

from rollouts.engines.local.batch import drawn
from rollouts.errors import ArgumentError
from rollouts.tinker.requests import SampleRequest, SampleResult

_ARGUMENT = "target_prompt_logprobs"


class PromptScores:
    """Collects them from the distributions that `LocalEngine.generate` shows it.

        scores = PromptScores(request, engine.vocab_size)
        await engine.generate(..., observe=scores)
        result = scores.added_to(result)

    Raises `ArgumentError` for targets that do not fit to the prompt and to the vocabulary.
    """

    def __init__(self, request: SampleRequest, vocabulary: int) -> None:
        self._request = request
        count = len(request.prompt.token_ids) - 1
        self._target_logprobs: np.ndarray | None = None
        if (targets := request.targets) is not None:
            if targets.height != count:
                rule = f"the prompt has {count + 1} tokens, so send {count}, one for each token but the first"
                raise ArgumentError(f"the number of rows of {_ARGUMENT}", targets.height, rule)
            if len(wrong := targets.ids[(targets.ids < -1) | (targets.ids >= vocabulary)]):
                rule = f"the ids of the model are from 0 to {vocabulary - 1}; -1 stands for no token"
                raise ArgumentError(_ARGUMENT, int(wrong[0]), rule)
            if not (targets.ids >= 0).any():
                raise ArgumentError(_ARGUMENT, targets.ids.tolist(), "name at least one token")
            self._target_logprobs = np.zeros(len(targets.ids), np.float32)
        shape = (max(count, 0), request.alternatives)
        self._drawn = np.zeros(shape, np.int64), np.zeros(shape, np.float32)

    def __call__(self, start: int, logprobs: torch.Tensor) -> None:
        """`logprobs` (m, vocabulary) are those in the places of the prompt's tokens from number `start + 1` on."""
        targets, end = self._request.targets, start + len(logprobs)
        if targets is not None and self._target_logprobs is not None:
            here = np.flatnonzero((targets.rows >= start) & (targets.rows < end) & (targets.ids >= 0))
            self._target_logprobs[here] = logprobs[targets.rows[here] - start, targets.ids[here]].cpu().numpy()
        if self._request.alternatives:
            ids = self._alternatives(start, logprobs)
            self._drawn[0][start:end] = ids.cpu().numpy()
            self._drawn[1][start:end] = logprobs.gather(-1, ids).cpu().numpy()

    def _alternatives(self, start: int, logprobs: torch.Tensor) -> torch.Tensor:
        k, temperature, seed = self._request.alternatives, self._request.temperature, self._request.seed
        if temperature == 0:
            return logprobs.argmax(-1, keepdim=True).expand(-1, k)
        random = np.random.default_rng(None if seed is None else [seed, start])
        uniforms = torch.from_numpy(random.random((len(logprobs), k)))
        return drawn(logprobs.double() / temperature, uniforms.to(logprobs.device))

    def added_to(self, result: SampleResult) -> SampleResult:
        """A result with what was collected."""
        alternatives = self._drawn if self._request.alternatives else None
        return replace(result, target_logprobs=self._target_logprobs, alternatives=alternatives)
