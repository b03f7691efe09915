"""The test suites of other programs, and one run of a suite in an environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import fake_hub
from corpus import quarter_of_the_commit
from environments import Environment, Package
from sources import CACHE, fetch

_PLUGIN = Path(__file__).with_name("plugin")
_LIMIT_S = 3600.0
_MOST_REPEATED = 20
_FILES_AT_A_TIME = 6


@dataclass(frozen=True)
class Suite:
    """Tests of a source distribution.

    program: row of sources.toml whose environment runs them.
    files: what of the unpacked distribution is put where the tests run: never its package.
    tests, options: for pytest.
    left_out: beginnings of test ids that are not run; `drawn`: of those of which a quarter is run, by the commit.
    is_consumer: a program that uses renderers. Its tests have time limits: the few that fail are repeated.
    """

    name: str
    program: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    options: tuple[str, ...]
    is_consumer: bool
    left_out: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()


# test_parity has 7,500 cases and test_roundtrip 1,150, hours of one core. Left out are checkpoints with the template of
# another one, three quarters of the cases of Hy3 (73 configurations), and in test_roundtrip the configurations with
# other than default fields of families that have many.
_SAME_TEMPLATE = (
    "PrimeIntellect/Qwen3-1.7B",
    "Qwen/Qwen3.5-2B",
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3.5-122B-A10B",
    "Qwen/Qwen3.5-397B-A17B",
    "Qwen/Qwen3.8-Flash-Next",
    "google/gemma-4-E4B-it",
    "google/gemma-4-26B-A4B-it",
    "meta-llama/Llama-3.2-3B-Instruct",
)
_HY3_SCENARIOS = (
    "user",
    "system-user",
    "terminal-assistant",
    "multi-turn",
    "empty-assistant",
    "generation-prompt",
    "tools-without-system",
    "tool-call",
    "multiple-tool-calls",
    "tool-response",
    "named-tool-response",
    "consecutive-tool-responses",
    "multi-step-tool-cycle",
)
_DEFAULTS_ONLY = (
    "Qwen/Qwen3.6-35B-A3B",
    "Qwen/Qwen3.8-27B",
    "google/gemma-4-31B-it",
    "zai-org/GLM-5",
    "zai-org/GLM-5.1",
    "zai-org/GLM-5.3",
    "zai-org/GLM-4.7-Flash",
    "THUDM/GLM-4.5-Air",
    "MiniMaxAI/MiniMax-M2.5",
    "deepseek-ai/DeepSeek-V4-Flash-0731",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
    "poolside/Laguna-S-2.1",
    "openai/gpt-oss-20b",
    "meta-llama/Llama-3.2-1B-Instruct",
    "tencent/Hy3",
)
_ROUNDTRIP = "tests/test_roundtrip.py::test_reference_continuation_through_generate"
_PARITY = "tests/test_parity.py::test_renderer_matches_reference"

SUITES = {
    suite.name: suite
    for suite in (
        # Those of test_e2e that need a key of an API are skipped. test_color_codeword_tasks needs a folder that the
        # source distribution lacks.
        Suite(
            "verifiers-0.4.0",
            "verifiers-0.4.0",
            ("tests", "pyproject.toml"),
            ("tests",),
            ("--tb=short", "-m", "not e2e", "--ignore=tests/v1/test_color_codeword_tasks.py"),
            is_consumer=True,
        ),
        Suite(
            "verifiers-0.3.1",
            "verifiers-0.3.1",
            ("tests", "pyproject.toml"),
            (
                "tests/test_renderer_client.py",
                "tests/test_renderer_e2e.py",
                "tests/test_save_utils.py",
                "tests/test_trajectory_processing.py",
                "tests/v1/test_graph.py",
                "tests/v1/test_trace.py",
            ),
            ("--tb=short",),
            is_consumer=True,
        ),
        Suite(
            "renderers-0.1.12",
            "verifiers-0.4.0",
            ("tests",),
            ("tests",),
            # To write tracebacks of some thousand failures would take longer than the tests.
            ("-p", "private_names", "-n", "2", "--dist", "worksteal", "--tb=no", "--assert=plain"),
            is_consumer=False,
            left_out=(
                *(f"{test}[{model}-" for test in (_PARITY, _ROUNDTRIP) for model in _SAME_TEMPLATE),
                *(f"{_PARITY}[tencent/Hy3-{scenario}-" for scenario in _HY3_SCENARIOS),
                *(f"{_ROUNDTRIP}[{model}-{{'" for model in _DEFAULTS_ONLY),
            ),
            drawn=("tests/",),
        ),
    )
}


@dataclass(frozen=True)
class Run:
    """What a suite gave: the outcome of each test id (passed, failed, error, skipped), and the seconds it took."""

    outcomes: dict[str, str]
    seconds: float


def portions(suite: Suite) -> list[list[str]]:
    """The tests that are run at a time: all of a consumer's, else those of a few files."""
    if suite.is_consumer:
        return [[]]
    files = [f"tests/{file.name}" for file in sorted((fetch(suite.name) / "tests").glob("test_*.py"))]
    return [files[start : start + _FILES_AT_A_TIME] for start in range(0, len(files), _FILES_AT_A_TIME)]


