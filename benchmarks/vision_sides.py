"""The two sides of `vision.py` that take whole messages, each in its own process: both import as `renderers`.

python benchmarks/vision_sides.py ours|peer MODEL_DIR
"""

import sys
import time
from collections.abc import Mapping
from typing import Any

from render_sides import serve


def _messages(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in job["urls"]]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def serve_ours(model_dir: str) -> None:
    # Imported here: in the peer's process the same name is the other package.
    from renderers import load_renderer

    renderer = load_renderer(model_dir)

    def render(job: Mapping[str, Any]) -> list[int]:
        return renderer.render(_messages(job), add_generation_prompt=True).token_ids

    def held(job: Mapping[str, Any]) -> int:
        media = renderer.render(_messages(job), add_generation_prompt=True).multi_modal_data
        assert media is not None
        return max(item.nbytes + item.source.nbytes for item, _ in media.items_with_ranges())

    serve(render, held, clock=time.perf_counter)


def serve_peer(model_dir: str) -> None:
    from transformers import AutoTokenizer

    from renderers import Qwen3VLRendererConfig, create_renderer  # type: ignore[attr-defined]

    renderer = create_renderer(AutoTokenizer.from_pretrained(model_dir), Qwen3VLRendererConfig())

    def render(job: Mapping[str, Any]) -> Any:
        return renderer.render(_messages(job), add_generation_prompt=True).token_ids

    def held(job: Mapping[str, Any]) -> int:
        render(job)
        out, _ = list(renderer._image_cache.values())[-1]  # type: ignore[attr-defined]
        return sum(array.nbytes for array in out.values())

    serve(render, held, clock=time.perf_counter)


if __name__ == "__main__":
    {"ours": serve_ours, "peer": serve_peer}[sys.argv[1]](sys.argv[2])
