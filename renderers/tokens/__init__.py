"""From printed text to token ids: control tokens by table, each run of text between them by one BPE pass."""

from renderers.tokens.encoding import BodyPolicy, EncodedText, encode_printed
from renderers.tokens.tokenizer import TemplateTokenizer

__all__ = ["BodyPolicy", "EncodedText", "TemplateTokenizer", "encode_printed"]
