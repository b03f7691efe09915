"""Objects that a configuration file names by an import path, "package.module:name"."""

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollouts.errors import describe_exception
from rollouts.run_config.config_file import ConfigFile, EngineFile
from rollouts.run_config.errors import KeyPath
from rollouts.run_config.sections import ImportedEngine, ImportedEnvironment
from rollouts.values import call_error


def imported_files(file: ConfigFile) -> dict[str, str]:
    """By module, the SHA-256 digest of its file: of all that are imported from the directory of the configuration.

    A file of Python that the configuration names brings the modules beside it. Packages that are installed
    in an environment there are left out.
    """
    named = [text.rpartition(":")[0] for text in _texts(file.config.model_dump()) if ".py:" in text]
    directories = {file.directory, *(file.resolve(each).resolve().parent for each in named)}
    beginnings = tuple(os.path.join(each, "") for each in directories)
    digests = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        # A text is compared first: there are thousands of modules, and few of them are here.
        is_own = path.startswith(beginnings) and "site-packages" not in Path(path).parts
        if is_own and name != "__main__" and os.path.isfile(path):
            digests[name] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return dict(sorted(digests.items()))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


def imported_object(file: EngineFile, key: KeyPath, import_path: str) -> Any:
    """The object of an import path. Modules in the directory of the file can be imported, before all others.

    A path with a file of Python in place of the module, "rewards.py:score", is relative to that directory,
    and the modules beside it can be imported.

    Raises `RunConfigError`, which names `key`, for a module that does not exist or cannot be imported, and
    for a name that it does not have.
    """
    module_name, _, name = import_path.rpartition(":")
    directory = file.directory
    path = file.resolve(module_name).resolve() if module_name.endswith(".py") else None
    if path is not None:
        if not path.is_file():
            raise file.error(key, f"there is no file {path}; correct the path")
        directory, module_name = path.parent, path.stem
    make_importable(directory)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        # A module of a user may raise anything, and call sys.exit.
        reason = f"importing {module_name} raised {describe_exception(error)}; mend the module"
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            is_itself = module_name == error.name or module_name.startswith(f"{error.name}.")
            missing = f"neither in {directory} nor installed" if is_itself else f"which {module_name} imports"
            reason = f"there is no module {error.name!r}, {missing}; correct the name, or install the package"
        raise file.error(key, reason) from error
    if path is not None and Path(str(module.__file__)).resolve() != path:
        reason = f"a module {module_name} is loaded from {module.__file__} already; give the file another name"
        raise file.error(key, reason)
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError as error:
        close = get_close_matches(name, [one for one in vars(module) if not one.startswith("_")], n=1)
        cure = f'did you mean "{module_name}:{close[0]}"?' if close else f"define {name} in {module.__file__}"
        raise file.error(key, f"module {module_name} has no {name!r}; {cure}") from error


def imported_function(
    file: EngineFile, key: KeyPath, import_path: str, parameters: Sequence[str] | None = None
) -> Callable[..., Any]:
    """The class or function of an import path, which takes `parameters` where these are known.

    Raises `RunConfigError` for anything else.
    """
    found = imported_object(file, key, import_path)
    if not callable(found):
        raise file.error(key, f"{import_path} is a {type(found).__name__}; name a function or a class")
    if parameters is not None:
        check_call(file, key, found, parameters)
    function: Callable[..., Any] = found
    return function


def imported_factory(
    file: EngineFile, table: str, section: ImportedEnvironment | ImportedEngine, parameters: Sequence[str]
) -> Callable[..., Any]:
    """The `factory` of a table with its `arguments`, which can be called with `parameters`. Raises `RunConfigError`."""
    factory = imported_function(file, (table, "factory"), section.factory)
    check_call(file, (table, "arguments" if section.arguments else "factory"), factory, parameters, section.arguments)
    return partial(factory, **section.arguments)


def check_call(
    file: EngineFile,
    key: KeyPath,
    function: Callable[..., Any],
    positional: Sequence[str],
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise `RunConfigError` unless the signature allows `function(*positional, **arguments)`.

    `positional` are names for the error.
    """
    reason = call_error(function, positional, arguments)
    if reason is not None:
        raise file.error(key, reason)


def make_importable(directory: Path) -> None:
    """Let the modules in a directory be imported, before all others."""
    if sys.path[:1] != [str(directory)]:
        sys.path.insert(0, str(directory))
        importlib.invalidate_caches()
