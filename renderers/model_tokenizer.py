"""A tokenizer of a model directory or repository, without transformers: text to ids, ids to text, special tokens."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from renderers.errors import LoadError
from renderers.model_files import ModelFiles

_log = logging.getLogger("renderers")


class ModelTokenizer:
    """What programs use of a tokenizer of transformers; `create_renderer` takes it in place of one.

    `name_or_path` is the name that it was loaded by. `chat_template` is the text of the model's template,
    None if there is none; `special_tokens_map` maps `eos_token` and the like to their text. Tokens that a
    model does not have are None, and so are their ids.
    """

    def __init__(self, name_or_dir: str | Path) -> None:
        self.files = ModelFiles.of(name_or_dir)
        self.name_or_path = str(name_or_dir)
        self.backend_tokenizer = tokenizers.Tokenizer.from_file(str(self.files.tokenizer_path))
        self.special_tokens_map: dict[str, str] = self.files.special_tokens
        self.chat_template = self.files.default_template
        self._vocabulary_size = self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __len__(self) -> int:
        return self._vocabulary_size

    def __getattr__(self, name: str) -> Any:
        """`eos_token`, `pad_token_id` and the like."""
        if name.endswith("_token") and not name.startswith("_"):
            return self.special_tokens_map.get(name)
        if name.endswith("_token_id") and not name.startswith("_"):
            token = self.special_tokens_map.get(name.removesuffix("_id"))
            return None if token is None else self.backend_tokenizer.token_to_id(token)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; transformers' own tokenizers may have")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Control tokens spelled in it are control tokens, as in transformers."""
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """The id of a token, or of several; for a missing one that of the unknown token, or None."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if token_id is None else token_id


#: Repositories that need a request for access -> a repository with the same tokenizer and template that does not.
_OPEN_COPIES = {
    "meta-llama/Llama-3.2-1B-Instruct": "unsloth/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct": "unsloth/Llama-3.2-3B-Instruct",
}


def load_tokenizer(model_name_or_path: str) -> ModelTokenizer:
    """The tokenizer of a directory or a repository. Needs neither transformers nor code of the repository.

    Raises a `LoadError` that names the missing file. For a Llama 3.2 repository that cannot be read, the
    tokenizer comes from an open repository with the same files, which is logged; `name_or_path` keeps the
    given name.
    """
    try:
        return ModelTokenizer(model_name_or_path)
    except LoadError:
        if model_name_or_path not in _OPEN_COPIES:
            raise
        copy = _OPEN_COPIES[model_name_or_path]
        _log.info("%s cannot be read; its tokenizer comes from %s, an open repository", model_name_or_path, copy)
        tokenizer = ModelTokenizer(copy)
        tokenizer.name_or_path = model_name_or_path
        return tokenizer
