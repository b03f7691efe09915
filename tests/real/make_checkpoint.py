"""A tiny Qwen3-VL checkpoint that vLLM serves: python tests/real/make_checkpoint.py DIRECTORY [--dtype bfloat16]

The one of `rollouts.testing`, so that a renderer, `LocalEngine` and a server share it.
"""

import argparse
from pathlib import Path

from rollouts.engines.vllm import write_tied_head
from rollouts.testing import tiny_qwen3_vl

# With a small output layer vLLM 0.32 uses the AMX registers without requesting them from the kernel: on machines that
# have them, the first bfloat16 request then ends with SIGILL.
_BFLOAT16_VOCABULARY = 16384


def make_checkpoint(directory: Path, dtype: str = "float32", seed: int = 0) -> Path:
    """Write the checkpoint to be served with `--dtype dtype`; returns the directory."""
    tiny_qwen3_vl(directory, seed=seed)
    if dtype == "bfloat16":
        _widen_vocabulary(directory, _BFLOAT16_VOCABULARY, seed)
    write_tied_head(directory)  # else a server that reloads the checkpoint keeps its previous output layer
    return directory


def _widen_vocabulary(directory: Path, rows: int, seed: int) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_checkpoint(arguments.directory, arguments.dtype, arguments.seed))
