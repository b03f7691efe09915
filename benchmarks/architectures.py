"""Which architectures of transformers sample, train, see and hear here: docs/architectures.md.

python benchmarks/architectures.py                   all, 15 to 60 minutes; writes architectures.json and the page
python benchmarks/architectures.py MODEL_TYPE ...    only these; writes neither
python benchmarks/architectures.py --page            writes the page again, from architectures.json

A tiny random model of each, float32, one thread of the CPU, in a process with at most 4 GB and 90 s of the processor.
"samples": `LocalEngine`; "trains": `token_logprobs` of two padded rows, with gradients; "sees", "hears": a row with an
image or a sound, for the families whose processors the tests make. Log-probabilities are those of the model's own
forward within 1e-4. Each result goes to stderr with its whole reason.
"""

import asyncio
import itertools
import json
import multiprocessing
import re
import resource
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
)

from rollouts import GenerateRequest, LocalEngine, SamplingParams
from rollouts.training import TrainingBatch, TrainingSample, token_logprobs

_ROOT = Path(__file__).resolve().parents[1]
FIGURES, PAGE = _ROOT / "benchmarks" / "architectures.json", _ROOT / "docs" / "architectures.md"

SECONDS, BYTES = 90, 4 * 2**30  # of the processor, of memory
TOLERANCE = 1e-4
TOKENS = 300

# Names in configurations -> a small value: every width is 64, every number of heads 4.
_SIZES = {
    64: """hidden_size d_model n_embd dim embed_dim intermediate_size ffn_dim ffn_hidden_size decoder_ffn_dim d_ff
        encoder_ffn_dim mlp_dim n_inner intermediate_size_mlp dense_intermediate_size shared_intermediate_size emb_dim
        word_embed_proj_dim embedding_size out_hidden_size output_dim projection_dim projector_hidden_size
        text_hidden_size attention_hidden_size encoder_hidden_size decoder_hidden_size output_channels lru_width
        vision_output_dim projector_input_dim projector_output_dim moe_shared_expert_intermediate_size hidden_dim
        shared_expert_intermediate_size shared_experts_intermediate_size projection_hidden_dim adapter_out_dim
        projection_hidden_size image_text_hidden_size audio_hidden_size codebook_dim input_embedding_size
        output_embedding_size vision_hidden_size hidden_size_global""",
    32: "moe_intermediate_size expert_ffn_hidden_size",
    16: """head_dim linear_key_head_dim linear_value_head_dim swa_head_dim v_head_dim kv_lora_rank q_lora_rank
        index_head_dim global_head_dim linear_head_dim dim_head d_kv attention_head_dim qk_head_dim""",
    8: """qk_rope_head_dim qk_nope_head_dim hidden_size_per_layer_input laurel_rank rotary_dim sliding_window
        index_topk""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
        swa_num_attention_heads linear_num_key_heads linear_num_value_heads linear_num_heads num_experts
        n_routed_experts num_local_experts moe_num_experts""",
    2: "num_experts_per_tok num_experts_per_token moe_topk moe_k swa_num_key_value_heads",
    1: "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers",
    0: "num_nextn_predict_layers num_kv_shared_layers",
    256: "codebook_size",
    TOKENS: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
}
SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
LAYERS = {
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "depth",
    "encoder_layers",
    "decoder_layers",
    "layers",
}
_VISION_IDS = {"vision_start_token_id": 290, "vision_end_token_id": 291, "audio_start_token_id": 292}
# Where the rules above give no model. By type of the configuration, which may be a part of another.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dory": {"num_hidden_layers": 6, "n_input_layers": 2, "n_output_layers": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"per_layer_config": {}},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "hy_v4_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm3": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen2_5_omni_thinker": _VISION_IDS,
    "qwen3_omni_moe_thinker": _VISION_IDS,
    "radio": {"video_temporal_patch_size": 2},
    "step3p5": {"sliding_window": 8},
    "zamba": {"attention_head_dim": 32, "attention_hidden_size": 128},
    "zamba2": {
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_hidden_layers": 2,
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}


