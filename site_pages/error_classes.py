"""All error classes of the three packages."""

import importlib
import re
from collections.abc import Iterator

from python_reference import PACKAGES, ROOT

from renderers.errors import RendererError
from rollouts.errors import RolloutsError
from transport.errors import TransportError

ERROR_ROOTS: tuple[type[Exception], ...] = (RendererError, TransportError, RolloutsError)


def error_classes() -> list[type[Exception]]:
    """Every error class of the packages, by module and name. Imports the modules that declare one."""
    for name in modules_that_declare_errors():
        importlib.import_module(name)
    found = {each for root in ERROR_ROOTS for each in _with_subclasses(root)}
    ours = (each for each in found if each.__module__.partition(".")[0] in PACKAGES)
    return sorted(ours, key=lambda each: (each.__module__, each.__name__))


def modules_that_declare_errors() -> Iterator[str]:
    """The names of the modules whose text has a public class with a name that ends in `Error`."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if re.search(r"^class [A-Z]\w*Error\(", path.read_text(encoding="utf-8"), re.MULTILINE):
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _with_subclasses(root: type[Exception]) -> Iterator[type[Exception]]:
    yield root
    for each in root.__subclasses__():
        yield from _with_subclasses(each)
