"""What only a renderer of the model can tell about an episode: token texts, owners, drift, tool calls, grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from renderers import RenderedTokens, TemplateRenderer
from renderers.errors import RendererError
from rollouts.errors import PixelMismatchError, RolloutsError
from rollouts.trajectory.token_node import MediaReference
from rollouts.trajectory.tree import Trajectory
from rollouts.view.display_json import display_json
from rollouts.view.drift import BranchDrift, branch_drift


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
    """Render each branch again, parse each completion, and process each image and video again."""
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
