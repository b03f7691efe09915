"""Tokenizers made from vocabularies that packages hold in other forms: byte-pair ranks and GGUF."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

# As published with the two vocabularies.
LLAMA_3_PATTERN = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
O200K_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4


def write_ranks(vocabulary: Path, target: Path) -> None:
    """Rewrite a quicktok vocabulary as tiktoken's text: base64 of the bytes, a space, the rank."""
    ranked = sorted(_ranks(vocabulary.read_bytes()))
    target.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in ranked))


def _ranks(packed: bytes) -> Iterator[tuple[int, bytes]]:
    position = 4  # the count
    while position < len(packed):
        (length,) = struct.unpack_from("<H", packed, position)
        token = packed[position + 2 : position + 2 + length]
        (rank,) = struct.unpack_from("<I", packed, position + 2 + length)
        position += length + 6
        yield rank, token


def from_ranks(vocabulary: Path, pattern: str, controls: Sequence[str]) -> Tokenizer:
    """A tokenizer of a quicktok vocabulary; the control tokens follow it in order."""
    ranks = {token: rank for rank, token in sorted(_ranks(vocabulary.read_bytes()))}
    letters = bytes_to_unicode()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    # The merges of a rank-ordered vocabulary: all ways to make a token of two, in the order of what they make.
    merges = []
    for token in ranks:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(ranks[left], ranks[right], left, right) for left, right in pairs if left in ranks and right in ranks]
        merges += [(written(left), written(right)) for _, _, left, right in sorted(known)]
    made = Tokenizer(
        models.BPE(vocab={written(token): rank for token, rank in ranks.items()}, merges=merges, ignore_merges=True)
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    return made


def gguf_metadata(path: Path) -> dict[str, Any]:
    """The metadata at the head of a GGUF file."""
    packed = path.read_bytes()
    position = 4

    def read(kind: str) -> Any:
        nonlocal position
        (value,) = struct.unpack_from("<" + kind, packed, position)
        position += struct.calcsize("<" + kind)
        return value

    def value_of(kind: int) -> Any:
        nonlocal position
        if kind == _GGUF_STRING:
            length = read("Q")
            position += length
            return packed[position - length : position].decode()
        if kind == _GGUF_ARRAY:
            item, count = read("I"), read("Q")
            return [value_of(item) for _ in range(count)]
        return read(_GGUF_SCALARS[kind])

    read("I"), read("Q")  # version, count of tensors
    return {value_of(_GGUF_STRING): value_of(read("I")) for _ in range(read("Q"))}


def gemma(path: Path) -> Tokenizer:
    """Gemma's tokenizer from the GGUF file of its vocabulary."""
    metadata = gguf_metadata(path)
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    kinds = dict(zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True))
    controls = [token for token, kind in kinds.items() if kind in (_GGUF_CONTROL, _GGUF_USER_DEFINED)]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    return made
