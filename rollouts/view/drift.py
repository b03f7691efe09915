"""Where the tokens of a branch differ from a full render of its messages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Final, NamedTuple

import numpy as np

from renderers import RenderedTokens, Renderer, TemplateRenderer
from renderers.errors import RendererError
from rollouts.errors import PixelMismatchError, RolloutsError
from rollouts.trajectory.token_node import MediaReference
from rollouts.trajectory.tree import Trajectory
from rollouts.view.display_json import display_json

# The time of a token-by-token comparison grows with the product of the lengths. This bounds the products of one branch.
_MAX_PRODUCT: Final = 4096 * 4096
#: It also grows with the pairs of equal tokens, which are many where few different ids occur.
_MAX_EQUAL_PAIRS: Final = 1 << 19
#: Longer parts are first divided at runs of this many equal tokens that occur once in each part.
_RUN: Final = 16


class Difference(NamedTuple):
    """Tokens `start:end` of the branch stand where the render has `rendered_ids`, at its token `rendered_start`.

    `is_coarse`: the range was too long to be compared token by token, so some of its tokens may be equal.
    """

    start: int
    end: int
    rendered_start: int
    rendered_ids: list[int]
    is_coarse: bool = False


@dataclass(frozen=True, slots=True)
class BranchDrift:
    """The comparison of the branch of `leaf` with a render of its messages. `error` says why there is none.

    `rendered` is the number of tokens of the render, `extra_end` how many tokens it has after the branch's last one:
    scaffold that the template prints after the last turn, which is no difference.
    """

    leaf: int
    error: str = ""
    rendered: int = 0
    extra_end: int = 0
    differences: list[Difference] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "leaf": self.leaf,
            "error": self.error,
            "rendered": self.rendered,
            "extraEnd": self.extra_end,
            "differences": [
                {
                    "start": each.start,
                    "end": each.end,
                    "renderedStart": each.rendered_start,
                    "ids": each.rendered_ids,
                    "coarse": each.is_coarse,
                }
                for each in self.differences
            ],
        }


def branch_drift(
    trajectory: Trajectory, leaf: int, renderer: Renderer, tools: Sequence[Any] | None
) -> tuple[BranchDrift, RenderedTokens | None]:
    """Compare one branch, and return the render with the comparison; None if the messages cannot be rendered."""
    is_completion = any(turn.node == leaf for turn in trajectory.turns)
    try:
        messages = trajectory.to_messages(leaf)
        rendered = renderer.render(messages, tools=tools, add_generation_prompt=not is_completion)
    except (RolloutsError, RendererError) as error:
        return BranchDrift(leaf, error=str(error)), None
    ids = trajectory.token_ids(leaf).tolist()
    differences = token_differences(ids, rendered.token_ids)
    extra = 0
    if differences and differences[-1].start == differences[-1].end == len(ids):
        extra = len(differences.pop().rendered_ids)
    return BranchDrift(leaf, "", len(rendered.token_ids), extra, differences), rendered


def token_differences(ids: Sequence[int], rendered: Sequence[int]) -> list[Difference]:
    """The differences in order, none if both are equal. Replacing each range by its `rendered_ids` gives `rendered`.

    The time is about linear in the lengths, and bounded for what differs: see `Difference.is_coarse`.
    """
    return _Comparison(np.asarray(ids, np.int64), np.asarray(rendered, np.int64)).differences()


class _Part(NamedTuple):
    """The ranges of both sides that correspond."""

    start: int
    end: int
    rendered_start: int
    rendered_end: int


class _Comparison:
    """The comparison of int64 arrays of ids."""

    def __init__(self, ids: np.ndarray, rendered: np.ndarray) -> None:
        self._ids = ids
        self._rendered = rendered
        self._product_left = _MAX_PRODUCT
        self._pairs_left = _MAX_EQUAL_PAIRS

    def differences(self) -> list[Difference]:
        whole = self._without_equal_ends(_Part(0, len(self._ids), 0, len(self._rendered)))
        if _product(whole) <= _MAX_PRODUCT:
            return self._compared(whole)
        parts = map(self._without_equal_ends, self._divided(whole))
        return [difference for part in parts for difference in self._compared(part)]

    def _without_equal_ends(self, part: _Part) -> _Part:
        one, other = self._ids[part.start : part.end], self._rendered[part.rendered_start : part.rendered_end]
        first = _common_prefix(one, other)
        last = _common_prefix(one[first:][::-1], other[first:][::-1])
        return _Part(part.start + first, part.end - last, part.rendered_start + first, part.rendered_end - last)

    def _divided(self, part: _Part) -> Iterator[_Part]:
        """What lies between the equal runs of a part."""
        one, other = self._ids[part.start : part.end], self._rendered[part.rendered_start : part.rendered_end]
        start, rendered_start = part.start, part.rendered_start
        for at, rendered_at in _equal_runs(one, other):
            run, rendered_run = part.start + at, part.rendered_start + rendered_at
            if run < start or rendered_run < rendered_start:  # it overlaps with the run before it
                if run - start == rendered_run - rendered_start:  # and continues it
                    start, rendered_start = run + _RUN, rendered_run + _RUN
                continue
            yield _Part(start, run, rendered_start, rendered_run)
            start, rendered_start = run + _RUN, rendered_run + _RUN
        yield _Part(start, part.end, rendered_start, part.rendered_end)

    def _compared(self, part: _Part) -> list[Difference]:
        one, other = self._ids[part.start : part.end], self._rendered[part.rendered_start : part.rendered_end]
        if not len(one) and not len(other):
            return []
        equal_pairs = _equal_pairs(one, other)
        is_coarse = _product(part) > self._product_left or equal_pairs > self._pairs_left
        if is_coarse or not len(one) or not len(other):
            return [Difference(part.start, part.end, part.rendered_start, other.tolist(), is_coarse)]
        self._product_left -= _product(part)
        self._pairs_left -= equal_pairs
        matcher = SequenceMatcher(None, one.tolist(), other.tolist(), autojunk=False)
        return [
            Difference(part.start + a, part.start + b, part.rendered_start + c, other[c:d].tolist())
            for tag, a, b, c, d in matcher.get_opcodes()
            if tag != "equal"
        ]


def _product(part: _Part) -> int:
    return (part.end - part.start) * (part.rendered_end - part.rendered_start)


def _equal_pairs(one: np.ndarray, other: np.ndarray) -> int:
    """How many pairs of a token of each side are equal."""
    (ids, counts), (other_ids, other_counts) = (np.unique(side, return_counts=True) for side in (one, other))
    _, at, other_at = np.intersect1d(ids, other_ids, assume_unique=True, return_indices=True)
    return int(counts[at] @ other_counts[other_at])


def _equal_runs(one: np.ndarray, other: np.ndarray) -> list[tuple[int, int]]:
    """Where runs of 16 equal tokens that occur once in each side begin; both places ascend (patience diff)."""
    if min(len(one), len(other)) < _RUN:
        return []
    runs, other_runs = _once(_run_hashes(one)), _once(_run_hashes(other))
    _, at, other_at = np.intersect1d(runs.hashes, other_runs.hashes, assume_unique=True, return_indices=True)
    pairs = sorted(zip(runs.places[at].tolist(), other_runs.places[other_at].tolist(), strict=True))
    equal = [(i, j) for i, j in pairs if np.array_equal(one[i : i + _RUN], other[j : j + _RUN])]  # hashes may collide
    return _longest_ascending(equal)


class _Runs(NamedTuple):
    hashes: np.ndarray
    places: np.ndarray


def _run_hashes(ids: np.ndarray) -> np.ndarray:
    """uint64 (n - 15,): a hash of the 16 tokens from each place on."""
    count = len(ids) - _RUN + 1
    hashes = np.zeros(count, np.uint64)
    for offset in range(_RUN):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[offset : offset + count].astype(np.uint64)
        hashes ^= hashes >> np.uint64(29)
    return hashes


def _once(hashes: np.ndarray) -> _Runs:
    """The hashes that occur once, with their places."""
    unique, places, counts = np.unique(hashes, return_index=True, return_counts=True)
    return _Runs(unique[counts == 1], places[counts == 1])


def _longest_ascending(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest selection of pairs, whose first numbers ascend, with second numbers that ascend."""
    last_values: list[int] = []  # the smallest second number that ends a selection of each length
    last_pairs: list[int] = []
    before: list[int] = []
    for index, (_, value) in enumerate(pairs):
        length = bisect_left(last_values, value)
        before.append(last_pairs[length - 1] if length else -1)
        last_values[length : length + 1] = [value]
        last_pairs[length : length + 1] = [index]
    chosen: list[tuple[int, int]] = []
    index = last_pairs[-1] if last_pairs else -1
    while index >= 0:
        chosen.append(pairs[index])
        index = before[index]
    return chosen[::-1]


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    unequal = np.flatnonzero(one[:length] != other[:length])
    return int(unequal[0]) if len(unequal) else length


