"""How the media values of `renderers` travel: they are no types of this package, and every message may hold them."""

from __future__ import annotations

from renderers.media.item import ExpansionPiece, MediaItem, TensorField
from renderers.media.pixel_scale import PixelScale
from renderers.rendered import MultiModalData, PlaceholderRange
from renderers.vision.patches import StillPatches
from transport.wire.registry import wire_type

wire_type("renderers.ExpansionPiece")(ExpansionPiece)
wire_type("renderers.MediaItem")(MediaItem)
wire_type("renderers.MultiModalData")(MultiModalData)
wire_type("renderers.PixelScale")(PixelScale)
wire_type("renderers.PlaceholderRange")(PlaceholderRange)
wire_type("renderers.StillPatches")(StillPatches)
wire_type("renderers.TensorField")(TensorField)
