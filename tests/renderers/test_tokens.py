"""Tokenizers of every kind: flags of added tokens, SentencePiece prefixes, words that are tokens, what is unknown."""

import json
from typing import Any

import corpus
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from renderers.errors import LoadError
from renderers.template.chat_template import Printed, Segment
from renderers.template.traced import Origin
from renderers.tokens.encoding import encode_printed, find_controls
from renderers.tokens.tokenizer import TemplateTokenizer

TEXT = ["the cat sat on the mat", "a user says hello world", "<user> and </s> or |x| end", "one two three the the cat"]


def byte_level(*added: AddedToken, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    return tokenizer


def unigram(prepend_scheme: str) -> Tokenizer:
    """A SentencePiece tokenizer whose vocabulary lists its control tokens, as such tokenizers do."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    special = ["<unk>", "<s>", "</s>", "<user>"]
    tokenizer.train_from_iterator(
        TEXT * 5, trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>")
    )
    return tokenizer


def ours(tokenizer: Tokenizer, **options: Any) -> TemplateTokenizer:
    return TemplateTokenizer(json.loads(tokenizer.to_str()), model="m", **options)


def template_text(text: str) -> Printed:
    """Text that the template printed, all of it."""
    return Printed(text, [Segment(0, len(text), -1, None)] if text else [])


def content_text(text: str) -> Printed:
    """Text that a user wrote, all of it."""
    return Printed(text, [Segment(0, len(text), 0, Origin(0, "content"))])


def ids(printed: Printed, tokenizer: TemplateTokenizer) -> list[int]:
    return encode_printed(printed.text, find_controls(printed, tokenizer, ["user"]), tokenizer).ids


flags = st.booleans()
marks = st.builds(
    lambda content, left, right, single: AddedToken(
        content, lstrip=left, rstrip=right, single_word=single, normalized=False, special=True
    ),
    st.sampled_from(["<a>", "<ab>", "<a", "[x]", "end", "||"]),
    flags,
    flags,
    flags,
)
spaced = st.lists(
    st.sampled_from(["<a>", "<ab>", "<a", "[x]", "end", "||", "|", " ", "\n\n", "word", "_", "<", "x", "é"]), max_size=8
).map("".join)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(marks, max_size=4, unique_by=lambda token: token.content), text=spaced)
def test_flags_of_added_tokens_work_as_in_hugging_face(tokens: list[AddedToken], text: str) -> None:
    theirs = byte_level(*tokens)
    assert ids(template_text(text), ours(theirs)) == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(["<user>", "</s>", "the cat", " sat", "on", "  ", "hello", "é"]), max_size=6))
def test_sentencepiece_puts_a_space_before_the_same_runs_as_hugging_face(scheme: str, pieces: list[str]) -> None:
    theirs = unigram(scheme)
    text = "".join(pieces)
    assert ids(template_text(text), ours(theirs)) == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("forged", ["</s>", "<s>", "<user>"])
def test_content_cannot_become_a_control_token_of_the_base_vocabulary(forged: str) -> None:
    theirs = unigram("always")
    tokenizer = ours(theirs)
    forged_id = tokenizer.require_control_id(forged, "a test")
    assert forged_id in theirs.encode(forged, add_special_tokens=False).ids
    assert forged_id not in ids(content_text(forged), tokenizer)
    assert ids(template_text(forged), tokenizer) == [forged_id]


@pytest.mark.parametrize("word", ["ü", "   ", "<table>", "</b>", "naïve"])
def test_an_added_token_of_ordinary_text_is_encoded_in_content(word: str) -> None:
    theirs = byte_level(
        AddedToken("<|end|>", special=True, normalized=False), AddedToken(word, special=False, normalized=False)
    )
    tokenizer = ours(theirs)
    assert tokenizer.control_id(word) is None
    text = f"a{word}b"
    assert ids(content_text(text), tokenizer) == theirs.encode(text, add_special_tokens=False).ids
    assert len(ids(content_text(text), tokenizer)) == 3
    assert tokenizer.decode(ids(content_text(text), tokenizer)) == text


def test_no_text_equals_the_name_of_a_hidden_control_token() -> None:
    """Where ordinary words are added tokens too, control tokens stay in the list under a name that no one can know."""
    added = [AddedToken("<|end|>", special=True, normalized=False), AddedToken("ü", special=False, normalized=False)]
    first, second = (json.loads(ours(byte_level(*added)).body.to_str())["added_tokens"] for _ in "ab")
    (hidden,) = {entry["content"] for entry in first} - {"ü"}
    assert "end" not in hidden
    assert hidden not in {entry["content"] for entry in second}


def test_tokens_of_the_tokenizer_config_are_added_to_those_of_the_tokenizer() -> None:
    definition = json.loads(byte_level(AddedToken("<a>", special=True, normalized=False)).to_str())
    more = {300: {"content": "<b>b", "special": True}, 256: {"content": "<a>", "special": True}}
    tokenizer = TemplateTokenizer(definition, model="m", more_added_tokens=more)
    assert tokenizer.control_id("<b>b") == 300
    assert tokenizer.decode([300]) == "<b>b"
    assert tokenizer.decode(np.array([300])) == "<b>b"
    assert ids(template_text("<b>b"), tokenizer) == [300]


def test_two_tokens_for_one_id_are_refused() -> None:
    definition = json.loads(byte_level(AddedToken("<a>", special=True, normalized=False)).to_str())
    with pytest.raises(LoadError, match=r"256 is '<b>', tokenizer.json that it is '<a>'"):
        TemplateTokenizer(definition, model="m", more_added_tokens={256: {"content": "<b>"}})


REAL = TemplateTokenizer.from_file(corpus.model_dir("qwen-3") / "tokenizer.json", model="qwen-3")


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), data=st.data())
def test_the_token_at_a_character_is_the_first_that_starts_there_or_later(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, max(len(text) - 1, 0)), max_size=4)))
    if not text or REAL.body.normalizer.normalize_str(text) != text:
        return
    starts = [start for start, _ in REAL.body.encode(text, add_special_tokens=False).offsets]
    run = REAL.encode_run(text, cuts)
    for cut in cuts:
        assert run.token_at[cut] == next((i for i, start in enumerate(starts) if start >= cut), len(starts))


def test_a_token_that_includes_white_space_includes_that_of_content_too() -> None:
    """Phi-3 ends a turn with `<|end|>` and takes in the line break behind it."""
    theirs = byte_level(AddedToken("<|end|>", rstrip=True, special=True, normalized=False))
    text = "a<|end|>\n  b"
    printed = Printed(text, [Segment(0, 8, -1, None), Segment(8, len(text), 0, Origin(0, "content"))])
    assert ids(printed, ours(theirs)) == theirs.encode(text, add_special_tokens=False).ids
