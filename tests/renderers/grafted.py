"""Model directories for templates whose real tokenizer is not at hand.

The control tokens that a template prints are added to a real tokenizer, so that everything around the template (cuts,
encoding, attribution, parsing) can be tested; ids and merges are not those of the model.
"""

import functools
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import corpus

# The smallest vocabulary of the corpus; it has no control token that any of these templates prints.
_STOCK = "deepseek-coder-33b-base"
_MERGES = 8000
_BOS, _EOS = "<s>", "</s>"

#: Where the model directories are made; one that is there never changes.
GRAFTED = Path(tempfile.gettempdir()) / f"mmrollouts-grafted-{os.getuid()}"

_CONTROL = re.compile(
    r"<\|[^<>|\s{}'+]{1,40}\|>"  # <|im_start|>
    r'|<\|"\|>'
    r"|<\|/?[a-z_]+>|</?[a-z_]+\|>"  # Gemma 4: <|turn> ... <turn|>
    r"|</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn|end_of_utterance|image)>"
    r"|\[/?[A-Z_]{4,}\]"  # [INST]
)
# Templates that put a role between two bars.
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")


def control_tokens(source: str) -> list[str]:
    """What looks like a control token in a template, in order of appearance."""
    return list(dict.fromkeys(_CONTROL.findall(source)))


@functools.cache
def grafted_tokenizer_dir(template_name: str) -> Path:
    """A model directory with the template `template_name` of the corpus and a tokenizer that has its control tokens."""
    return graft(template_name.replace("/", "-"), corpus.templates()[template_name])


def graft(name: str, source: str, *, more: tuple[str, ...] = ()) -> Path:
    """A model directory for a template given as text, made once; `more` are tokens that it does not spell out."""
    tokens = [_BOS, _EOS, *control_tokens(source), *_ROLES, *more]
    digest = hashlib.sha256(json.dumps([source, tokens, _MERGES]).encode()).hexdigest()[:16]

    def files(made: Path) -> None:
        definition = json.loads((corpus.model_dir(_STOCK) / "tokenizer.json").read_text(encoding="utf-8"))
        corpus.cut_vocabulary(definition, _MERGES)
        _add(definition, tokens)
        (made / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
        (made / "tokenizer_config.json").write_text(json.dumps({"bos_token": _BOS, "eos_token": _EOS}))
        (made / "chat_template.jinja").write_text(source, encoding="utf-8")

    return corpus.made_once(GRAFTED / f"{name}-{digest}", files)


def _add(definition: dict[str, Any], tokens: list[str]) -> None:
    added = definition["added_tokens"]
    known = {entry["content"] for entry in added}
    new = [token for token in dict.fromkeys(tokens) if token not in known]
    first = 1 + max(*(entry["id"] for entry in added), *definition["model"]["vocab"].values())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added += [{"id": first + index, "content": token, **flags} for index, token in enumerate(new)]
