"""The template of a model: which of its sources is used, and the conversions that come before it."""

from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from renderers.errors import LoadError, short_repr
from renderers.model_files import DEFAULT_TEMPLATE, TOOL_TEMPLATE
from renderers.process.files import read_text
from renderers.template.call_forms import CallForms
from renderers.template.chat_template import ChatTemplate, ConvertedTemplate, Template, TemplateWithTools
from renderers.template.content_forms import ContentForms
from renderers.tokens.tokenizer import TemplateTokenizer


def compiled_template(
    sources: Mapping[str, str],
    tokenizer: TemplateTokenizer,
    variables: Mapping[str, Any],
    now: Callable[[], datetime],
) -> Template:
    """The model's template; a `TemplateWithTools` if it has another one for conversations with tools.

    As in `get_chat_template` of transformers: `tool_use` if tools are given, else `default`.
    """
    from renderers.formats.kimi_prompts import TypeScriptToolTemplate, reads_typescript

    def compiled(source: str) -> Template:
        template = ChatTemplate(source, model=tokenizer.model, variables=variables, now=now)
        return converting(TypeScriptToolTemplate(template) if reads_typescript(source) else template)

    default = next(iter(sources.values())) if len(sources) == 1 else sources.get(DEFAULT_TEMPLATE)
    if default is None and TOOL_TEMPLATE not in sources:
        found = f" (it has templates named {', '.join(sorted(sources))})" if sources else ""
        raise LoadError(
            f"{tokenizer.model} holds no chat_template.jinja: put the model's chat template there, or "
            f"pass chat_template= as text, a path or a name{found}"
        )
    if TOOL_TEMPLATE in sources and len(sources) > 1:
        without_tools = None if default is None else compiled(default)
        return TemplateWithTools(without_tools, compiled(sources[TOOL_TEMPLATE]), model=tokenizer.model)
    assert default is not None
    return compiled(default)


def converting(template: Template) -> Template:
    """The template behind the conversions of tool calls and of contents to forms that it reads.

    As inference servers do it: content becomes one text part where only parts are read, and text parts one string,
    joined by line breaks, where only strings are. A developer message becomes a system message where only those are
    read. Arguments of calls become a JSON object or the text of one: OpenAI's API carries text, which gpt-oss, Llama
    and Qwen2.5 would print as a quoted string.
    """
    template = ConvertedTemplate(template, CallForms(template).convert)
    return ConvertedTemplate(template, ContentForms(template).convert)


def chosen_sources(model: str, named: dict[str, str], chosen: str | Path | None) -> dict[str, str]:
    """The model's own templates by name, or only the chosen one, given by its name, a path or its text."""
    if chosen is None:
        return named
    is_name = isinstance(chosen, str) or (isinstance(chosen, Path) and not _is_file(chosen))
    if is_name and str(chosen) in named:
        return {DEFAULT_TEMPLATE: named[str(chosen)]}
    return {DEFAULT_TEMPLATE: _text_or_file(model, named, chosen)}


def _text_or_file(model: str, names: Collection[str], chosen: str | Path) -> str:
    """A template that is given as its text or as a path; `names`, of the model's own templates, are for the error."""
    # A template is code with braces or line breaks; a path has neither.
    if isinstance(chosen, str) and ("{" in chosen or "\n" in chosen):
        return chosen
    path = Path(chosen)
    if not _is_file(path):
        raise LoadError(
            f"{model} holds no {str(chosen)[:255]}: chat_template= is template text, the path of a file, "
            "or the name of one of the model's own templates, which are "
            f"{', '.join(map(short_repr, sorted(names))) or 'none'}"
        )
    return read_text(path)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # invalid as a path, for example too long
        return False
