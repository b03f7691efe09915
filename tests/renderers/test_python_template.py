"""`PythonTemplate`: a prompt function with the interface of a chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from renderers.errors import PromptRefusedError, TemplateError
from renderers.template.chat_template import ChatTemplate, PythonTemplate, message_mark
from renderers.template.traced import traced_join
from tests.renderers.corpus import says, user

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None


def _shout(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool,
    mark: str = "!",
) -> str:
    def pieces() -> Iterator[str]:
        for index, message in enumerate(messages):
            if message["content"] == "quiet":
                raise PromptRefusedError("too quiet", cure="Speak up.", message_index=index)
            yield from (message_mark(index), "[", message["content"], mark, "]")
        yield message_mark(None)
        if add_generation_prompt:
            yield "[" + ("tools" if tools else "")

    return traced_join("", pieces())


def _shouting(**variables: Any) -> PythonTemplate:
    return PythonTemplate(_shout, source="shout", model="loud", variables=variables)


def test_a_prompt_function_is_printed_like_a_template() -> None:
    jinja = ChatTemplate(
        "{% for m in messages %}[{{ m.content }}!]{% endfor %}{% if add_generation_prompt %}[{% endif %}", model="loud"
    )
    messages = [user("a"), says("b"), user("")]
    for prompt in (True, False):
        assert _shouting().print(messages, add_generation_prompt=prompt) == jinja.print(
            messages, add_generation_prompt=prompt
        )


def test_variables_of_a_single_print_override_those_of_the_template() -> None:
    assert _shouting(mark="?").print([user("a")]).text == "[a?]"
    assert _shouting(mark="?").print([user("a")], mark=".").text == "[a.]"
    assert _shouting(mark="?").print([user("a")]).text == "[a?]"


def test_a_refused_prompt_raises_an_error_with_model_message_and_cure() -> None:
    with pytest.raises(TemplateError, match=r"loud.*message 1.*too quiet.*Speak up") as caught:
        _shouting().print([user("a"), user("quiet")])
    assert caught.value.message_index == 1


@pytest.mark.parametrize("misspell", [lambda: _shouting(marks="?"), lambda: _shouting().print([], marks="?")])
def test_an_unknown_variable_is_an_error_that_lists_the_options(misspell: Callable[[], object]) -> None:
    with pytest.raises(TemplateError, match=r"no option 'marks'.*options of this format are mark"):
        misspell()


def test_a_prompt_of_plain_text_belongs_to_no_message() -> None:
    def hello(messages: Any, tools: Any, *, add_generation_prompt: bool) -> str:
        return "hello"

    printed = PythonTemplate(hello, source="", model="m").print([user("a")])
    assert printed.text == "hello"
    assert [tuple(segment) for segment in printed.segments] == [(0, 5, -1, None)]
