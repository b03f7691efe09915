"""One model's forward passes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from rollouts.errors import SampleError, UnsupportedModelError
from rollouts.models import forward
from rollouts.models.architecture import EXTEND, Architecture, architecture, attends_by_types
from rollouts.models.expert_routing import replayed_experts
from rollouts.models.item_features import FeatureCache
from rollouts.models.output_head import OutputHead, check_equal_states, output_head, probe_ids
from rollouts.models.packing_support import packing_of, shares_prefixes
from rollouts.models.placed_rows import PlacedRows, TokenRow, placed_rows
from rollouts.models.placeholders import check_placeholders, check_token_ids
from rollouts.models.prefix_tree import (
    Tree,
    filled_rows,
    prefix_trees,
    row_cost,
    rows_cost,
    separate_trees,
    tree_rows,
)


class Prefill(NamedTuple):
    """Hidden states (B, T, hidden) of prompts, and int64 (B,) the position of each prompt's next token."""

    hidden: torch.Tensor
    following: torch.Tensor


class ForwardPass:
    """The forward passes of a model of transformers, with media placed by range.

    Raises `UnsupportedModelError` for a model without an output layer, or with one that does more than a
    linear layer, a scale and soft-capping.
    """

    def __init__(self, model: Any) -> None:
        self.architecture: Architecture = architecture(model)
        self.model = self.architecture.model
        output_head(self.architecture)  # checked now, and not when it is needed

    @property
    def head(self) -> OutputHead:
        """The output layer that the model has now, with the adapter that is in it."""
        return output_head(self.architecture)

    def hidden_states(self, rows: PlacedRows) -> torch.Tensor:
        """The last layer's hidden states (B, T, hidden). Differentiable. Packed rows where `packing_of` is not None.

        Raises `SampleError` for rows that the model cannot take, `UnsupportedModelError` if its forward
        fails, and the errors of `replayed_experts` for rows with experts.
        """
        check_placeholders(self.architecture, rows)
        check_token_ids(self.architecture, rows)
        limit = self.architecture.longrope_length
        if limit is not None and (longer := [path.sequence for path in rows.paths if len(path.sequence) > limit]):
            reason = f"it has {len(longer[0])} tokens, and from {limit} on LongRoPE has other factors for all rows"
            raise SampleError(longer[0].name, f"{reason} of a pass; cut it (truncate_sample)")
        with_media = any(sequence.media for sequence in rows.sequences)
        explicit_masks = rows.packed and (
            rows.tree is not None or packing_of(self.architecture, with_media=with_media) == "masks"
        )
        known = self.architecture
        with replayed_experts(known, rows.experts()):
            return forward.hidden_states(known, rows, explicit_masks=explicit_masks)[0]

    def trees(self, sequences: Sequence[TokenRow], max_row_tokens: int) -> list[Tree]:
        """Sequences in prefix trees for rows of at most `max_row_tokens` tokens; see `prefix_trees`.

        Where the model cannot compute trees (`shares_prefixes`), each sequence of a tree begins the next one.
        With `max_row_tokens` 0 each has a tree of its own.
        """
        if not max_row_tokens:
            return separate_trees(sequences)
        max_row_tokens = self._row_limit(sequences, max_row_tokens)
        with_media = any(sequence.media for sequence in sequences)
        joins_items = with_media and attends_by_types(self.architecture)
        # Asked whatever the sequences are: processes that divide a model (FSDP) run its probe together.
        only_beginnings = not shares_prefixes(self.architecture, with_media=with_media)
        size = self.head.weight.shape[1]
        options = {"joins_items": joins_items, "only_beginnings": only_beginnings}
        return prefix_trees(sequences, size, max_row_tokens, **options)

    def _row_limit(self, sequences: Sequence[TokenRow], max_row_tokens: int) -> int:
        """The largest number of tokens in a row of several sequences; 0 where none may share a row."""
        # Phi-4 projects a sound in another way where an image is in the sequence, also behind it.
        modalities = {item.modality for sequence in sequences for item, _ in sequence.media}
        if self.architecture.search == EXTEND and {"audio", "image"} <= modalities:
            return 0
        # Llama 4 scales scores by the place in the row, from this number of tokens on.
        scale = self.architecture.floor_scale
        if scale is None:
            return max_row_tokens
        return 0 if max(map(len, sequences)) >= scale else min(max_row_tokens, scale - 1)

    def shared_rows(
        self, sequences: Sequence[TokenRow], usual: tuple[int, int], *, pad_id: int, max_row_tokens: int
    ) -> PlacedRows | None:
        """Sequences in rows of prefix trees.

        None where they share nothing, and where these rows cost no less than rows of `usual` shape (B, T).
        """
        trees = self.trees(sequences, max_row_tokens)
        if len(trees) == len(sequences):
            return None
        with_media = any(sequence.media for sequence in sequences)
        packed, size = shares_prefixes(self.architecture, with_media=with_media), self.head.weight.shape[1]
        limit = self._row_limit(sequences, max_row_tokens)
        rows = filled_rows(trees, size, limit) if packed else [[tree] for tree in trees]
        if not rows_cost(rows, size) < usual[0] * row_cost(np.array(usual[1]), size):
            return None
        # Attention on a GPU would copy a mask of other widths in each layer.
        multiple_of = 16 if packed and self.model.device.type == "cuda" else 1
        return tree_rows(sequences, rows, pad_id=pad_id, packed=packed, multiple_of=multiple_of)

    def prefill(self, rows: PlacedRows, cache: Any, features: FeatureCache | None = None) -> Prefill:
        """Run prompts, one a row, padded on the left, and fill the cache; `features` as in `hidden_states`."""
        check_placeholders(self.architecture, rows)
        hidden, following = forward.hidden_states(self.architecture, rows, cache=cache, features=features)
        return Prefill(hidden, torch.from_numpy(following).to(self.model.device))

    def next_hidden_states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention_mask: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """One decoding step: ids (B,) at positions (B,) after a cache; returns hidden states (B, hidden).

        `attention_mask` is bool (B, cached + 1).
        """
        return forward.next_hidden_states(self.architecture, token_ids, positions, attention_mask, cache)

    def check_steps(self) -> None:
        """Raise `UnsupportedModelError` if a token after a cache gets other hidden states than in a whole row.

        RWKV takes no cache, and would sample each token without those before it.
        """
        ids = np.array(probe_ids(self.architecture))
        before, whole = (placed_rows([TokenRow(each)], pad_id=0) for each in (ids[:-1], ids))
        last = torch.from_numpy(ids[-1:]).to(self.model.device)
        mask = torch.ones(1, len(ids), dtype=torch.bool).to(last.device)
        try:
            cache = DynamicCache(config=self.architecture.text_config)
            with torch.no_grad():
                following = self.prefill(before, cache).following
                stepped = self.next_hidden_states(last, following, mask, cache)
                expected = self.hidden_states(whole)[:, -1]
        except (AttributeError, KeyError) as error:  # of the cache, which wants to know the layers
            reason = f"no cache for its layers could be made ({type(error).__name__}: {error})"
            raise UnsupportedModelError(self.architecture.model_type, reason) from error
        check_equal_states(
            self.architecture,
            (expected, stepped),
            "for a token after a cache of three",
            "from those in a row of four, so its completions could not be sampled token by token",
        )
