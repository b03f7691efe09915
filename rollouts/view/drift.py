"""Where the tokens of a branch differ from a full render of its messages."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Final, NamedTuple

import numpy as np

from renderers import RenderedTokens, Renderer, TemplateRenderer
from renderers.errors import RendererError
from rollouts.errors import PixelMismatchError, RolloutsError
from rollouts.trajectory.media_reference import MediaReference
from rollouts.trajectory.tree import Trajectory
from rollouts.view.display_json import display_json

#: Bounds the work of the comparison of one branch: some seconds.
_MAX_WORK: Final = 4096 * 4096
#: Longer parts are first compared by runs of about this many tokens.
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

    `rendered` is the number of tokens of the render, `extra_end` how many tokens it has after the branch's
    last one: scaffold that the template prints after the last turn, which is no difference.
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

    The time is bounded: see `Difference.is_coarse`.
    """
    one, other = np.asarray(ids, np.int64), np.asarray(rendered, np.int64)
    whole = _without_equal_ends(one, other, _Part(0, len(one), 0, len(other)))
    parts = [whole]
    if (whole.end - whole.start) * (whole.rendered_end - whole.rendered_start) > _MAX_WORK:
        parts = [_without_equal_ends(one, other, part) for part in _changed_parts(one, other, whole)]
    work_left = _MAX_WORK
    differences = []
    for part in parts:
        tokens, rendered_tokens = (
            one[part.start : part.end].tolist(),
            other[part.rendered_start : part.rendered_end].tolist(),
        )
        work = _work(tokens, rendered_tokens)
        if work > work_left or not (tokens and rendered_tokens):
            if tokens or rendered_tokens:
                is_coarse = work > work_left
                differences.append(Difference(part.start, part.end, part.rendered_start, rendered_tokens, is_coarse))
            continue
        work_left -= work
        differences += [
            Difference(part.start + a, part.start + b, part.rendered_start + c, rendered_tokens[c:d])
            for a, b, c, d in _changes(tokens, rendered_tokens)
        ]
    return differences


class _Part(NamedTuple):
    """The ranges of both sides that correspond."""

    start: int
    end: int
    rendered_start: int
    rendered_end: int


def _changes(one: Sequence[Hashable], other: Sequence[Hashable]) -> list[_Part]:
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    return [_Part(*places) for tag, *places in matcher.get_opcodes() if tag != "equal"]


def _work(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """What a comparison takes: it grows with the product of the lengths, and with the pairs of equal items."""
    counts = Counter(other)
    return len(one) * len(other) + 32 * sum(counts[item] for item in one)


def _changed_parts(one: np.ndarray, other: np.ndarray, whole: _Part) -> list[_Part]:
    """The parts that differ of a long one, found by comparing runs of tokens that end at the same tokens everywhere."""
    runs = _runs(one[whole.start : whole.end])
    rendered_runs = _runs(other[whole.rendered_start : whole.rendered_end])
    if _work(runs, rendered_runs) > 4 * _MAX_WORK:  # a branch of 100,000 tokens
        return [whole]
    places = np.cumsum([whole.start, *map(len, runs)]).tolist()
    rendered_places = np.cumsum([whole.rendered_start, *map(len, rendered_runs)]).tolist()
    return [
        _Part(places[a], places[b], rendered_places[c], rendered_places[d])
        for a, b, c, d in _changes(runs, rendered_runs)
    ]


def _runs(ids: np.ndarray) -> list[tuple[int, ...]]:
    """The tokens in runs, each of which ends with an id that is a multiple of 16."""
    return [tuple(run.tolist()) for run in np.split(ids, np.flatnonzero(ids % _RUN == 0) + 1)]


def _without_equal_ends(one: np.ndarray, other: np.ndarray, part: _Part) -> _Part:
    one, other = one[part.start : part.end], other[part.rendered_start : part.rendered_end]
    first = _common_prefix(one, other)
    last = _common_prefix(one[first:][::-1], other[first:][::-1])
    return _Part(part.start + first, part.end - last, part.rendered_start + first, part.rendered_end - last)


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    unequal = np.flatnonzero(one[:length] != other[:length])
    return int(unequal[0]) if len(unequal) else length


# What only a renderer of the model can tell about an episode: token texts, owners, drift, tool calls, grids.


@dataclass(frozen=True, slots=True)
class ModelView:
    """What the renderer tells about one episode.

    `owners` maps a node to int32 (tokens of the node,): the index of the owning message on the branch, -1
    for scaffold of no message. `calls` maps a turn to its attempts at tool calls. `processed` maps the
    `mm_hash` of an item to its grid, or to why its pixels are not those of the sampler.
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
