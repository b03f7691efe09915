"""What every test folder shares: one tiny checkpoint a session, and how two processes share the tests."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import os
import signal
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import httpx
import jinja2
import pytest
import typer.testing
from corpus import is_drawn
from hypothesis import settings

from renderers.template.environment import TracingEnvironment

if TYPE_CHECKING:
    from renderers import TemplateRenderer

# How long an example takes is the machine's business; a slow one is no failure.
settings.register_profile("any-machine", deadline=None, max_examples=25)
# With the same examples in every run, `.ci/run` passes or fails because of the change, not of what was drawn.
settings.register_profile("repeatable", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=250)  # .ci/full
settings.load_profile(os.environ.get("MMROLLOUTS_HYPOTHESIS_PROFILE", "any-machine"))

pytest_plugins = ["skips"]

# The processes that share the tests share the cores: the threads of torch in one would wait for those in the other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

# A server of a test may wait for a busy machine for longer than the five seconds that httpx gives a call by default.
inspect.signature(httpx.get).parameters["timeout"].default.read = 120.0

# Read when ray is imported, by whichever test module is collected first: its processes then listen on 127.0.0.1 alone,
# and send no statistics.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

# The programs that tests start import the packages: compiled once, not again by each of some hundred processes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell starts its background jobs with Ctrl-C ignored, and nohup all with SIGHUP: what tests start to interrupt it
# would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Its `CliRunner` would build the whole command for each call, in 20 ms.
typer.testing._get_command = functools.cache(typer.testing._get_command)

# Tokenizers and templates live as long as the process; to go through them often is a tenth of a run's time.
gc.set_threshold(50_000, 20, 50)


_compile = TracingEnvironment.compile_chat_template
_CODE: dict[str, CodeType] = {}


def _compile_once(environment: TracingEnvironment, source: str) -> jinja2.Template:
    """Compiling a template takes some 40 ms, and many tests load a renderer of the same one."""
    if source in _CODE:
        return environment.template_class.from_code(environment, _CODE[source], environment.make_globals(None))

    def compile_and_keep(tree: Any) -> CodeType:
        _CODE[source] = jinja2.Environment.compile(environment, tree)
        return _CODE[source]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "compile", compile_and_keep, raising=False)
        return _compile(environment, source)


TracingEnvironment.compile_chat_template = _compile_once  # type: ignore[method-assign]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from scheduling import SharedWorkScheduling

    return SharedWorkScheduling(config, log)


#: Folders that have tests of one mark alone: to import them takes seconds in each process.
_FOLDERS_OF_MARKS = {"tests/real": "real", "tests/gpu": "gpu"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A plain run imports nothing of a folder all of whose tests it leaves out."""
    module = collection_path.relative_to(config.rootpath).as_posix()
    return True if f"not {_FOLDERS_OF_MARKS.get(module)}" in config.option.markexpr else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quarter", action="store_true", help="a quarter of the tests, another one for each commit")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quarter"):
        left_out = [item for item in items if not is_drawn(item.nodeid)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_drawn(item.nodeid)]


# Its conftest.py imports both.
collect_ignore = ["rollouts/adapters"] if find_spec("torch") is None else []


@pytest.fixture
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL checkpoint with random weights. Read only: copy what you want to change.

    Where torch is not installed it has no weights; tests that need none run there, too (.ci/other_pythons).
    """
    from rollouts.testing import tiny_qwen3_vl

    return tiny_qwen3_vl(tmp_path_factory.mktemp("tiny_qwen3_vl"), seed=0, weights=find_spec("torch") is not None)


@pytest.fixture(scope="session")
def tiny_audio_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-Audio checkpoint with random weights. Read only: copy what you want to change."""
    pytest.importorskip("torch")
    from rollouts.testing import tiny_qwen2_audio

    return tiny_qwen2_audio(tmp_path_factory.mktemp("tiny_qwen2_audio"))


@pytest.fixture(scope="session")
def hearing(tiny_audio_dir: Path) -> TemplateRenderer:
    """The renderer of a model that hears."""
    from renderers import load_renderer

    return load_renderer(tiny_audio_dir)


@pytest.fixture(scope="session")
def renderer(tiny_model_dir: Path) -> Generator[TemplateRenderer]:
    """One for all tests. Methods are replaced by `monkeypatch.setitem(vars(renderer), name, ...)`.

    After `setattr`, older releases of pytest leave the method of before in the object, where it hides what a later test
    replaces in the class.
    """
    from renderers import load_renderer

    shared = load_renderer(tiny_model_dir)
    yield shared
    assert [name for name in vars(shared) if callable(getattr(type(shared), name, None))] == []


@pytest.fixture(scope="session")
def trl() -> ModuleType:
    """TRL with its trainers imported.

    It would take the folder tests/rollouts/vllm, which pytest puts within reach of imports, for the package vllm.
    """
    module = pytest.importorskip("trl")
    import_utils = importlib.import_module("trl.import_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, "is_vllm_available", lambda min_version=None: False)
        _ = module.GRPOTrainer, module.SFTTrainer  # imported when first used
    return module