def run(
    suite: Suite,
    package: Package,
    tests: Sequence[str] = (),
    *,
    only: Sequence[str] | None = None,
    explain: bool = False,
) -> Run:
    """Run a suite, or only the given files or ids of it, with one of the packages, offline.

    only: the ids that are run; None: all but what the suite leaves out.
    explain: write why tests failed.
    """
    environment = Environment(suite.program, package)
    environment.prepare()
    fake_hub.build()
    place = CACHE / "runs" / f"{suite.name}-{package}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in suite.files:
        file = fetch(suite.name) / name
        if file.is_dir():
            shutil.copytree(file, place / name)
        else:
            shutil.copy2(file, place / name)
    started = time.monotonic()
    explained = ("--tb=short", "--assert=rewrite") if explain else ()
    deselected = [f"--deselect={beginning}" for beginning in suite.left_out]
    chosen = {"only": only, "drawn": suite.drawn, "quarter": quarter_of_the_commit()}
    (place / "chosen.json").write_text(json.dumps(chosen), encoding="utf-8")
    outcomes = _pytest(environment, place, *(tests or suite.tests), *suite.options, *explained, *deselected)
    again = [test for test, outcome in outcomes.items() if outcome in ("failed", "error")]
    if suite.is_consumer and 0 < len(again) <= _MOST_REPEATED:
        # Theirs have time limits, which a busy machine exceeds.
        outcomes |= _pytest(environment, place, *again, "--tb=short")
    return Run(outcomes, time.monotonic() - started)


def _pytest(environment: Environment, place: Path, *arguments: str) -> dict[str, str]:
    command = [
        environment.python,
        "-m",
        "pytest",
        "-p",
        "outcomes_plugin",
        "-p",
        "chosen_tests",
        "-p",
        "no:cacheprovider",
        "-q",
    ]
    with (place / "output.txt").open("ab") as output:
        subprocess.run(
            [*command, "--continue-on-collection-errors", *arguments],
            cwd=place,
            env=_variables(place),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_S,
            check=False,
        )
    written = place / "outcomes.json"
    # pytest does not start where their conftest.py cannot be imported.
    outcomes: dict[str, str] = json.loads(written.read_text(encoding="utf-8")) if written.is_file() else {}
    written.unlink(missing_ok=True)
    return outcomes


def _variables(place: Path) -> dict[str, str]:
    """The environment of a run: offline, with the hub, and without keys that would let tests call a service."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("_KEY", "_TOKEN"))}
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTEST_ADDOPTS"):
        kept.pop(name, None)
    return {
        **kept,
        "HF_HOME": str(fake_hub.HOME),
        "HF_HUB_OFFLINE": "1",
        "TIKTOKEN_ENCODINGS_BASE": str(fake_hub.ENCODINGS),
        "PYTHONPATH": str(_PLUGIN),
        "MMROLLOUTS_OUTCOMES": str(place / "outcomes.json"),
        "MMROLLOUTS_CHOSEN": str(place / "chosen.json"),
        "MMROLLOUTS_STOCK_RENDERERS": str(fetch("renderers-0.1.12") / "renderers"),
        "TOKENIZERS_PARALLELISM": "false",
    }
