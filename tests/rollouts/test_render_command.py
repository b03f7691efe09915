"""`rollouts render`: a conversation file as tokens, on a terminal, in a pipe and as data."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from images import png_url
from rich.text import Text
from typer.testing import CliRunner

from renderers import RenderedTokens, TemplateRenderer
from rollouts.cli.main import app
from rollouts.cli.render.token_cells import token_cells
from rollouts.cli.render.token_lines import View, token_lines
from rollouts.terminal.text import printable

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "Zürich"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "looks", "parameters": {"type": "object"}}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "Grüße\nund 你好"},
    {"role": "assistant", "content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "22 °C"},
]
HOSTILE = "\x1b[31mred\x1b]0;title\x07 [bold]loud[/bold] [/] \r\b\x9b2J \u202eevil ● ⟨1⟩ ¦"


@pytest.fixture
def run(tiny_model_dir: Path, tmp_path: Path) -> Any:
    def invoke(content: Any, *options: str, name: str = "c.json", **environment: str) -> Result:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        arguments = ["render", str(path), "--model", str(tiny_model_dir), *options]
        return CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "FORCE_COLOR": None, **environment})

    return invoke


def body(result: Result) -> list[tuple[str, str, str]]:
    """(label, mark, text) of each line of tokens."""
    assert result.exit_code == 0, result.output
    lines = result.stdout.split("\n\n")[1].splitlines()
    found = []
    for line in lines:
        match = re.fullmatch(r"(.*?) *([●○·]) (.*)", line)
        assert match, line
        found.append((match[1], match[2], match[3]))
    return found


def test_each_line_belongs_to_one_message_and_one_kind(run: Any) -> None:
    assert body(run([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])) == [
        ("0 user", "·", "<|im_start|>¦u¦s¦e¦r¦⏎"),
        ("", "○", "a"),
        ("", "·", "<|im_end|>¦⏎"),
        ("1 assistant", "·", "<|im_start|>¦a¦s¦s¦i¦s¦t¦a¦n¦t¦⏎"),
        ("", "●", "b¦<|im_end|>"),
        ("", "·", "⏎"),
    ]


def test_tools_come_from_the_file_or_from_their_own(run: Any, tmp_path: Path) -> None:
    inside = run({"messages": MESSAGES, "tools": TOOLS})
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    beside = run(MESSAGES, "--tools", str(tools))
    assert "looks" in inside.stdout.replace("¦", "")
    assert inside.stdout == beside.stdout != run(MESSAGES).stdout


def test_colours_take_the_place_of_marks_between_tokens(run: Any) -> None:
    plain, coloured = run(MESSAGES).stdout, run(MESSAGES, FORCE_COLOR="1", TERM="xterm-256color").stdout
    body, uncoloured = Text.from_ansi(coloured).plain.split("\n\n")[1], plain.split("\n\n")[1]
    assert "¦" not in body
    assert body == uncoloured.replace("¦", "")


def test_an_image_is_one_marker_with_its_token_count(run: Any) -> None:
    url = png_url((9, 9, 9), (64, 48))
    parts = [{"type": "text", "text": "see"}, *[{"type": "image_url", "image_url": {"url": url}}] * 2]
    messages = [{"role": "user", "content": parts}]
    lines = [text for *_, text in body(run(messages))]
    assert "[image 1: 12 tokens]" in lines
    assert "[image 2: 12 tokens]" in lines
    assert not any("image_pad" in line for line in lines)
    assert any(re.search(r"\[image 1: 12 tokens\]⟨\d+ x12⟩", text) for *_, text in body(run(messages, "--ids")))
    assert len(json.loads(run(messages, "--json").stdout)["media"]) == 2


@pytest.mark.parametrize("colour", [{}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}])
def test_hostile_text_neither_moves_the_cursor_nor_becomes_markup(run: Any, colour: dict[str, str]) -> None:
    call = {**CALL, "id": HOSTILE, "function": {"name": HOSTILE, "arguments": {}}}
    messages = [
        {"role": "user", "content": HOSTILE},
        {"role": "assistant", "content": HOSTILE, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": HOSTILE, "content": HOSTILE},
    ]
    result = run(messages, **colour)
    assert result.exit_code == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", result.stdout)  # the colours are ours
    assert all(character.isprintable() for character in shown.replace("\n", ""))
    text = shown.replace("¦", "")
    assert "␛[31mred␛]0;title␇ [bold]loud[/bold] [/] ␍␈<U+009B>2J <U+202E>evil ●" in text
    if colour:
        codes = set(re.findall(r"\x1b\[([\d;]*)m", result.stdout))
        assert "31" not in codes


def test_a_text_cannot_pretend_to_be_sampled(run: Any) -> None:
    lines = body(run([{"role": "user", "content": "x\n● y\n1 assistant ● z"}]))
    assert {mark for label, mark, text in lines} == {"○", "·"}


def test_json_holds_the_columns_of_the_rendering(run: Any, renderer: TemplateRenderer) -> None:
    rendered = renderer.render(MESSAGES, add_generation_prompt=True)
    data = json.loads(run(MESSAGES, "--json", "--generation-prompt").stdout)
    assert data["token_ids"] == rendered.token_ids
    assert data["message_indices"] == rendered.message_indices
    assert data["sampled_mask"] == rendered.sampled_mask
    assert data["is_content"] == rendered.is_content
    assert "".join(piece["text"] for piece in data["pieces"]) == renderer.tokenizer.decode(rendered.token_ids)
    assert [message["tokens"] for message in data["messages"]] == rendered.tokens_per_message()
    assert (data["messages"][3]["role"], data["messages"][3]["tool_name"]) == ("tool", "look")


def test_a_row_of_a_jsonl_file_is_picked_by_number(run: Any) -> None:
    rows = "\n".join(json.dumps({"messages": [{"role": "user", "content": word}]}) for word in ("one", "two"))
    for options, word in (((), "one"), (("--row", "1"), "two")):
        assert word in run(rows, *options, name="c.jsonl").stdout.replace("¦", "")


def test_another_template_can_be_tried(run: Any, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    lines = body(run([{"role": "user", "content": "a"}], "--chat-template", str(template)))
    assert lines[1] == ("", "○", "a")


@pytest.mark.parametrize(
    ("name", "content", "options", "words"),
    [
        ("c.json", '[{"role": "user",\n "content": oops}]', [], ["c.json, line 2", "not JSON"]),
        ("c.json", "{}\n{}", [], ["line 2", ".jsonl"]),
        ("c.json", "[" * 100_000, [], ["recursion"]),
        ("c.json", '{"turns": []}', [], ["holds no conversation"]),
        ("c.json", '{"messages": [{"role": "user", "content": "x"}], "tools": "all"}', [], ["tools must be a list"]),
        ("c.jsonl", "[]\n", ["--row", "5"], ["no row 5"]),
        ("c.json", '[{"role": "\\u001b[31m", "content": "x"}]', [], ["message 0", "unknown role"]),
    ],
)
def test_what_cannot_be_shown_is_explained_on_stderr_with_exit_code_2(
    run: Any, name: str, content: str, options: list[str], words: list[str]
) -> None:
    result = run(content, *options, name=name)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert all(word in result.stderr for word in words), result.stderr
    assert "\x1b" not in result.stderr


# Pieces and lines.


@settings(max_examples=50)
@given(st.text(max_size=40))
def test_pieces_join_to_the_decoded_tokens(renderer: TemplateRenderer, text: str) -> None:
    rendered = renderer.render([{"role": "user", "content": text}])
    cells = list(token_cells(renderer, rendered))
    assert [token_id for cell in cells for token_id in cell.token_ids] == rendered.token_ids
    assert "".join(cell.text for cell in cells) == renderer.tokenizer.decode(rendered.token_ids)


def test_tokens_that_spell_no_character_show_as_replacement_characters(renderer: TemplateRenderer) -> None:
    half = renderer.tokenizer.encode_run("é").ids[:1]
    rendered = RenderedTokens([*half, *half], renderer.render([{"role": "user", "content": "x"}]).spans[:0])
    assert list(token_cells(renderer, rendered)) == []
    spans = renderer.render([{"role": "user", "content": "x"}]).spans[:1]
    broken = RenderedTokens([*half, *half], (spans[0]._replace(start=0, end=2),), ["user"])
    assert [cell.text for cell in token_cells(renderer, broken)] == ["\ufffd", "\ufffd"]


@settings(max_examples=30)
@given(st.text(max_size=60), st.booleans(), st.integers(30, 80))
def test_folded_lines_fit_and_lose_nothing(renderer: TemplateRenderer, text: str, ids: bool, width: int) -> None:
    rendered = renderer.render([{"role": "user", "content": text}])

    def shown(width: int | None) -> list[Text]:
        view = View(ids, colours=True, width=width)
        return list(token_lines(rendered, token_cells(renderer, rendered), view))

    folded = shown(width)
    assert all(line.cell_len <= width for line in folded)
    margin = len("0 user · ")
    assert "".join(line.plain[margin:] for line in folded) == "".join(line.plain[margin:] for line in shown(None))


@given(st.text())
def test_visible_text_is_printable_and_printable_text_is_unchanged(text: str) -> None:
    shown = printable(text)
    assert shown.replace("\n", "").isprintable()
    assert "".join(c for c in text if c.isprintable() or c == "\n") == text or shown != text
    assert printable("".join(c for c in text if c.isprintable())) == "".join(c for c in text if c.isprintable())
