"""A tokenizer with one token for each byte, and control tokens: every span in a test can be counted by hand."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from renderers.tokens.tokenizer import TemplateTokenizer


def bytewise_tokenizer(control: Iterable[str], *, more: Sequence[bytes] = ()) -> TemplateTokenizer:
    """Ids 0-255 are the bytes in byte-level order; then come `more`, tokens of several bytes, and `control`.

    Text is never encoded with `more`.
    """
    return _made(tuple(control), tuple(more))


@functools.cache
def _made(control: tuple[str, ...], more: tuple[bytes, ...]) -> TemplateTokenizer:
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = [chr(byte) for byte in alphabet] + [chr(0x100 + i) for i in range(256 - len(alphabet))]
    character_of = dict(zip([*alphabet, *sorted(set(range(256)) - set(alphabet))], characters, strict=True))
    vocabulary = [*characters, *("".join(character_of[byte] for byte in token) for token in more)]
    definition: dict[str, Any] = {
        "added_tokens": [
            {"id": len(vocabulary) + i, "content": token, "special": True, "normalized": False}
            for i, token in enumerate(control)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(vocabulary)}, "merges": []},
    }
    for entry in definition["added_tokens"]:
        entry.update(single_word=False, lstrip=False, rstrip=False)
    return TemplateTokenizer(definition, model="bytewise")


def ids_of_text(tokenizer: TemplateTokenizer, text: str) -> list[int]:
    """Text with its control tokens as ids, as a model samples it."""
    ids: list[int] = []
    position = 0
    while (found := tokenizer.find_control(text, position, len(text))) is not None:
        ids += [*tokenizer.encode_run(text[position : found.start]).ids, found.token_id]
        position = found.end
    return [*ids, *tokenizer.encode_run(text[position:]).ids]
