"""The tokens of a medium that stands between two tokens, outside of any rendered text."""

from collections.abc import Iterable

from renderers.media.item import ExpansionPiece
from renderers.rendered import PlaceholderRange
from renderers.tokens.tokenizer import TemplateTokenizer


def placed_tokens(
    pieces: Iterable[ExpansionPiece], offset: int, tokenizer: TemplateTokenizer
) -> tuple[list[int], PlaceholderRange]:
    """The tokens of an expansion between two tokens of a prompt, and their range, from `offset` on."""
    ids: list[int] = []
    runs: list[tuple[int, int]] = []
    text = ""
    for piece in (*pieces, ExpansionPiece("")):
        control = tokenizer.control_id(piece.text)
        if control is None and piece.text:
            text += piece.text * piece.times
            continue
        # Text between two control tokens is encoded in one pass, as in a rendered prompt.
        ids += tokenizer.encode_run(text).ids if text else []
        text = ""
        if control is None:
            continue
        if piece.embed:
            runs.append((len(ids), len(ids) + piece.times))
        ids += [control] * piece.times
    return ids, PlaceholderRange(offset, len(ids), None if runs == [(0, len(ids))] else tuple(runs))