def tiny(config_class: Any, layers: int, rope: bool) -> Any:
    """A small configuration of a class, and of the configurations in it; `rope`: positions are not its own."""
    values = vars(config_class())
    whole = {name for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}
    changes: dict[str, Any] = {name: SMALL[name] for name in whole & SMALL.keys()}
    changes |= dict.fromkeys(whole & LAYERS, layers)
    if "head_dim" in values:
        changes["head_dim"] = SMALL["head_dim"]
    if "num_key_value_heads" in whole:
        same = values["num_key_value_heads"] == values.get("num_attention_heads")
        changes["num_key_value_heads"] = 4 if same else 2
    if "qk_rope_head_dim" in whole:
        changes.pop("head_dim", None)
    if rope and "rope_parameters" in values and "vocab_size" in values:
        changes["rope_parameters"] = dict(ROPE)
    ids = itertools.count(200)
    changes |= {name: next(ids) for name in sorted(whole) if "token_i" in name and values[name] >= TOKENS}
    for name, part in values.items():
        if isinstance(part, PreTrainedConfig):
            changes[name] = tiny(type(part), layers, rope)
    return config_class(**changes | OVERRIDES.get(config_class.model_type, {}))


def built(config_class: Any, model_class: Any) -> Any:
    """A model whose own forward works, if there is one; else one that was built, or an error."""
    model, errors = None, []
    for layers, rope in itertools.product((2, 4, 8), (False, True)):
        try:
            torch.manual_seed(0)
            found = model_class(tiny(config_class, layers, rope)).float().eval()
            with torch.no_grad():
                for parameter in found.parameters():
                    if parameter.dim() == 2:
                        parameter.normal_(0, 0.05)
            model = model or found
            plain_logprobs(found, ids_of(9))
            return found
        except Exception as error:  # noqa: BLE001 - whatever the code of an architecture raises
            errors.append(error)
    if model is None:
        raise errors[0]
    return model


