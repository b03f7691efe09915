"""Where the wire types of this distribution are declared, so that a receiver need not import them before it decodes.

Nothing that a message says is ever imported: the name in it is a key of this table, and the modules are those written
here, parts of the same installation. A name that is not here is known only once a program has imported its declaration.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# Strings, because `transport` imports nothing from `rollouts`.
DECLARED_IN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "renderers.ExpansionPiece": "transport.wire.media_values",
        "renderers.MediaItem": "transport.wire.media_values",
        "renderers.MultiModalData": "transport.wire.media_values",
        "renderers.PixelScale": "transport.wire.media_values",
        "renderers.PlaceholderRange": "transport.wire.media_values",
        "renderers.StillPatches": "transport.wire.media_values",
        "renderers.TensorField": "transport.wire.media_values",
        "rollouts.AbsentSource": "rollouts.trajectory.pixel_forms",
        "rollouts.Bfloat16Array": "rollouts.bfloat16",
        "rollouts.FinishReason": "rollouts.engines.protocol",
        "rollouts.MediaReference": "rollouts.trajectory.token_node",
        "rollouts.MismatchReport": "rollouts.training.mismatch",
        "rollouts.PackedEpisodes": "rollouts.trajectory.pixel_forms",
        "rollouts.PackedItem": "rollouts.trajectory.pixel_forms",
        "rollouts.PackedSample": "rollouts.training.packed_samples",
        "rollouts.PackedSamples": "rollouts.training.packed_samples",
        "rollouts.Provenance": "rollouts.trajectory.provenance",
        "rollouts.TokenNode": "rollouts.trajectory.token_node",
        "rollouts.Trajectory": "rollouts.trajectory.tree",
        "rollouts.Turn": "rollouts.trajectory.tree",
        "rollouts.WeightSpan": "rollouts.engines.protocol",
        "rollouts.demo.Failed": "rollouts.demo.trainer_process",
        "rollouts.demo.Learn": "rollouts.demo.messages",
        "rollouts.demo.Learned": "rollouts.demo.messages",
        "rollouts.demo.WarmStart": "rollouts.demo.messages",
        "transport.ShortenedMedia": "transport.interop.step_media",
    }
)


def import_declaration(name: str) -> str:
    """Import the module that declares the wire type `name`; returns the module's name, "" if none is known.

    Raises `ImportError` where the module needs what is not installed.
    """
    module = DECLARED_IN.get(name, "")
    if module:
        importlib.import_module(module)
    return module
