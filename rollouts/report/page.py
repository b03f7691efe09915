"""The page of a report: sections of texts, tables and charts, written by one template.

It has no script: numbers under the pointer are `<title>`s of its SVG.
"""

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

from jinja2 import Environment, Template

from rollouts.report.charts import EDGES, Chart, Drawing, draw
from rollouts.terminal.text import printable
from rollouts.view.page import PAGE_END, content_hash, document_head, static_file


class Cell(NamedTuple):
    """A text of a table or a list: a link with an `address`, or code, with another text `below` it."""

    text: str
    address: str = ""
    below: str = ""
    is_code: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    style: Literal["", "note", "absent"] = ""
    kind: ClassVar = "text"


@dataclass(frozen=True, slots=True)
class Heading:
    text: str
    kind: ClassVar = "heading"


@dataclass(frozen=True, slots=True)
class Facts:
    rows: Sequence[tuple[str, str]]
    kind: ClassVar = "facts"


@dataclass(frozen=True, slots=True)
class Items:
    items: Sequence[str | Cell]
    kind: ClassVar = "items"


@dataclass(frozen=True, slots=True)
class Table:
    """`label` names it."""

    label: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    kind: ClassVar = "table"


@dataclass(frozen=True, slots=True)
class Charts:
    drawings: Sequence[Drawing]
    kind: ClassVar = "charts"


Block: TypeAlias = Text | Heading | Facts | Items | Table | Charts
Section: TypeAlias = tuple[str, Sequence[Block]]


def charts_of(charts: Iterable[Chart]) -> list[Block]:
    """The charts as one block; none where there are none."""
    drawings = [draw(chart) for chart in charts]
    return [Charts(drawings)] if drawings else []


def html_page(title: str, sections: Sequence[Section], link: Cell | None = None) -> bytes:
    """A page of named sections, with `link` below its title. Its policy allows its own style and nothing else."""
    style = static_file("rollouts.report", "report.css")
    policy = f"default-src 'none'; style-src '{content_hash(style)}'; base-uri 'none'; form-action 'none'"
    shown = visible(title, 200)
    body = _template().render(title=shown, link=link, sections=sections)
    return document_head(html.escape(shown), policy, style) + body.encode("utf-8", "replace") + PAGE_END


# Characters that Python calls printable and that a browser draws as nothing.
_DRAWN_AS_NOTHING: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def visible(text: str, longest: int = 2000) -> str:
    """`text`, cut after `longest` characters; invisible characters are written as `<U+202E>`."""
    cut = text if len(text) <= longest else f"{text[:longest]}… ({len(text):,} characters)"
    return _DRAWN_AS_NOTHING.sub(lambda found: f"<U+{ord(found[0]):04X}>", printable(cut))


@cache
def _template() -> Template:
    """The template: each value that it prints is visible, and escaped unless the template itself made it."""
    environment = Environment(autoescape=True, finalize=_finalized, trim_blocks=True, lstrip_blocks=True)
    environment.globals["edges"] = EDGES
    return environment.from_string(static_file("rollouts.report", "page.html").decode())


def _finalized(value: Any) -> Any:
    is_markup = hasattr(value, "__html__")  # what a macro has written
    return visible(value) if isinstance(value, str) and not is_markup else value
