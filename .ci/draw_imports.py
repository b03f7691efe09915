#!/usr/bin/env python3
"""Draws the imports between the folders of the three packages into CONTRIBUTING.md.

    python .ci/draw_imports.py            # writes the figure between its two marker comments
    python .ci/draw_imports.py --check    # exits with 1 if the figure there is another one

A folder stands in a layer above all folders that it imports. A circle has no layers: `graphlib.CycleError` names it.
"""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
PACKAGES = ("rollouts", "transport", "renderers")
MARKERS = ("<!-- imports: drawn by .ci/draw_imports.py -->", "<!-- end of imports -->")


def figure() -> str:
    """The packages from above, each with its folders."""
    sys.path.insert(0, str(ROOT))  # this checkout, whichever one is installed
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    rows = [row for package in PACKAGES for row in (*_room(package, ()), *_rooms_in(graph, package), "")]
    return "\n".join(["```text", *rows[:-1], "```"])


def _rooms_in(graph: grimp.ImportGraph, parent: str) -> list[str]:
    """The rows of the folders in a folder, from the highest layer down; a rule stands between two layers."""
    below = _folders_below(graph, parent)
    sorter = TopologicalSorter(below)
    sorter.prepare()
    rows: list[str] = []
    while sorter.is_active():
        layer = sorter.get_ready()
        sorter.done(*layer)
        rooms: list[str] = []
        for folder in sorted(layer):
            # An import that another one implies is left out.
            implied = {name for other in below[folder] for name in below[other]}
            rooms += [*_room(folder, below[folder] - implied), *_rooms_in(graph, folder)]
        rule = [_indent(parent) + "    " + "-" * 8] if rows else []
        rows = [*rooms, *rule, *rows]
    return rows


def _folders_below(graph: grimp.ImportGraph, parent: str) -> dict[str, set[str]]:
    """By folder in `parent`: the folders there that it imports, itself or through files and folders of `parent`."""
    children = graph.find_children(parent)
    imports = {child: _siblings_imported(graph, child, children) for child in children}
    below = {}
    for folder in filter(_is_folder, children):
        found: set[str] = set()
        waiting = set(imports[folder])
        while waiting:
            found.add(name := waiting.pop())
            waiting |= imports[name] - found
        below[folder] = set(filter(_is_folder, found))
    return below


def _siblings_imported(graph: grimp.ImportGraph, child: str, children: set[str]) -> set[str]:
    modules = {child, *graph.find_descendants(child)}
    imported = {name for module in modules for name in graph.find_modules_directly_imported_by(module)} - modules
    depth = child.count(".") + 1
    return {".".join(name.split(".")[:depth]) for name in imported} & children


def _room(folder: str, imports: tuple[str, ...] | set[str]) -> list[str]:
    indent = _indent(folder)
    arrow = "  -> " + ", ".join(sorted(name.rpartition(".")[2] for name in imports)) if imports else ""
    return [f"{indent}{folder.rpartition('.')[2]}/{arrow}", f"{indent}    {_first_sentence(folder)}"]


def _indent(folder: str) -> str:
    return "    " * folder.count(".")


def _first_sentence(folder: str) -> str:
    docstring = ast.get_docstring(ast.parse((_path(folder) / "__init__.py").read_text("utf-8"))) or ""
    return " ".join(re.split(r"(?<=[.])\s|\n\n", docstring, maxsplit=1)[0].split())


def _is_folder(module: str) -> bool:
    return (_path(module) / "__init__.py").is_file()


def _path(module: str) -> Path:
    return ROOT.joinpath(*module.split("."))


def main() -> int:
    before, start, rest = PAGE.read_text("utf-8").partition(MARKERS[0])
    drawn, end, after = rest.partition(MARKERS[1])
    new = f"\n{figure()}\n"
    if not end:
        sys.exit(f"{PAGE.name} has no lines {MARKERS[0]} and {MARKERS[1]}; write them where the figure belongs")
    if "--check" in sys.argv[1:]:
        if drawn != new:
            print(f"{PAGE.name}: the figure of the imports is not that of the code; run python .ci/draw_imports.py")
        return int(drawn != new)
    PAGE.write_text(before + start + new + end + after, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
