"""One fault planted at a time, in a server or in the directory that it is compared with: which findings come of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from model_server import ModelVLLM, Served

from rollouts.cli.doctor import generation_checks, server_checks
from rollouts.cli.doctor.command import Options, run_checks
from rollouts.cli.doctor.target import Finding, Outcome

CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
IMAGES = ("image tokens", "image normalisation", "image features", "image request", "image pixels", "image cache")


@dataclass(frozen=True)
class Planted:
    """`flags` of the server; `edit` changes a copy of the directory that is passed as --model, `serve_edit` of the one
    that is served. `failed` and `absent`: the finding -> words that it or its cure must hold. `skipped`: what cannot be
    checked then. Nothing else may be found.
    """

    name: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[Path], None] | None = None
    serve_edit: Callable[[Path], None] | None = None
    options: Options = field(default_factory=lambda: Options(control=True))
    failed: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


def _settings(**changes: Any) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "preprocessor_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def _each(*edits: Callable[[Path], None]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        for one in edits:
            one(directory)

    return edit


def _template(directory: Path) -> None:
    path = directory / "chat_template.jinja"
    path.write_text("{{- 'Dear model, ' -}}" + path.read_text())


def _template_of_parts(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(
        "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}"
        "{%- for part in message.content -%}{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
        "{%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{{- '<|im_end|>\\n' -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


def _tokenizer(directory: Path) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    path.write_text(json.dumps(content))


def _weights(name: str, factor: float) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = directory / "model.safetensors"
        weights = load_file(path)
        (found,) = (each for each in weights if each.endswith(name))
        save_file({**weights, found: weights[found] * factor}, path, {"format": "pt"})

    return edit


def _in_bfloat16(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    rounded = {name: tensor.bfloat16().float() for name, tensor in load_file(path).items()}
    save_file(rounded, path, {"format": "pt"})


def _without_projection(directory: Path) -> None:
    """The last layers of the vision tower are zeros, as before training."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    weights = load_file(path)
    zeros = {name: tensor * 0 for name, tensor in weights.items() if "linear_fc2" in name and "merger" in name}
    assert zeros
    save_file(weights | zeros, path, {"format": "pt"})


