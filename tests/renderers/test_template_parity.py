"""Every real template prints what transformers prints, and every real tokenizer gives the ids that it gives."""

import functools
import zlib

import corpus
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import tokenizer_named
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from renderers.errors import TemplateError
from renderers.messages import check_messages, without_media
from renderers.template.chat_template import ChatTemplate, Printed
from renderers.tokens.encoding import encode_printed, find_controls
from renderers.tokens.tokenizer import TemplateTokenizer

SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
WITH_TOKENIZER = [name for name in corpus.templates() if corpus.tokenizer_of(name) is not None]


@functools.cache
def compiled(name: str) -> ChatTemplate:
    return ChatTemplate(corpus.templates()[name], model=name, variables=SPECIAL)


@functools.cache
def hugging_face(name: str) -> Tokenizer:
    return Tokenizer.from_file(str(corpus.model_dir(name) / "tokenizer.json"))


def printed(template: str, conversation: str, *, prompt: bool = True) -> Printed | None:
    """What we print; None where the template refuses."""
    messages, tools = corpus.CONVERSATIONS[conversation]
    try:
        return compiled(template).print(
            without_media(check_messages(messages)), tools=tools, add_generation_prompt=prompt
        )
    except TemplateError:
        return None


def encoded(text: Printed, conversation: str, tokenizer: TemplateTokenizer) -> list[int]:
    roles = [message["role"] for message in corpus.CONVERSATIONS[conversation][0]]
    return encode_printed(text.text, find_controls(text, tokenizer, roles), tokenizer).ids


@functools.cache
def plain_tokenizer() -> PreTrainedTokenizerFast:
    """Any tokenizer: only its templating is used."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)


def plain_jinja(source: str, conversation: str, *, prompt: bool) -> str | Exception:
    messages, tools = corpus.CONVERSATIONS[conversation]
    try:
        return str(
            plain_tokenizer().apply_chat_template(
                messages, tools=tools, chat_template=source, add_generation_prompt=prompt, tokenize=False
            )
        )
    except Exception as error:  # noqa: BLE001  whatever the template does wrong is what we must report
        return error


@pytest.mark.parametrize("template", corpus.drawn(corpus.templates()))
def test_the_traced_text_equals_that_of_transformers_and_errors_have_the_message_of_the_template(template: str) -> None:
    printed_something = False
    for conversation, (messages, tools) in corpus.CONVERSATIONS.items():
        for prompt in (False, True):
            expected = plain_jinja(corpus.templates()[template], conversation, prompt=prompt)
            shown = without_media(check_messages(messages))
            if isinstance(expected, str):
                text = compiled(template).print(shown, tools=tools, add_generation_prompt=prompt).text
                assert text == expected, conversation
                assert type(text) is str
                printed_something = True
            else:
                with pytest.raises(TemplateError) as refused:
                    compiled(template).print(shown, tools=tools, add_generation_prompt=prompt)
                assert refused.value.template_message == (str(expected) or type(expected).__name__), conversation
    assert printed_something


@pytest.mark.parametrize("template", corpus.drawn(WITH_TOKENIZER))
def test_ids_of_a_model_s_own_template_and_tokenizer_are_those_of_hugging_face(template: str) -> None:
    name = corpus.tokenizer_of(template)
    assert name is not None
    for conversation in corpus.CONVERSATIONS:
        text = printed(template, conversation)
        if text is not None:
            expected = hugging_face(name).encode(text.text, add_special_tokens=False).ids
            assert encoded(text, conversation, tokenizer_named(name)) == expected, conversation


@pytest.mark.slow
@pytest.mark.parametrize("name", corpus.drawn(corpus.WHOLE_VOCABULARIES))
def test_ids_of_every_way_of_encoding_agree_under_every_template(name: str) -> None:
    """The next test does the same with the other tokenizers."""
    conversations = list(corpus.CONVERSATIONS)
    for template in corpus.templates():
        # One conversation a pair, another one each time; all of them would be 180,000 encodings.
        conversation = conversations[zlib.crc32(f"{name} {template}".encode()) % len(conversations)]
        text = printed(template, conversation)
        if text is not None:
            expected = hugging_face(name).encode(text.text, add_special_tokens=False).ids
            assert encoded(text, conversation, tokenizer_named(name)) == expected, (template, conversation)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in corpus.tokenizer_names() if name not in corpus.WHOLE_VOCABULARIES])
def test_ids_of_the_whole_vocabulary_agree_under_every_template(name: str) -> None:
    """Of the tokenizers whose vocabulary is cut in all other tests. They encode in the ways of those above."""
    file = corpus.whole_model_dir(name) / "tokenizer.json"
    whole, known = Tokenizer.from_file(str(file)), TemplateTokenizer.from_file(file, model=name)
    conversations = list(corpus.CONVERSATIONS)
    for number, template in enumerate(corpus.templates()):
        conversation = conversations[number % len(conversations)]
        text = printed(template, conversation)
        if text is not None:
            expected = whole.encode(text.text, add_special_tokens=False).ids
            assert encoded(text, conversation, known) == expected, (template, conversation)


# Injection.


def hostile_texts(name: str) -> st.SearchStrategy[str]:
    tokens = list(tokenizer_named(name)._control.id_of)
    pieces = st.sampled_from(tokens) | st.sampled_from(tokens).map(lambda t: t[: len(t) // 2]) | st.text(max_size=3)
    return st.lists(pieces, max_size=6).map("".join)


ATTACKED = ["trl/qwen3", "trl/qwen3_5_think", "own/glm-5", "own/minimax-m3", "own/deepseek-v3.1", "own/glm-4.6v"]


@pytest.mark.parametrize("template", ATTACKED)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_hostile_content_does_not_change_the_control_tokens(template: str, data: st.DataObject) -> None:
    name = corpus.tokenizer_of(template)
    assert name is not None
    hostile = data.draw(hostile_texts(name))
    roles = ["system", "user"]

    def control_tokens(system: str, user: str) -> list[str]:
        conversation = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        text = compiled(template).print(conversation, tools=corpus.TOOLS, add_generation_prompt=True)
        ids = encode_printed(text.text, find_controls(text, tokenizer_named(name), roles), tokenizer_named(name)).ids
        return [token for token in map(tokenizer_named(name).control_token, ids) if token is not None]

    assert control_tokens(hostile, "x") == control_tokens("x", "x")
    assert control_tokens("x", hostile) == control_tokens("x", "x")
