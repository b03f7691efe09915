"""Model directories of models that see, made of real parts: tokenizer, chat template, the processor's numbers."""

import functools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import corpus

_STEPS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_QWEN3_VL: dict[str, Any] = {**_STEPS, **_HALF, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
_QWEN2_VL: dict[str, Any] = {**_STEPS, **_CLIP, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}

#: Name -> (template and tokenizer of the corpus, processor class, image numbers, video numbers).
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl": (
        "trl/qwen3_vl",
        "Qwen3VLProcessor",
        {**_QWEN3_VL, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
        {**_QWEN3_VL, "size": {"shortest_edge": 4096, "longest_edge": 25165824}, "fps": 2},
    ),
    "qwen3.5": (
        "trl/qwen3_5_nothink",
        "Qwen3VLProcessor",
        {**_QWEN3_VL, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
        {**_QWEN3_VL, "size": {"shortest_edge": 4096, "longest_edge": 25165824}, "fps": 2},
    ),
    "qwen2.5-vl": (
        "trl/qwen2_5_vl",
        "Qwen2_5_VLProcessor",
        {**_QWEN2_VL, "size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        {**_QWEN2_VL, "size": {"shortest_edge": 3136, "longest_edge": 12845056}},
    ),
}


@functools.cache
def vision_model_dir(name: str) -> Path:
    """The directory of a family, made once a machine; `AutoProcessor` of transformers loads it too."""
    template, processor, image, video = FAMILIES[name]
    video_type = "Qwen3VLVideoProcessor" if processor.startswith("Qwen3") else "Qwen2VLVideoProcessor"

    def files(made: Path) -> None:
        tokenizer = corpus.tokenizer_of(template)
        assert tokenizer is not None
        shutil.copytree(corpus.model_dir(tokenizer), made, dirs_exist_ok=True)
        for old in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
            (made / old).unlink(missing_ok=True)
        (made / "chat_template.jinja").write_text(corpus.templates()[template], encoding="utf-8")
        kind = "Qwen2VLImageProcessorFast"
        _write(made / "preprocessor_config.json", {"image_processor_type": kind, "processor_class": processor, **image})
        _write(
            made / "video_preprocessor_config.json",
            {"video_processor_type": video_type, "processor_class": processor, **video},
        )
        _write(made / "processor_config.json", {"processor_class": processor})

    return corpus.made_once(Path(tempfile.gettempdir()) / f"mmrollouts-vision-{os.getuid()}" / name, files)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
