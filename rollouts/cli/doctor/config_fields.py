"""The fields of config.json that transformers' class of a model does not read, though a server's may."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

#: Class of a configuration, and name of one of its fields.
Read = tuple[type, str]

# Code that reads every field: to write, copy and validate configurations.
_GENERIC_READERS = ("transformers.configuration_utils", "transformers.generation.", "huggingface_hub.")
# Fields that describe the file, or that take effect outside of the forward pass.
_NO_PART_OF_FORWARD = frozenset(
    {"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range"}
)
# Tokens and lengths, with which processors and sampling are set up.
_NO_PART_OF_FORWARD_ENDINGS = ("_token_id", "_token_ids", "_token_index", "_seq_length")


@contextlib.contextmanager
def recorded_reads() -> Iterator[set[Read]]:
    """Record which fields of configurations the code of models reads, while a model is loaded and run in this block.

    It replaces the attribute access of transformers' configurations, in all threads, until the block ends.
    """
    from transformers import PretrainedConfig

    reads: set[Read] = set()
    original = PretrainedConfig.__getattribute__

    def recording(config: Any, name: str) -> Any:
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if not name.startswith("_") and not reader.startswith(_GENERIC_READERS):
            kind = type(config)
            reads.add((kind, kind.attribute_map.get(name, name)))
        return original(config, name)

    own = "__getattribute__" in vars(PretrainedConfig)
    PretrainedConfig.__getattribute__ = recording
    try:
        yield reads
    finally:
        if own:
            PretrainedConfig.__getattribute__ = original
        else:
            del PretrainedConfig.__getattribute__


def unread_fields(config: Any, written: Mapping[str, Any], reads: set[Read]) -> dict[str, Any]:
    """The fields of a config.json that were not read, by their path ("text_config.logit_scale"), with their values.

    `config` is transformers' object of it, `written` the content of the file. A field is left out if it is null, cannot
    take part in a forward pass, or was converted to another one when the file was loaded.
    """
    found: dict[str, Any] = {}
    kind = type(config)
    for name, value in written.items():
        attribute = kind.attribute_map.get(name, name)
        held = vars(config).get(attribute)
        if held is None or name.startswith("_"):
            continue
        if hasattr(held, "attribute_map") and isinstance(value, Mapping):
            found |= {f"{name}.{path}": each for path, each in unread_fields(held, value, reads).items()}
        elif (kind, attribute) not in reads and not (
            name in _NO_PART_OF_FORWARD or name.endswith(_NO_PART_OF_FORWARD_ENDINGS)
        ):
            found[name] = value
    return found
