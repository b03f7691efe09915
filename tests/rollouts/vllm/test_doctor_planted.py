"""One fault planted at a time, in a server or in the directory that it is compared with: which findings come of it."""

import base64
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from engine_server import EngineVLLM
from fake_http import error_response, json_response
from fake_responses import change
from fake_server import GENERATE, RENDER, Step
from transformers import AutoModelForImageTextToText

from renderers import load_renderer, model_template
from rollouts.cli.doctor.command import run_checks

CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@dataclass(frozen=True)
class Planted:
    """`flags` of the server; `steps` answer all requests to a path; `contents_as_given`: the server's templates get
    contents as they come. `edit` changes a copy of the directory that is passed as --model, `serve_edit` of the one
    that is served. `failed` and `absent`: the finding -> words that it or its cure must hold. `skipped`: what cannot be
    checked then. Nothing else may be found.
    """

    name: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, Step] = field(default_factory=dict)
    contents_as_given: bool = False
    edit: Callable[[Path], None] | None = None
    serve_edit: Callable[[Path], None] | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


def _settings(**changes: Any) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "preprocessor_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

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


def _exchanged(one: str, other: str) -> Callable[[Path], None]:
    """Two tokens of the tokenizer have each other's id."""

    def edit(directory: Path) -> None:
        path = directory / "tokenizer.json"
        content = json.loads(path.read_text())
        ids = content["model"]["vocab"]
        if one in ids:
            ids[one], ids[other] = ids[other], ids[one]
        else:
            first, second = (
                next(each for each in content["added_tokens"] if each["content"] == name) for name in (one, other)
            )
            first["content"], second["content"] = other, one
        path.write_text(json.dumps(content))

    return edit


def _weights(name: str, factor: float) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = directory / "model.safetensors"
        weights = load_file(path)
        (found,) = (each for each in weights if each.endswith(name))
        save_file({**weights, found: weights[found] * factor}, path, {"format": "pt"})

    return edit


def _without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def _without_images(directory: Path) -> None:
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        (directory / name).unlink()


# Steps.


