"""A text is refused for its length before it is encoded only where its tokens are certain to be too many."""

import copy
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from renderers.errors import OverlongPromptError
from renderers.tokens.encoding import encode_printed
from renderers.tokens.length_bound import at_most_tokens
from renderers.tokens.tokenizer import TemplateTokenizer

SPACES = [("Ġ" * 2**power, "Ġ" * 2**power) for power in range(5)]
LETTERS = [*sorted(ByteLevel.alphabet()), *(left + right for left, right in SPACES), "ab"]
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def bpe(pieces: list[str], merges: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return {"type": "BPE", "vocab": vocabulary, "merges": [list(pair) for pair in merges], **options}


def split(behavior: str, pattern: str = QWEN, **options: Any) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False, **options}


def definition(*steps: dict[str, Any], **members: Any) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "post_processor": None,
        "decoder": None,
        "model": bpe(LETTERS, [*SPACES, ("a", "b")]),
        **members,
    }


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
GEMMA = definition(
    normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    pre_tokenizer=None,
    model=bpe([*BYTES, "▁", "▁▁", "a"], [("▁", "▁")], byte_fallback=True, fuse_unk=True, unk_token=None),
)
BOUNDED = {
    "bytes": definition(),
    "NFC": definition(split("Isolated"), normalizer={"type": "NFC"}),
    "Qwen 2.5": definition(split("Removed", invert=True), normalizer={"type": "NFC"}),
    "Gemma": GEMMA,
}
UNKNOWN = bpe(["<unk>", "a", "b"], [], unk_token="<unk>", fuse_unk=True)
STRIPPING = {"id": 300, "content": "word", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
UNBOUNDED = {
    "a normalizer that drops": definition(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
    "a pre-tokenizer that drops": definition({"type": "WhitespaceSplit"}),
    "one unknown token for many letters": definition(pre_tokenizer=None, model=UNKNOWN),
    "letters without a token": definition(model=bpe(LETTERS[5:], [])),
    "an added token that takes white space": definition(added_tokens=[{**STRIPPING, "special": False}]),
}
TEXTS = st.text(
    st.sampled_from(" ab\n\té\u0301\u1100\u1161\u11a8中😀\0-'1") | st.characters(exclude_categories=["Cs"]),
    max_size=300,
)


@pytest.mark.parametrize("tokenizer", [TemplateTokenizer(each, model=name) for name, each in BOUNDED.items()])
@settings(max_examples=200)
@given(text=TEXTS.map(lambda text: text * 3) | st.integers(0, 500).map(lambda count: " " * count))
def test_no_text_is_refused_that_the_context_holds(tokenizer: TemplateTokenizer, text: str) -> None:
    assert tokenizer.longest_piece
    ids = encode_printed(text, [], tokenizer).ids
    with at_most_tokens(len(ids)):
        assert encode_printed(text, [], tokenizer).ids == ids
    characters = len(text) // (1 if unicodedata.is_normalized("NFC", text) else 4)
    if (most := (characters - 1) // tokenizer.longest_piece) >= 0:
        with at_most_tokens(most), pytest.raises(OverlongPromptError, match=f"at least {most + 1}"):
            encode_printed(text, [], tokenizer)


@pytest.mark.parametrize("unbounded", UNBOUNDED.values(), ids=UNBOUNDED)
def test_where_characters_may_have_no_token_of_their_own_nothing_is_refused(unbounded: dict[str, Any]) -> None:
    tokenizer = TemplateTokenizer(copy.deepcopy(unbounded), model="m")
    assert tokenizer.longest_piece is None
    with at_most_tokens(1):
        assert encode_printed(" " * 1000, [], tokenizer) is not None
