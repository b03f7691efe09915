"""From provenance text to token ids: control tokens by table, everything else by one BPE pass per run."""

from renderers.tokens.encoding import BodyPolicy, EncodedText, encode_printed
from renderers.tokens.tokenizer import TemplateTokenizer

__all__ = ["BodyPolicy", "EncodedText", "TemplateTokenizer", "encode_printed"]
