"""Objects named by an import path in a configuration."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any


def load_target(import_path: str) -> Any:
    """The object that `module.Name` or `path/to/file.py:Name` names; the module is imported.

    Raises `ValueError` for a path of another form and for a name that the module does not have, `FileNotFoundError`
    for a missing file.
    """
    separator = ":" if ":" in import_path else "."
    module_name, _, name = import_path.rpartition(separator)
    if not module_name or not name or (separator == "." and ("/" in import_path or name == "py")):
        raise ValueError(f"import_path {import_path!r} must look like module.Name or path/to/file.py:Name")
    module = _file_module(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    if not hasattr(module, name):
        raise ValueError(f"import_path {import_path!r}: {module_name} has no attribute {name!r}")
    return getattr(module, name)


def _file_module(path: Path) -> ModuleType:
    """The module of a file, imported once; two files of one name are two modules."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"import_path: there is no file {path}")
    name = f"custom_renderer_{path.stem}_{blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs, as `import` does: its dataclasses look themselves up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
