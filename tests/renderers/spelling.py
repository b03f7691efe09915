"""Token ids written as text, for tests that need exact ones."""

from renderers import TemplateRenderer


def ids_of(renderer: TemplateRenderer, *pieces: str) -> list[int]:
    """Each piece is a control token or plain text."""
    found: list[int] = []
    for piece in pieces:
        control = renderer.tokenizer.control_id(piece)
        found += renderer.tokenizer.encode_run(piece).ids if control is None else [control]
    return found
