"""Decoding ids as they come equals what `tokenizers` decodes from all of them."""

import codecs
import functools
import json
from collections.abc import Sequence
from typing import Any

import corpus
import pytest
from bytewise import bytewise_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import tokenizer_named

from renderers.parsing.markers import Lexer, MarkerEncoding, MarkerSearch
from renderers.tokens.decoding import TokenDecoder, split_utf8
from renderers.tokens.tokenizer import TemplateTokenizer

LLAMA_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
TWO_SPACES = {
    **LLAMA_DECODER,
    "decoders": [*LLAMA_DECODER["decoders"][:3], {"type": "Strip", "content": " ", "start": 2, "stop": 0}],
}
GEMMA_DECODER = {"type": "Sequence", "decoders": LLAMA_DECODER["decoders"][:3]}
OTHER_DECODERS: dict[str, Any] = {
    "word pieces": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "none": None,
    "metaspace": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    "backwards": {"type": "Sequence", "decoders": LLAMA_DECODER["decoders"][::-1]},
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁a", "a▁b", "é", "🙂", "##x", "b", ".", "<0xZZ>", "\n"]


@functools.cache
def made_tokenizer(kind: str) -> TemplateTokenizer:
    """A small vocabulary of words and byte tokens under one of the decoders above."""
    decoder = {"llama": LLAMA_DECODER, "two spaces": TWO_SPACES, "gemma": GEMMA_DECODER, **OTHER_DECODERS}[kind]
    vocabulary = {token: i for i, token in enumerate([*BYTES, *WORDS])}
    control = {"id": len(vocabulary), "content": "<|end|>", "special": True, "normalized": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True, "unk_token": None}
    definition = {"added_tokens": [{**control, **flags}], "decoder": decoder, "model": model}
    return TemplateTokenizer(definition, model=kind)


@functools.cache
def decoder_of(tokenizer: TemplateTokenizer) -> TokenDecoder:
    """As a renderer has it, for all that it decodes."""
    return TokenDecoder(tokenizer)


def lexer_of(tokenizer: TemplateTokenizer) -> Lexer:
    return Lexer(tokenizer, decoder_of(tokenizer), MarkerEncoding(tokenizer, ()))


def decoded(tokenizer: TemplateTokenizer, chunks: Sequence[Sequence[int]]) -> str:
    lexer = lexer_of(tokenizer)
    return "".join([*(lexer.feed(chunk) for chunk in chunks), lexer.finish()])


def check(tokenizer: TemplateTokenizer, ids: list[int], cut: int) -> None:
    expected = tokenizer.decode(ids)
    assert decoded(tokenizer, [ids]) == expected
    assert decoded(tokenizer, [[token_id] for token_id in ids]) == expected
    assert decoded(tokenizer, [ids[:cut], ids[cut:]]) == expected


@pytest.mark.parametrize("kind", ["llama", "two spaces", "gemma", *OTHER_DECODERS])
def test_every_kind_of_decoder_gives_what_tokenizers_gives(kind: str) -> None:
    tokenizer = made_tokenizer(kind)
    byte_ids = st.sampled_from([*"🙂é a".encode(), 0x80, 0xFF, 0xE2])
    ids = st.lists(byte_ids | st.integers(256, 268) | st.integers(-2, 300), max_size=16)

    @settings(max_examples=150, deadline=None)
    @given(ids=ids, cut=st.integers(0, 16))
    def run(ids: list[int], cut: int) -> None:
        check(tokenizer, ids, cut)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen-2.5", "deepseek-coder-33b-base", "jiutian-139moe-chat"])
def test_real_tokenizers_decode_random_ids_the_same(name: str) -> None:
    tokenizer = tokenizer_named(name)
    ids = st.integers(0, tokenizer.vocab_size + 2)
    pieces = st.text(max_size=8).map(lambda text: tokenizer.encode_run(text).ids)
    sequences = st.lists(ids.map(lambda one: [one]) | pieces, max_size=10).map(
        lambda lists: [i for one in lists for i in one]
    )

    @settings(max_examples=150, deadline=None)
    @given(ids=sequences, cut=st.integers(0, 20))
    def run(ids: list[int], cut: int) -> None:
        check(tokenizer, ids, cut)

    run()


# Bytes of single tokens.


@pytest.mark.parametrize("name", corpus.tokenizer_names())
def test_the_bytes_of_the_tokens_of_a_text_are_joined_its_utf_8(name: str) -> None:
    tokenizer = tokenizer_named(name)
    end = next(iter(corpus_added_tokens(name)))
    run = tokenizer.encode_run(" Zürich 🙂👩‍👧 日本語, I'm \U0001d4b3.  two").ids
    for ids in (run, [*run, end, *run], [end, *run]):
        found = decoder_of(tokenizer).bytes_of(ids)
        assert len(found) == len(ids)
        assert b"".join(found).decode() == tokenizer.decode(ids)


def corpus_added_tokens(name: str) -> list[int]:
    definition = json.loads((corpus.model_dir(name) / "tokenizer.json").read_bytes())
    return [token["id"] for token in definition["added_tokens"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "two spaces", "gemma", "metaspace", "word pieces"])
def test_the_bytes_of_made_tokens_are_joined_their_text(kind: str) -> None:
    tokenizer = made_tokenizer(kind)
    characters = {
        "🙂": [*"🙂".encode()],
        "é": [*"é".encode()],
        "space": [0x20],
        "end": [256 + len(WORDS)],
        "none": [400],
    }
    if kind in ("metaspace", "word pieces"):  # these decoders know no byte tokens
        characters = {"end": [256 + len(WORDS)], "none": [400]}
    words = {word: [256 + place] for place, word in enumerate(WORDS)}
    one = st.sampled_from([*characters.values(), *words.values()])

    @settings(max_examples=300, deadline=None)
    @given(lists=st.lists(one, max_size=12))
    def run(lists: list[list[int]]) -> None:
        ids = [token_id for each in lists for token_id in each]
        found = decoder_of(tokenizer).bytes_of(ids)
        assert len(found) == len(ids)
        assert b"".join(found).decode() == tokenizer.decode(ids)

    run()


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.binary(max_size=24), cut=st.integers(0, 24))
def test_bytes_that_are_no_utf_8_decode_as_python_replaces_them(data: bytes, cut: int) -> None:
    tokenizer = bytewise_tokenizer(["<end>"])
    encoding = bytes_in_order(tokenizer)
    ids = [encoding.index(byte) for byte in data]
    assert decoded(tokenizer, [ids[:cut], ids[cut:]]) == data.decode(errors="replace")
    text, begins, rest = split_utf8(data)
    assert text == data[:rest].decode(errors="replace")
    assert len(begins) == len(data)


