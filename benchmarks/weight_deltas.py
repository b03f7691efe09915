"""The bytes and the time of a weight delta beside those of a whole update.

    python benchmarks/weight_deltas.py                   # LocalEngine
    python benchmarks/weight_deltas.py --vllm VENV       # a vLLM that is installed in VENV, on its CPU

A random Qwen3 of 48 layers in files of bfloat16. 2 % of its values change: at random places of all tensors,
as an optimizer of bfloat16 weights leaves them, or in one layer; twice, of which the second delta changes the
first. Each time is the least of three.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from rollouts import LocalEngine
from rollouts.engines.vllm import VLLMEngine
from rollouts.engines.weight_deltas import write_weight_delta

SIZES = {"num_hidden_layers": 48, "vocab_size": 4096}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}


def size(directory: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in directory.glob(pattern))


def forgotten(directory: Path) -> None:
    """Let the system read the files from the disk when they are read next, and not from its memory."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def seconds(engine, directory: Path, version: str) -> float:
    forgotten(directory)
    start = time.perf_counter()
    await engine.update_weights(directory, version)
    return time.perf_counter() - start


async def measure(name: str, engine, base: Path, deltas: dict[str, list[Path]], initial: str) -> None:
    whole = min([await seconds(engine, base, initial) for _ in range(3)])
    bytes_of_whole = size(base, "*.safetensors")
    print(f"{name:12} {'whole':10} {bytes_of_whole / 1e6:8.1f} MB {whole:7.3f} s")
    for kind, directories in deltas.items():
        times = []
        for _ in range(3):
            times.append([await seconds(engine, directory, directory.name) for directory in directories])
            await engine.update_weights(base, initial)
        for directory, found in zip(directories, map(min, zip(*times, strict=True)), strict=True):
            part = size(directory, "delta.*")
            shares = f"{part / bytes_of_whole:6.1%} of the bytes, {found / whole:6.1%} of the time"
            print(f"{name:12} {kind:10} {part / 1e6:8.1f} MB {found:7.3f} s  {shares}")


def written(base: Path, root: Path) -> dict[str, list[Path]]:
    torch.manual_seed(1)
    weights = {}
    for path in base.glob("*.safetensors"):
        weights |= load_file(path)
    deltas = {"scattered": [], "one layer": []}
    for kind, directories in deltas.items():
        new, version, origin = weights, "initial", base
        for number in range(2):
            if kind == "scattered":
                new = {name: torch.where(torch.rand(each.shape) < 0.02, each * 1.5, each) for name, each in new.items()}
            else:
                new = {name: each * 1.5 for name, each in new.items() if name.startswith("model.layers.7.")}
            start = time.perf_counter()
            directory = root / f"{kind.replace(' ', '-')}-{number}"
            write_weight_delta(new, directory, base=version, base_directory=origin)
            print(f"written      {kind:10} {time.perf_counter() - start:20.3f} s")
            version, origin = directory.name, directory
            directories.append(directory)
    return deltas


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, metavar="VENV")
    parser.add_argument("--hidden", type=int, default=768, help="the width of the model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        torch.manual_seed(0)
        widths = {"hidden_size": arguments.hidden, "intermediate_size": 3 * arguments.hidden}
        config = transformers.Qwen3Config(**widths, **SIZES, **HEADS, dtype="bfloat16")
        with torch.device("meta"):
            model = transformers.Qwen3ForCausalLM(config).bfloat16()
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.02)
        start = time.perf_counter()
        model.save_pretrained(root / "base")
        print(f"written      {'whole':10} {time.perf_counter() - start:20.3f} s")
        deltas = written(root / "base", root)
        if not arguments.vllm:
            engine = LocalEngine.from_pretrained(root / "base")
            await engine.update_weight_version("initial")
            await measure("LocalEngine", engine, root / "base", deltas, "initial")
            await engine.close()
            return
        del model
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "real"))
        import vllm_server

        vllm_server.MODES["bench"] = vllm_server.Mode(dtype="bfloat16", arguments=("--skip-tokenizer-init",))
        server = vllm_server.VLLMServer.start(arguments.vllm, root / "base", "bench", root)
        try:
            async with VLLMEngine(server.base_url) as served:
                await measure("vLLM, CPU", served, root / "base", deltas, "initial")
        finally:
            server.stop()


if __name__ == "__main__":
    asyncio.run(main())
