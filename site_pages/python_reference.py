"""The pages of the reference of the Python packages: one for each public package, which mkdocstrings fills."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("renderers", "transport", "rollouts")
# Modules that users import by their own path.
MODULES = (
    "rollouts.rewards",
    "rollouts.serve.app",
    "rollouts.serve.gateway.routes",
)


def python_reference_pages() -> dict[str, str]:
    """The Markdown of each page, by its path in the site."""
    names = sorted([*public_packages(), *MODULES])
    return {f"reference/python/{name}.md": f"# {name}\n\n::: {name}\n" for name in names}


def public_packages() -> Iterator[str]:
    """The packages whose `__init__.py` lists its names in `__all__`. The files are parsed, and nothing is imported."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("__init__.py"):
            if _defines_all(path):
                yield ".".join(path.parent.relative_to(ROOT).parts)


def _defines_all(path: Path) -> bool:
    statements = ast.parse(path.read_text("utf-8")).body
    targets = (target for each in statements if isinstance(each, ast.Assign) for target in each.targets)
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)
