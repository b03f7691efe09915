"""An image processor of your own: every image is fitted into a square, so that each has the same number of tokens.

    python examples/custom_processor.py

Runs an episode with images of several sizes, trains on the pixels of the same processor, and shows that a trainer with
the model's own processor is refused. The model is tiny and has random weights.
"""

import asyncio
import tempfile

import numpy as np
import PIL
import torch
from PIL import ImageOps
from transformers import AutoModelForImageTextToText

from renderers import MediaItem, MediaPolicy, MediaStore, load_renderer
from renderers.media.decoding import decode_image
from renderers.media.item import PixelScale, TensorField
from renderers.vision.patches import still_patches
from renderers.vision.processor import StoringProcessor
from rollouts import LocalEngine, SamplingParams, StepResult, run_episode
from rollouts.errors import PixelMismatchError
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import TrainingBatch, mismatch_report, samples_from_trajectory, token_logprobs

PATCH, MERGE, FRAMES = 8, 2, 2  # of the model's vision tower: preprocessor_config.json has them
SIZES = ((97, 61), (40, 200), (64, 64))  # width, height


class SquareProcessor(StoringProcessor):
    """Scales an image to fit into `side` x `side` pixels, on grey; patches and tensors are those of Qwen-VL."""

    modality = "image"
    marker = embed_token = "<|image_pad|>"  # what the template prints, and what stands for a row of features

    def __init__(self, side, policy=None, store=None):
        # Everything that affects the pixels is in the fingerprint: a trainer with other pixels is refused.
        super().__init__(f"square-{side}-pillow-{PIL.__version__}", policy or MediaPolicy(), store or MediaStore())
        self.side = side

    def make_item(self, source):
        image = decode_image(source, self.policy)  # RGB and upright, within the limits of the policy
        square = ImageOps.pad(image, (self.side, self.side), color=(128, 128, 128))
        patches = still_patches(np.asarray(square).transpose(2, 0, 1), PATCH, MERGE, FRAMES)
        rows = self.side // PATCH
        return MediaItem(
            self.modality,
            self.mm_hash(source),
            source,
            {"pixel_values": patches, "image_grid_thw": np.array([1, rows, rows], np.int64)},
            num_tokens=(rows // MERGE) ** 2,
            scale=PixelScale(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),  # makes the model's floats of uint8 pixels
            fields={"pixel_values": TensorField("flat"), "image_grid_thw": TensorField("batched")},
        )


class LookAtImages:
    """One turn for each size."""

    def reset(self, seed):
        self.images = [np.random.default_rng(seed).integers(0, 255, (h, w, 3), np.uint8) for w, h in SIZES]
        return [self.question()]

    def step(self, assistant):
        return StepResult([self.question()]) if self.images else StepResult(done=True)

    def question(self):
        content = [{"type": "image", "image": self.images.pop()}, {"type": "text", "text": "What is this?"}]
        return {"role": "user", "content": content}


def lengths(trajectory):
    """The number of tokens of each image."""
    return [each.placeholder.length for each in trajectory.media(trajectory.leaves()[0])]


async def play(engine, renderer):
    sampling = SamplingParams(max_tokens=8, seed=0)
    return await run_episode(LookAtImages(), engine=engine, renderer=renderer, sampling=sampling, max_turns=3)


async def main(directory):
    model_own = load_renderer(directory)
    square = load_renderer(directory, processors={"image": SquareProcessor(side=64)})
    engine = LocalEngine.from_pretrained(directory)
    print(f"tokens of the images, the model's own processor: {lengths(await play(engine, model_own))}")
    trajectory = await play(engine, square)
    print(f"tokens of the images, the square processor:      {lengths(trajectory)}")
    await engine.close()

    samples = samples_from_trajectory(trajectory, advantage=1.0, processors=square.processors)
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        report = mismatch_report(batch, token_logprobs(model, batch))
    print(f"mismatch over {report.tokens} sampled tokens: {report.max_abs:.1e} nats")
    try:
        samples_from_trajectory(trajectory, advantage=1.0, processors=model_own.processors)
    except PixelMismatchError as refusal:
        print(f"a trainer with the model's own processor: {refusal}")
        return trajectory, report, refusal
    raise AssertionError("other pixels were accepted")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as model_directory:
        asyncio.run(main(tiny_qwen3_vl(model_directory)))