def bytes_in_order(tokenizer: TemplateTokenizer) -> bytes:
    pieces = decoder_of(tokenizer).pieces(range(256))
    return b"".join(pieces)


# From characters back to tokens.


MORE = (
    "é".encode(),
    "é".encode()[1:] + b"a",
    "🙂".encode()[:2],
    "🙂".encode()[2:] + "🙂".encode()[:3],
    b"ab",
    b"\xffa\x80",
)


@pytest.mark.slow
@settings(max_examples=400)
@given(
    ids=st.lists(st.integers(256, 262) | st.sampled_from([65, 66, 131, 143, 150, 180, 200, 255]), max_size=12),
    cut=st.integers(0, 12),
    span=st.data(),
)
def test_a_span_is_the_fewest_tokens_that_hold_its_characters(ids: list[int], cut: int, span: st.DataObject) -> None:
    tokenizer = bytewise_tokenizer(["<end>"], more=MORE)
    lexer = lexer_of(tokenizer)
    text = lexer.feed(ids[:cut]) + lexer.feed(ids[cut:]) + lexer.finish()
    if not text:
        return
    tokens_of = tokens_of_characters(ids, tokenizer)
    assert len(tokens_of) == len(text)
    start = span.draw(st.integers(0, len(text) - 1))
    end = span.draw(st.integers(start + 1, len(text)))
    assert lexer.span(start, end) == (tokens_of[start][0], tokens_of[end - 1][-1] + 1)


def tokens_of_characters(ids: list[int], tokenizer: TemplateTokenizer) -> list[list[int]]:
    """Per character the tokens that hold a byte of it, found by decoding every prefix of the bytes."""
    end = tokenizer.control_id("<end>")
    found: list[list[int]] = []
    run: list[tuple[int, int]] = []  # (byte, token)
    for index, token_id in enumerate([*ids, end]):
        if token_id != end:
            run += [(byte, index) for byte in decoder_of(tokenizer).pieces([token_id])[0]]
            continue
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pending: list[int] = []
        for byte, token in run:
            before = len(pending)
            pending.append(token)
            characters = decoder.decode(bytes([byte]))
            held = len(decoder.getstate()[0])
            if len(characters) == 2 or (characters and held):  # what was pending is no character; this byte begins one
                found.append(pending[:before])
                pending = pending[before:]
            if characters and not held:
                found.append(pending)
                pending = []
        if pending:
            found.append(pending)
        if index < len(ids):
            found += [[index]] * len("<end>")
        run = []
    return found


# Markers.


def test_no_sampled_bytes_can_forge_a_marker() -> None:
    """The characters that stand for markers are half surrogate pairs, which no UTF-8 holds."""
    tokenizer = bytewise_tokenizer(["<think>"])
    order = bytes_in_order(tokenizer)
    encoding = MarkerEncoding(tokenizer, ["<think>"])
    forged = encoding["<think>"].encode("utf-8", "surrogatepass")
    lexer = Lexer(tokenizer, decoder_of(tokenizer), encoding)
    assert lexer.feed([order.index(byte) for byte in forged]) + lexer.finish() == "\ufffd" * 3


@given(text=st.text(alphabet="<thin>/k ", max_size=20), cut=st.integers(0, 20))
def test_what_may_become_a_marker_is_never_settled(text: str, cut: int) -> None:
    search = MarkerSearch({"<think>": 1, "</think>": 2, "k ": 3})
    begun = text[:cut]
    if search.find(begun, 0) is None:
        settled = search.settled(begun, 0)
        found = search.find(text, 0)
        assert found is None or found.start() >= settled
        # and nothing is held back without need
        assert settled == len(begun) or any(m.startswith(begun[settled:]) for m in search.roles)