# What only a renderer of the model can tell about an episode: token texts, owners, drift, tool calls, grids.


@dataclass(frozen=True, slots=True)
class ModelView:
    """What the renderer tells about one episode.

    `owners` maps a node to int32 (tokens of the node,): the index of the owning message on the branch, -1 for scaffold
    of no message. `calls` maps a turn to its attempts at tool calls. `processed` maps the `mm_hash` of an item to its
    grid, or to why its pixels are not those of the sampler.
    """

    drift: list[BranchDrift] = field(default_factory=list)
    owners: dict[int, np.ndarray] = field(default_factory=dict)
    calls: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    processed: dict[str, dict[str, Any]] = field(default_factory=dict)


def model_view(
    trajectory: Trajectory, renderer: TemplateRenderer, tools: Sequence[Mapping[str, Any]] | None
) -> ModelView:
    """Render each branch again, parse each completion, and process each medium again."""
    view = ModelView()
    for leaf in trajectory.leaves():
        drift, rendered = branch_drift(trajectory, leaf, renderer, tools)
        view.drift.append(drift)
        if rendered is not None:
            _add_owners(view.owners, trajectory, leaf, drift, rendered)
    for index, turn in enumerate(trajectory.turns):
        path = trajectory.path(turn.node)
        prompt = np.concatenate([np.empty(0, np.int32), *(trajectory.nodes[node].token_ids for node in path[:-1])])
        view.calls[index] = _calls(renderer, trajectory.nodes[turn.node].token_ids, prompt, tools)
    for reference in trajectory.all_media():
        if reference.mm_hash not in view.processed:
            view.processed[reference.mm_hash] = _processed(reference, renderer)
    return view


