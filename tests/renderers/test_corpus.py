"""The choice of tokenizers that keep their whole vocabulary, and what the others have lost."""

from __future__ import annotations

import functools
import json
from typing import Any

import corpus
import pytest
from tokenizers import Tokenizer


@functools.cache
def way_of_encoding(name: str) -> str:
    definition = json.loads((corpus.model_dir(name) / "tokenizer.json").read_bytes())
    options = {key: value for key, value in definition["model"].items() if key not in ("vocab", "merges")}
    return json.dumps([options, *(definition[step] for step in ("normalizer", "pre_tokenizer", "decoder"))])


@pytest.mark.slow
def test_one_tokenizer_of_each_way_of_encoding_has_its_whole_vocabulary() -> None:
    whole = [way_of_encoding(name) for name in corpus.WHOLE_VOCABULARIES]
    assert len(set(whole)) == len(whole)
    assert {way_of_encoding(name) for name in corpus.tokenizer_names()} == set(whole)


@pytest.mark.slow
def test_a_cut_vocabulary_has_the_added_tokens_and_fewer_others_and_gives_texts_back() -> None:
    def vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
        return dict(tokenizer.get_vocab(with_added_tokens=False))

    def added(tokenizer: Tokenizer) -> list[Any]:
        return [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]

    cut, whole = (
        Tokenizer.from_file(str(directory("glm-4.7-flash") / "tokenizer.json"))
        for directory in (corpus.model_dir, corpus.whole_model_dir)
    )
    assert added(cut) == added(whole)
    assert vocabulary(cut).keys() < vocabulary(whole).keys()
    assert len(vocabulary(cut)) < len(vocabulary(whole)) / 10
    text = "Zürich 🙂 日本語<|user|>\n two"
    assert cut.decode(cut.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", ["glm-4.7-flash", "deepseek-v3.2"])
def test_ids_of_a_cut_tokenizer_are_dense_and_those_of_its_definition(name: str) -> None:
    tokenizer = Tokenizer.from_file(str(corpus.model_dir(name) / "tokenizer.json"))
    assert sorted(tokenizer.get_vocab().values()) == list(range(tokenizer.get_vocab_size()))
    definition = json.loads((corpus.model_dir(name) / "tokenizer.json").read_bytes())
    for token in definition["added_tokens"]:
        assert tokenizer.token_to_id(token["content"]) == token["id"]
