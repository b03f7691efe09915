"""Tools that a template does not print, or whose calls are not parsed, are logged."""

import corpus
import pytest
from corpus import TOOLS, system, user
from loaded import directory_of

from renderers import load_renderer

UNTOLD, UNPARSED = "does not print tools", "has no tool calls"


def warnings_of(template, caplog):
    """What is logged for two prompts with tools, and one without."""
    renderer = load_renderer(directory_of(template), chat_template=corpus.templates()[template])
    caplog.clear()
    with caplog.at_level("WARNING", logger="renderers"):
        renderer.render([user("Hi")], add_generation_prompt=True)
        assert not caplog.records
        for text in ("Hi", "Hello"):
            renderer.render([user(text)], tools=TOOLS, add_generation_prompt=True)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("trl/qwen2_5_vl", [UNTOLD, UNPARSED]),
        ("trl/smolvlm", [UNTOLD, UNPARSED]),
        ("own/deepseek-v3.1", [UNTOLD]),
        ("trl/lfm2", [UNPARSED]),
        ("trl/qwen3_vl", []),
        ("own/glm-4.5v", []),
        ("trl/gptoss", []),
    ],
)
def test_tools_of_which_the_model_is_not_told_are_logged_once(template, expected, caplog):
    logged = warnings_of(template, caplog)
    assert len(logged) == len(expected)
    for message, part in zip(logged, expected, strict=True):
        assert part in message
        assert "chat_template=" in message


def test_a_template_for_conversations_with_tools_alone_prints_them(caplog):
    source = "{{ tools[0].function.name }}" + corpus.templates()["trl/qwen3_vl"]
    renderer = load_renderer(directory_of("trl/qwen3_vl"), chat_template=source)
    with caplog.at_level("WARNING", logger="renderers"):
        renderer.render([system("S"), user("Hi")], tools=TOOLS, add_generation_prompt=True)
    assert not caplog.records