def _add_owners(
    owners: dict[int, np.ndarray], trajectory: Trajectory, leaf: int, drift: BranchDrift, rendered: RenderedTokens
) -> None:
    """The owners of the nodes that lie wholly before the first difference: beyond it positions do not correspond."""
    equal = drift.differences[0].start if drift.differences else len(rendered)
    column = np.asarray(rendered.message_indices, np.int32)
    start = 0
    for index in trajectory.path(leaf):
        end = start + len(trajectory.nodes[index])
        if end > equal:
            break
        owners.setdefault(index, column[start:end])
        start = end


def _calls(
    renderer: TemplateRenderer, ids: np.ndarray, prompt: np.ndarray, tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    try:
        parsed = renderer.parse_response(ids.tolist(), tools=tools, prompt_ids=prompt.tolist())
    except RendererError as error:
        return [{"name": None, "arguments": None, "status": f"cannot be parsed: {error}", "raw": "", "span": None}]
    return [
        {
            "name": call.name,
            "arguments": display_json(call.arguments),
            "status": str(call.status),
            "raw": call.raw,
            "span": call.token_span,
        }
        for call in parsed.tool_calls
    ]


def _processed(reference: MediaReference, renderer: TemplateRenderer) -> dict[str, Any]:
    try:
        item = reference.derive(renderer.processors)
    except PixelMismatchError as error:
        return {"grid": None, "pixels": "different", "reason": str(error)}
    except (RolloutsError, RendererError) as error:
        return {"grid": None, "pixels": "unknown", "reason": str(error)}
    grid = next((item[name].reshape(-1).tolist() for name in item if name.endswith("grid_thw")), None)
    return {"grid": grid, "pixels": "equal", "reason": ""}
