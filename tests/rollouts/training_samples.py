"""Training samples without a renderer, of random tokens and with images of random patches, for tests of batches."""

import numpy as np
from hypothesis import strategies as st

from renderers import MediaItem, MediaSource, PlaceholderRange
from renderers.media.item import TensorField
from rollouts.training import TrainingSample

PAD = 9


def image(patches=4, *, modality="image", seed=0):
    """An item of `patches` random uint8 patches; four patches are one token."""
    pixels = np.random.default_rng(seed).integers(0, 256, (patches, 12), dtype=np.uint8)
    source = MediaSource.of(pixels.tobytes())
    name = "pixel_values" if modality == "image" else "pixel_values_videos"
    tensors = {name: pixels, f"{modality}_grid_thw": np.array([1, 2, patches // 2])}
    return MediaItem(modality, f"{source.digest[:12]}-test", source, tensors, patches // 4, None)


def sound(frames=8, *, tokens=2, mask=True, seed=0):
    """An item of `frames` random frames of 4 frequencies, as Whisper's extractor lays them out."""
    features = np.random.default_rng(seed).normal(size=(4, frames)).astype(np.float32)
    source = MediaSource.of(features.tobytes())
    tensors = {"input_features": features, **({"feature_attention_mask": np.ones(frames, np.int64)} if mask else {})}
    fields = dict.fromkeys(tensors, TensorField("batched", 0.0))
    return MediaItem("audio", f"{source.digest[:12]}-test", source, tensors, tokens, None, fields)


def sample(length, *, images=(), name="s", seed=0, trained=None):
    """A sample of `length` random tokens; its images stand next to each other from token 1; the last token is trained,
    or those of `trained`."""
    random = np.random.default_rng(seed + 1000 * length)
    mask = np.zeros(length, bool)
    mask[slice(*((length - 1, length) if trained is None else trained))] = length > 1
    media, offset = [], 1
    for item in images:
        media.append((item, PlaceholderRange(offset, item.num_tokens)))
        offset += item.num_tokens
    return TrainingSample(
        token_ids=random.integers(10, 1000, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -random.random(length), 0).astype(np.float32),
        advantages=np.where(mask, random.standard_normal(length), 0).astype(np.float32),
        media=tuple(media),
        name=name,
    )


def samples_of(lengths):
    return [sample(length, name=f"s{number}", seed=number) for number, length in enumerate(lengths)]


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=7)
LAYOUTS = st.sampled_from(
    [
        {"layout": layout, "multiple_of": multiple, **({"side": side} if layout == "padded" else {})}
        for layout in ("padded", "packed")
        for side in ("left", "right")
        for multiple in (1, 4)
    ]
)


class Block:
    """As much of an image as positions need: a grid of patches, and a token for each four of them."""

    modality = "image"
    has_sound = False

    def __init__(self, height, width):
        self.grid = np.array([1, height, width])
        self.num_tokens = height * width // 4

    def __getitem__(self, name):
        return self.grid

    def __contains__(self, name):
        return name == "image_grid_thw"

    def __iter__(self):
        return iter(["image_grid_thw"])