def _scaled_positions(directory: Path) -> None:
    path = directory / "config.json"
    content = json.loads(path.read_text())
    content["text_config"]["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    path.write_text(json.dumps(content))


def _joint_file(directory: Path) -> None:
    """Both files of an image processor; the joint one takes precedence."""
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": settings | CLIP}))


def _without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def _without_images(directory: Path) -> None:
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        (directory / name).unlink()


GENERATING = ("text request", "image request", "image pixels", "image cache", "log-probabilities", "abort", "mismatch")

#: It neither renders nor takes images by name.
NOT_OF_RUST = ("image tokens", "image pixels", "image cache", "cache miss")

TABLE = [
    Planted("nothing"),
    Planted("nothing, and it normalises in its processor", {"pixel_dtype": "float32"}),
    Planted(
        "nothing, and its ranges of images include the tokens around them",
        {"counts_edges": True, "hides": "image_grid_thw"},
    ),
    Planted("nothing, and it makes fewer tensors of an image", {"hides": "image_grid_thw"}),
    Planted(
        "nothing, and more positions by scaling",
        {"max_model_len": 16384},
        edit=_scaled_positions,
        options=Options(control=True, reference_gigabytes=0),
        skipped=("mismatch", "image normalisation"),
    ),
    Planted(
        "--max-model-len 96",
        {"max_model_len": 96},
        failed={"served model": "--max-model-len 4096"},
        skipped=(
            "image tokens",
            "image normalisation",
            "image request",
            "image pixels",
            "image cache",
            "cache miss",
            "abort",
        ),
    ),
    Planted(
        "--max-model-len beyond the model's positions",
        {"max_model_len": 10**6},
        failed={"served model": "--max-model-len 4096"},
    ),
    Planted(
        "no --enable-scale-out",
        {"scale_out": False, "control": False},
        failed={"token endpoint": "--enable-scale-out"},
        absent={"control routes": "VLLM_SERVER_DEV_MODE=1"},
        skipped=(
            "running",
            "pixel dtype",
            "image tokens",
            *GENERATING,
            "image normalisation",
            "cache miss",
            "pause, resume",
        ),
    ),
    Planted(
        "no VLLM_SERVER_DEV_MODE",
        {"control": False},
        absent={"control routes": "VLLM_SERVER_DEV_MODE=1"},
        skipped=("running", "pause, resume"),
    ),
    Planted(
        "paused by somebody else",
        {"starts_paused": True},
        failed={"running": "/resume"},
        skipped=(*GENERATING, "image normalisation", "cache miss", "pause, resume"),
    ),
    Planted(
        "an engine that died",
        {"alive": False},
        failed={"reachable": "vllm serve"},
        skipped=(
            *("keep-alive", "version", "served model", "token endpoint", "control routes", "running", "pixel dtype"),
            *("text tokens", "image tokens", *GENERATING, "image normalisation", "cache miss", "pause, resume"),
        ),
    ),
    Planted("vLLM's Rust frontend", {"rust_frontend": "0.33.0"}, skipped=NOT_OF_RUST),
    Planted(
        "vLLM's Rust frontend, no VLLM_SERVER_DEV_MODE",
        {"rust_frontend": "0.33.0", "control": False},
        absent={"control routes": "VLLM_SERVER_DEV_MODE=1"},
        skipped=(*NOT_OF_RUST, "running", "pause, resume"),
    ),
    Planted("an old version", {"version": "0.19.1"}, failed={"version": "vllm>=0.31"}),
    Planted("a version that is not known yet", {"version": "1.0.0"}, failed={"version": "upgrade mmrollouts"}),
    Planted("another chat template", edit=_template, failed={"text tokens": "--chat-template"}),
    Planted(
        "--chat-template with a longer end", {"template_suffix": "Hm. "}, failed={"text tokens": "--chat-template"}
    ),
    Planted("another tokenizer", edit=_tokenizer, failed={"text tokens": "--tokenizer"}),
    Planted("a template that reads parts", edit=_template_of_parts, serve_edit=_template_of_parts),
    Planted(
        "a template that reads parts, with --chat-template-content-format string",
        {"converts_contents": False},
        edit=_template_of_parts,
        serve_edit=_template_of_parts,
        failed={"text tokens": "--chat-template-content-format auto"},
    ),
    Planted(
        "--limit-mm-per-prompt image 0",
        {"most_images": 0},
        absent={"pixel dtype": "--limit-mm-per-prompt"},
        skipped=("image tokens", "image request", "image pixels", "image cache", "image normalisation", "cache miss"),
    ),
    Planted("--limit-mm-per-prompt image 1", {"most_images": 1}, absent={"images per prompt": "--limit-mm-per-prompt"}),
    Planted(
        "/render of adjacent images fails",
        {"refuses_adjacent": True},
        absent={"adjacent images": "put text between images"},
    ),
    Planted(
        "--limit-mm-per-prompt image 1, and another template",
        {"most_images": 1, "template_suffix": "Hm. ", "counts_edges": True, "hides": "image_grid_thw"},
        failed={"text tokens": "--chat-template"},
        absent={"images per prompt": "--limit-mm-per-prompt"},
    ),
    Planted(
        "other limits of image sizes",
        edit=_settings(size={"shortest_edge": 256 * 256, "longest_edge": 2**22}),
        failed={"image tokens": "preprocessor_config.json"},
        skipped=("image features", "image pixels"),
    ),
    Planted(
        "another image_mean, where the server normalises on its device",
        edit=_settings(**CLIP),
        failed={"image normalisation": "[0.5, 0.5, 0.5]"},
        skipped=("mismatch, image",),
    ),
    Planted(
        "an image_mean that nobody has, where the server normalises on its device",
        serve_edit=_settings(image_mean=[0.1, 0.2, 0.3]),
        failed={"mismatch, image": "image_mean", "image normalisation": "[0.1, 0.2, 0.3]"},
    ),
    Planted(
        "another image_mean, where the server normalises on its device and nothing is scored",
        edit=_settings(**CLIP),
        options=Options(control=True, reference_gigabytes=0),
        failed={"image normalisation": "[0.5, 0.5, 0.5]"},
        skipped=("mismatch",),
    ),
    Planted(
        "another image_mean, where the server normalises in its processor",
        {"pixel_dtype": "float32"},
        edit=_settings(**CLIP),
        failed={"image normalisation": "[0.5, 0.5, 0.5]"},
        skipped=("image features", "image pixels"),
    ),
    Planted(
        "another image_mean in one of two files, where the server normalises in its processor",
        {"pixel_dtype": "float32"},
        edit=_joint_file,
        failed={"image normalisation": "/processor_config.json"},
        skipped=("image features", "image pixels"),
    ),
    Planted(
        "another image_mean, where the server makes the pixels of files in its processor",
        {"pixel_dtype": "float32", "adds": "num_patches"},
        edit=_settings(**CLIP),
        failed={"image normalisation": "[0.5, 0.5, 0.5]"},
        skipped=("image features", "image pixels", "mismatch, image"),
    ),
    Planted(
        "another image_mean and other weights of the vision tower, where the server takes floats",
        {"pixel_dtype": "float32"},
        edit=_each(_settings(**CLIP), _weights("patch_embed.proj.weight", 1.5)),
        failed={"image normalisation": "[0.5, 0.5, 0.5]", "mismatch, image": "vision tower"},
        skipped=("image features", "image pixels"),
    ),
    Planted(
        "another image_std, where the server normalises in its processor, served",
        {"pixel_dtype": "float32"},
        serve_edit=_settings(image_std=[0.25, 0.25, 0.25]),
        failed={"image normalisation": "image_std [0.25, 0.25, 0.25]"},
        skipped=("image features", "image pixels"),
    ),
    Planted(
        "other weights of the language model",
        edit=_weights("language_model.norm.weight", 1.05),
        failed={"mismatch, text": "vllm serve"},
        skipped=("mismatch, image", "image normalisation"),
    ),
    Planted(
        "--dtype bfloat16, which the server does not report",
        serve_edit=_in_bfloat16,
        failed={"mismatch, text": "--dtype float32"},
        skipped=("mismatch, image", "image normalisation"),
    ),
    Planted(
        "other weights of the vision tower",
        edit=_weights("patch_embed.proj.weight", 1.5),
        failed={"mismatch, image": "vision tower"},
        skipped=("image normalisation",),
    ),
    Planted(
        "--logprobs-mode processed_logprobs",
        {"logprobs_mode": "processed_logprobs"},
        failed={"log-probabilities": "--logprobs-mode raw_logprobs"},
        skipped=("mismatch", "image normalisation"),
    ),
    Planted(
        "--logprobs-mode raw_logits",
        {"logprobs_mode": "raw_logits"},  # above 0, which the engine refuses
        failed={"text request": "--logprobs-mode raw_logprobs"},
        skipped=(*(check for check in GENERATING if check != "text request"), "cache miss", "image normalisation"),
    ),
    Planted("--mm-processor-cache-gb 0", {"keeps_images": False}, failed={"image cache": "--mm-processor-cache-gb 0"}),
    Planted("a cache that mixes up images", {"mixes_up": True}, failed={"image cache": "vllm serve"}),
    Planted("answers about images that it never saw", {"unknown_status": 200}, failed={"cache miss": "upgrade vllm"}),
    Planted("aborts that reach another process", {"hears_aborts": False}, failed={"abort": "--api-server-count 1"}),
    Planted(
        "a model that does not look at images",
        {"blind": True},
        failed={"image request": "trained checkpoint"},
        skipped=("image pixels", "image cache", "cache miss", "mismatch, image", "image normalisation"),
    ),
    Planted(
        "weights that do not look at images",
        edit=_without_projection,
        serve_edit=_without_projection,
        failed={"image request": "trained checkpoint", "mismatch, image": "projection holds zeros"},
        skipped=("image pixels", "image cache", "cache miss", "image normalisation"),
    ),
    Planted(
        "--kv-cache-dtype fp8",
        {"drifts": -0.01},
        failed={"log-probabilities": "--kv-cache-dtype"},
        skipped=("mismatch", "image normalisation"),
    ),
    Planted("--model without weights", edit=_without_weights, skipped=("mismatch", "image normalisation")),
    Planted(
        "--model without a processor",
        edit=_without_images,
        skipped=(
            *("pixel dtype", "image tokens", "image request", "image pixels", "image cache", "image normalisation"),
            "cache miss",
        ),
    ),
]


@pytest.fixture(scope="module")
def sound(tiny_model_dir: Path) -> Served:
    return Served(tiny_model_dir)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """So small a model is slower on several, which wait for each other wherever the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_checks, "HttpLimits", lambda: type("Limits", (), {"keepalive_seconds": 0.05}))
    monkeypatch.setattr(generation_checks, "_ABORT_AFTER_SECONDS", (0.05, 0.02))


def _copy(source: Path, edit: Callable[[Path], None] | None, target: Path) -> Path:
    if edit is None:
        return source
    shutil.copytree(source, target)
    edit(target)
    return target


def _of(findings: list[Finding], outcome: Outcome) -> list[Finding]:
    return [finding for finding in findings if finding.outcome is outcome]


@pytest.mark.parametrize("planted", TABLE, ids=lambda planted: planted.name)
async def test_a_planted_fault_is_found_with_its_cure_and_nothing_else(
    planted: Planted, sound: Served, tmp_path: Path
) -> None:
    compared = _copy(sound.directory, planted.edit, tmp_path / "compared")
    served = (
        sound if planted.serve_edit is None else Served(_copy(sound.directory, planted.serve_edit, tmp_path / "served"))
    )
    async with ModelVLLM(served, **planted.flags) as server:
        paused = server.paused
        findings = await run_checks(server.base_url, compared, planted.options)
        assert server.paused is paused
    for outcome, expected in ((Outcome.FAILED, planted.failed), (Outcome.ABSENT, planted.absent)):
        found = {finding.check: f"{finding.seen} -> {finding.cure}" for finding in _of(findings, outcome)}
        assert {check: words in found.get(check, "") for check, words in expected.items()} == dict.fromkeys(
            expected, True
        ), found
        assert found.keys() == expected.keys(), found
    if "rust_frontend" in planted.flags:
        assert "Rust frontend 0.33.0" in next(finding.seen for finding in findings if finding.check == "version")
        assert not any("--enable-scale-out" in finding.cure for finding in findings)
    skipped = _of(findings, Outcome.SKIPPED)
    assert sorted(finding.check for finding in skipped) == sorted(planted.skipped), skipped
    assert all(finding.seen for finding in skipped)
    assert all(finding.cure for finding in _of(findings, Outcome.FAILED))
    assert len({finding.check for finding in findings}) == len(findings)