def _edit_tensors(content: Mapping[str, Any], edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the encoded tensors of images in a request or a response, if there are any."""
    images = ((content.get("features") or {}).get("kwargs_data") or {}).get("image", [])
    for index, encoded in enumerate(images):
        if encoded is not None:
            item = msgpack.unpackb(base64.b64decode(encoded))
            edit(item)
            images[index] = base64.b64encode(msgpack.packb(item)).decode()


async def _blind(server: Any, seen: Any, connection: Any) -> Any:
    def grey(item: dict[str, Any]) -> None:
        data = item["pixel_values"]["data"]
        data[2] = msgpack.ExtType(3, b"\x7f" * len(data[2].data))

    _edit_tensors(seen.json, grey)
    return await server.respond(seen)


def _counts_edges(content: Any) -> None:
    """Ranges of images include the tokens around the features, and a tensor that others make is not made."""
    for place in content["features"]["mm_placeholders"]["image"] if "features" in content else ():
        place["offset"] -= 1
        place["length"] += 2
    _edit_tensors(content, lambda item: item.pop("image_grid_thw"))


def _tensor_of_its_own(content: Any) -> None:
    _edit_tensors(content, lambda item: item.update(num_patches=item["image_grid_thw"]))


def _logprobs(changed: Callable[[float, float], float]) -> Step:
    """Log-probabilities of sampled tokens as `changed` by the temperature."""

    async def step(server: Any, seen: Any, connection: Any) -> Any:
        temperature = seen.json.get("sampling_params", {}).get("temperature") or 1.0

        def edit(content: Any) -> None:
            for choice in content.get("choices", ()):
                for entry in choice["logprobs"]["content"]:
                    entry["logprob"] = changed(entry["logprob"], temperature)

        return await change(edit)(server, seen, connection)

    return step


async def _never_stops(server: Any, seen: Any, connection: Any) -> Any:
    seen.json.get("sampling_params", {}).pop("stop_token_ids", None)
    return await server.respond(seen)


async def _first_token_twice(server: Any, seen: Any, connection: Any) -> Any:
    """Of prompts of text; the log-probabilities of a prompt are those of the tokens that were sent."""
    doubled = seen.json["token_ids"] and not {"features", "content_parts"} & seen.json.keys()
    if doubled:
        seen.json["token_ids"].insert(0, seen.json["token_ids"][0])

    def edit(content: Any) -> None:
        if doubled and content["prompt_logprobs"] is not None:
            del content["prompt_logprobs"][1]

    return await change(edit)(server, seen, connection)


MEDIA = ("image rendering", "image request")
GENERATING = ("text request", "stop token", "image request", "log-probabilities", "mismatch")

TABLE = [
    Planted("nothing"),
    Planted("nothing, and it normalises in its processor", {"pixel_dtype": "float32"}),
    Planted(
        "nothing, and its ranges of images include the tokens around them",
        steps={RENDER: change(_counts_edges)},
    ),
    Planted(
        "nothing, and it has tensors of its own",
        {"pixel_dtype": "float32"},
        {RENDER: change(_tensor_of_its_own)},
        skipped=("image rendering",),
    ),
    Planted(
        "--max-model-len 96",
        {"max_model_len": 96},
        failed={"served model": "--max-model-len 8192"},
        skipped=MEDIA,
    ),
    Planted(
        "no --enable-scale-out",
        {"scale_out": False, "control": False},
        failed={"token endpoint": "--enable-scale-out"},
        absent={"control routes": "VLLM_SERVER_DEV_MODE=1"},
        skipped=("image rendering", *GENERATING),
    ),
    Planted("no VLLM_SERVER_DEV_MODE", {"control": False}, absent={"control routes": "VLLM_SERVER_DEV_MODE=1"}),
    Planted(
        "paused by somebody else",
        steps={"/is_paused": json_response({"is_paused": True})},
        failed={"control routes": "/resume"},
        skipped=GENERATING,
    ),
    Planted(
        "an engine that died",
        steps={"/health": error_response(503)},
        failed={"server": "vllm serve"},
        skipped=(
            "served model",
            "token endpoint",
            "control routes",
            "tokenizer",
            "text tokens",
            "image rendering",
            *GENERATING,
        ),
    ),
    Planted("vLLM's Rust frontend", {"rust_frontend": "0.33.0"}, skipped=("image rendering",)),
    Planted("an old version", {"version": "0.19.1"}, absent={"server": "one of these versions"}),
    Planted(
        "another chat template",
        edit=_template,
        failed={"text tokens": "--chat-template"},
        skipped=("image rendering",),
    ),
    *(
        Planted(
            f"a tokenizer with {one} and {other} exchanged",
            edit=_exchanged(one, other),
            failed={"tokenizer": "the tokenizers differ: start `vllm serve` with --tokenizer"},
            skipped=("text tokens", "image rendering"),
        )
        for one, other in (("a", "e"), ("<|im_start|>", "<|im_end|>"))
    ),
    Planted(
        "a server that tokenizes into no list of ids",
        steps={"/tokenize": json_response({"tokens": [[1]]})},
        failed={"tokenizer": ""},
        skipped=("text tokens", "image rendering"),
    ),
    Planted("a template that reads parts", edit=_template_of_parts, serve_edit=_template_of_parts),
    Planted(
        "a template that reads parts, with --chat-template-content-format string",
        contents_as_given=True,
        edit=_template_of_parts,
        serve_edit=_template_of_parts,
        failed={"text tokens": "--chat-template-content-format auto"},
        skipped=("image rendering",),
    ),
    Planted(
        "--limit-mm-per-prompt image 0",
        steps={RENDER: error_response(400, "At most 0 image(s) may be provided in one prompt.")},
        absent={"image rendering": "--limit-mm-per-prompt"},
        skipped=("image request",),
    ),
    Planted(
        "other limits of image sizes",
        edit=_settings(size={"shortest_edge": 256 * 256, "longest_edge": 2**22}),
        failed={"image rendering": "files of the processor"},
        skipped=("image request",),
    ),
    Planted(
        "another image_mean, where the server normalises on its device",
        serve_edit=_settings(**CLIP),
        failed={"mismatch": "too large for image: other normalisation: equal when computed with images"},
    ),
    Planted(
        "another image_mean, where the server normalises in its processor",
        {"pixel_dtype": "float32"},
        edit=_settings(**CLIP),
        failed={"image rendering": "pixel_values is up to"},
        skipped=("image request",),
    ),
    Planted(
        "logits that are multiplied by a number",
        edit=_weights("language_model.norm.weight", 1.05),
        failed={
            "mismatch": "too large for text and image: wrong temperature: equal when computed with a temperature of"
        },
    ),
    Planted(
        "other weights of the vision tower",
        edit=_weights("patch_embed.proj.weight", 1.5),
        failed={"mismatch": "too large for image: no fault that was tested explains it"},
    ),
    Planted(
        "a prompt that gets its first token twice",
        steps={GENERATE: _first_token_twice},
        failed={"mismatch": "too large for text: wrong template: equal when computed with the first token twice"},
    ),
    Planted(
        "--logprobs-mode processed_logprobs",
        steps={GENERATE: _logprobs(lambda logprob, temperature: logprob / temperature)},
        failed={"log-probabilities": "--logprobs-mode raw_logprobs"},
        skipped=("mismatch",),
    ),
    Planted(
        "--logprobs-mode raw_logits",
        steps={GENERATE: _logprobs(lambda logprob, _: logprob + 10)},  # above 0, which the engine refuses
        failed={"text request": "--logprobs-mode raw_logprobs"},
        skipped=tuple(check for check in GENERATING if check != "text request"),
    ),
    Planted("a proxy that drops stop tokens", steps={GENERATE: _never_stops}, failed={"stop token": "proxy"}),
    Planted(
        "a model that does not look at images",
        steps={GENERATE: _blind},
        failed={"image request": "trained checkpoint"},
    ),
    Planted(
        "--kv-cache-dtype fp8",
        steps={GENERATE: _logprobs(lambda logprob, _: logprob - 0.01)},
        failed={"log-probabilities": "--kv-cache-dtype"},
        skipped=("mismatch",),
    ),
    Planted("--model without weights", edit=_without_weights, skipped=("mismatch",)),
    Planted("--model without a processor", edit=_without_images, skipped=("image request",)),
]


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """So small a model is slower on several, which wait for each other wherever the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _copy(source: Path, edit: Callable[[Path], None] | None, target: Path) -> Path:
    if edit is None:
        return source
    shutil.copytree(source, target)
    edit(target)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("planted", TABLE, ids=lambda planted: planted.name)
async def test_a_planted_fault_is_found_with_its_cure_and_nothing_else(
    planted: Planted, tiny_model_dir: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = _copy(tiny_model_dir, planted.edit, tmp_path / "compared")
    served = _copy(tiny_model_dir, planted.serve_edit, tmp_path / "served")
    async with EngineVLLM(served, model=model, **planted.flags) as server:
        for path, step in planted.steps.items():
            server.script[path] = [step] * 100
        if planted.contents_as_given:
            with monkeypatch.context() as patched:
                patched.setattr(model_template, "converting", lambda template: template)
                server.renderer = load_renderer(served)
        findings = await run_checks(server.base_url, compared)
        assert {"/pause", "/resume", "/sleep", "/wake_up"}.isdisjoint(server.events)
    of_outcome = {
        outcome: {check: found for check, found in findings.items() if found.outcome == outcome}
        for outcome in ("failed", "absent", "skipped")
    }
    for outcome, expected in (("failed", planted.failed), ("absent", planted.absent)):
        found = {check: f"{each.seen} -> {each.cure}" for check, each in of_outcome[outcome].items()}
        assert {check: words in found.get(check, "") for check, words in expected.items()} == dict.fromkeys(
            expected, True
        ), found
        assert found.keys() == expected.keys(), found
    if "rust_frontend" in planted.flags:
        assert "Rust frontend 0.33.0" in findings["server"].seen
        assert not any("--enable-scale-out" in each.cure for each in findings.values())
    assert of_outcome["skipped"].keys() == {*planted.skipped}
    assert all(each.seen for each in of_outcome["skipped"].values())
    assert all(each.cure for each in of_outcome["failed"].values())
