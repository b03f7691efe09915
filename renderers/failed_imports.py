"""Imports that cannot work: files of PyPI's `renderers` between those of this package, and names it does not have."""

from __future__ import annotations

import dis
import sys
from pathlib import Path

from renderers.errors import MissingNameError, MixedPackagesError

_PACKAGE = Path(__file__).parent
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def check_package_files() -> None:
    """Raise `MixedPackagesError` if PyPI's `renderers` is installed in the folder of this package.

    Which of its files are in use depends on the order of installation, and each imports names that the other lacks.
    """
    if (_PACKAGE / "_version.py").exists():  # every release of PyPI's package has this file, and this package never
        raise MixedPackagesError(str(_PACKAGE))


def missing_name(module: str, name: str) -> AttributeError | MissingNameError:
    """The error of a module's `__getattr__` for a name that it does not have.

    Python replaces the text of an AttributeError by its own in `from module import name`; there it is a
    `MissingNameError`. `hasattr` and `getattr` with a default work as ever.
    """
    frame = sys._getframe(2)  # of the code that executes the import or reads the attribute
    if frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM:
        return MissingNameError(module, name, str(frame.f_globals.get("__name__", "a program")))
    return AttributeError(f"module {module!r} has no attribute {name!r}")