def ids_of(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(3, 200, length).astype(np.int32)


def plain_logprobs(model: Any, ids: np.ndarray) -> torch.Tensor:
    """log p of each token but the first, by the model's own forward."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(1, tokens[0, 1:, None])[:, 0]


def compare(own: torch.Tensor, expected: torch.Tensor) -> None:
    difference = float((own.detach() - expected).abs().max())
    if not difference <= TOLERANCE:
        raise ValueError(f"log-probabilities differ by {difference:.1e}")


def check_training(model: Any) -> None:
    zeros = np.zeros(12, np.float32)
    samples = [TrainingSample(ids_of(n), np.arange(n) >= 3, zeros[:n], zeros[:n], name=str(n)) for n in (7, 12)]
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    scored = token_logprobs(model, batch)
    for index, sample in enumerate(samples):
        expected = plain_logprobs(model, sample.token_ids)[torch.from_numpy(sample.loss_mask[1:])]
        compare(scored[(batch.sequence_ids == index) & batch.loss_mask], expected)
    scored.sum().backward()
    if not any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters()):
        raise ValueError("no gradients")


def check_sampling(model: Any) -> None:
    prompt = ids_of(9).tolist()

    async def generate() -> Any:
        engine = LocalEngine(model)
        try:
            return await engine.generate(GenerateRequest(prompt, SamplingParams(max_tokens=5, seed=0)))
        finally:
            await engine.close()

    completion = asyncio.run(generate()).completions[0]
    ids = np.array([*prompt, *completion.token_ids])
    compare(torch.from_numpy(completion.logprobs), plain_logprobs(model, ids)[len(prompt) - 1 :])


def examine_text(config_class: Any, model_class: Any) -> dict[str, str]:
    try:
        model = built(config_class, model_class)
    except Exception as error:  # noqa: BLE001
        return {"built": f"{type(error).__name__}: {error}"}
    found = {}
    if getattr(model.config.get_text_config(), "max_position_embeddings", None) is None:
        model.config.get_text_config().max_position_embeddings = 512
        found["set"] = "max_position_embeddings"
    return {**found, "samples": outcome(check_sampling, model), "trains": outcome(check_training, model)}


def outcome(check: Callable[[Any], None], model: Any) -> str:
    """Empty, or why not."""
    try:
        check(model)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


def examine_media(name: str, sense: str) -> dict[str, str]:
    from family_rows import loaded_family

    def check(family: Any) -> None:
        media = {"sounds": [family.sound(1.0)]} if sense == "hears" else {"images": [family.pixels(56, 84)]}
        row = family.row("one", **media)
        batch = TrainingBatch.from_samples([row.sample], pad_id=0)
        compare(token_logprobs(family.model, batch)[batch.loss_mask], family.plain_logprobs(row))

    family = loaded_family(name)
    return {"type": family.model.config.model_type, sense: outcome(check, family)}


def in_process(examine: Callable[..., dict[str, str]], *arguments: Any) -> dict[str, str]:
    """What `examine` returns, in a process with limits."""

    def run() -> None:
        warnings.simplefilter("ignore")
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        torch.set_num_threads(1)
        sender.send(examine(*arguments))

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(20 * SECONDS) else {"built": "it did not end"}
    except EOFError:
        return {"built": "its process ended, at a limit or with an error"}
    finally:
        process.kill()
        process.join()


def classes() -> dict[str, tuple[Any, Any]]:
    """By model type, the configuration and the class that `load_model` takes."""
    found = {}
    for mapping in (
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,  # of which only those that hear
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    ):
        for config_class, model_class in mapping.items():
            hears = "audio_config" in getattr(config_class, "sub_configs", ())
            if hears or mapping is not MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
                first = model_class[0] if isinstance(model_class, tuple) else model_class
                found[config_class.model_type] = config_class, first
    return dict(sorted(found.items()))


# A part of an error -> what is not done, and why.
CAUSES = {
    "has an encoder and a decoder": "refused: it has an encoder and a decoder",
    "its talker": "refused: pass its thinker",
    "does not call its base model": "refused: its forward does not call its base model as a whole",
    "has no output layer for tokens": "refused: it has no output layer for tokens",
    "the logits of": "refused: its output layer is more than a linear layer, a scale and a softcap",
    "depend on later tokens": "refused: tokens attend to later ones",
    "with explicit positions": "refused: its positions do not count from 0",
    "for four text tokens": "refused: its own forward fails for text alone",
    "requires the timm library": "not tried: it needs timm",
}


def works(found: dict[str, str]) -> str:
    """What an architecture does, as "samples, trains, sees"; or why it does neither."""
    senses = [sense for sense in ("sees", "hears") if found.get(sense) == ""]
    if "built" in found and senses:  # the tests make it without the part of it that cannot be made here
        return ", ".join(["trains", *senses])
    if "built" in found:
        cause = next((reason for part, reason in CAUSES.items() if part in found["built"]), None)
        return cause or "not tried: no tiny model of it was made"
    if not found["trains"]:
        return ", ".join(["samples", "trains", *senses]) if not found["samples"] else "trains"
    return next(
        (reason for part, reason in CAUSES.items() if part in found["trains"]),
        "not computed: its own forward fails for rows of text",
    )


def figures(found: dict[str, dict[str, str]]) -> dict[str, Any]:
    """What is kept of a run: `works` of each architecture, and those whose `max_position_embeddings` was set."""
    given = [name for name, each in found.items() if "set" in each and not each["samples"]]
    rows = {name: works(each) for name, each in found.items()}
    return {"transformers": transformers.__version__, "without_positions": given, "works": rows}


_BEGINNING = """\
# Architectures

`python benchmarks/architectures.py` writes this page: it tries a tiny random model of every class of transformers
{version} that `AutoModelForCausalLM` and `AutoModelForMultimodalLM` load, in float32 on a CPU. Log-probabilities,
sampled (`LocalEngine`) and trained (`token_logprobs`), must be those of the model's own forward within 1e-4. Images and
sounds are tried with the families whose processors the tests make. The names are `model_type` of config.json.

| of {all} architectures | |
|---|---|
| sample and train | {both} |
| of them tried with images, with sounds | {sees}, {hears} |
| train alone | {train} |
| refused before the first token: an `UnsupportedModelError` with the reason | {refused} |
| not tried, or without a forward that works | {rest} |

## What is missing

Sample with vLLM where it serves such a model.

| architectures | what, and why |
|---|---|
"""
#: Of rows that train alone.
_NOT_SAMPLED = {
    "trains": "train alone: no cache of transformers, or (moshi) other tokens after it",
    "trains, hears": "trains and hears: sampling was not tried, because a part of it needs timm",
}
_END = """\
| {without_positions} | sample if config.json has `max_position_embeddings` |

Llama 4 with images: the forward of transformers itself fails; its language model, `model.language_model`, works.

## What samples and trains
"""


def page(kept: dict[str, Any]) -> str:
    """The page, of `figures`."""
    rows: dict[str, list[str]] = {}
    for name, row in kept["works"].items():
        rows.setdefault(row, []).append(name)
    whole = [row for row in rows if row.startswith("samples")]
    others = sorted(rows.keys() - whole, key=lambda row: (row.split(":")[0], -len(rows[row]), row), reverse=True)

    def count(found: Iterable[str]) -> int:
        return sum(len(rows[row]) for row in found)

    text = _BEGINNING.format(
        version=".".join(kept["transformers"].split(".")[:2]),
        all=len(kept["works"]),
        both=count(whole),
        sees=count(row for row in whole if "sees" in row),
        hears=count(row for row in whole if "hears" in row),
        train=count(row for row in others if row.startswith("trains")),
        refused=count(row for row in others if row.startswith("refused")),
        rest=count(row for row in others if row.startswith("not ")),
    )
    text += "".join(f"| {', '.join(rows[row])} | {_NOT_SAMPLED.get(row, row)} |\n" for row in others)
    text += _END.format(without_positions=", ".join(kept["without_positions"]))
    titles = {
        ", sees, hears": "With images and sounds",
        ", sees": "With images",
        ", hears": "With sounds",
    }
    for senses, title in titles.items():
        if names := rows.get(f"samples, trains{senses}"):
            text += f"\n{title}: {', '.join(names)}.\n"
    return f"{text}\nWith text: the other {len(rows['samples, trains'])} of that release.\n"


def examine(names: list[str]) -> dict[str, dict[str, str]]:
    """The results of these architectures; of all, with images and sounds, if there is no name."""
    tests = _ROOT / "tests"
    sys.path[:0] = [str(tests / "rollouts"), str(tests / "renderers"), str(tests)]
    from audio_models import AUDIO_MODELS, SEEING
    from model_families import MEDIA_FAMILIES

    found = {}
    for name, pair in classes().items():
        if name in names or not names:
            found[name] = in_process(examine_text, *pair)
            reasons = {key: re.sub(r"\s+", " ", value) for key, value in found[name].items() if value}
            print(name, reasons or "ok", file=sys.stderr, flush=True)
    senses = [(name, "sees") for name in (*MEDIA_FAMILIES, *SEEING)] + [(name, "hears") for name in AUDIO_MODELS]
    for name, sense in senses if not names else ():
        result = in_process(examine_media, name, sense)
        print(name, result, file=sys.stderr, flush=True)
        if result.get("type") in found:
            found[result["type"]][sense] = result[sense]
    return found


def main() -> None:
    transformers.logging.set_verbosity_error()
    names = sys.argv[1:]
    if names != ["--page"]:
        kept = figures(examine(names))
        if names:
            print(json.dumps(kept, indent=1))
            return
        FIGURES.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    PAGE.write_text(page(json.loads(FIGURES.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
