"""Checks of requests against the model, with vLLM's texts."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.serve.errors import RequestError
from rollouts.serve.served_model import ServedModel


def unknown_model(name: str, model: ServedModel) -> RequestError:
    """The error (404) for another model than the one that is served and its adapters."""
    message = f"The model `{name[:200]}` does not exist. Valid aliases: {model.name}."
    return RequestError(404, message, "NotFoundError", "model")


def check_tokens(token_ids: Sequence[int], vocab_size: int | None) -> None:
    """Raise `RequestError` (400) for a token id that the model does not have."""
    if vocab_size is not None and (largest := max(token_ids)) >= vocab_size:
        raise RequestError(400, f"Token id {largest} is out of vocabulary", param="token_ids")


def check_length(token_ids: Sequence[int], max_model_len: int) -> None:
    """Raise `RequestError` (400) for a prompt that leaves no room for a token."""
    count = len(token_ids)
    if count > max_model_len:
        relation = f"is longer than the maximum model length of {max_model_len}"
    elif count == max_model_len:
        relation = (
            "plus the number of requested output tokens (at least 1) is longer than the maximum model length of "
            f"{max_model_len}"
        )
    else:
        return
    raise RequestError(400, f"The decoder prompt (length {count}) {relation}. Shorten the prompt.")
