"""Runs tests that others wrote against the Tinker API with `rollouts tinker` in the place of their server.

    python tests/dropin/tinker_suites.py [--suite tinker-cookbook] [--suite skyrl]

`tinker-cookbook`: `tests/recipes` of its source distribution. Each starts a recipe, which trains a tiny model on the
data sets of `tinker_offline_recipe.py`. `skyrl`: `tests/tinker/test_api.py` of SkyRL, which starts a server for each
test, at port 8000. That file is in no distribution: it is read from the checkout of SkyRL that the variable
MMROLLOUTS_SKYRL names, and without one these tests are not run, which is printed.

`tinker_suites.toml` lists which tests are left out and why, and what is added to the options of recipes. Returns 1 if
another test does not pass, or if a row of that list matches no test. Needs the project's `dev` extra; what the runs
printed is kept in `runs/` of the cache of `sources.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import tinker_environment
from safetensors.numpy import load_file, save_file
from sources import CACHE, SourceError, fetch
from tinker_recipes import MissedError, serving

from rollouts.testing import tiny_qwen3_vl

_HERE = Path(__file__).resolve().parent
_PROJECT = _HERE.parents[1]
_LISTS: dict[str, Any] = tomllib.loads((_HERE / "tinker_suites.toml").read_text(encoding="utf-8"))
_LIMIT_S = 4 * 3600.0


def _cookbook(place: Path) -> dict[str, str]:
    shutil.copytree(fetch("tinker-cookbook-0.6.1") / "tests", place / "tests")
    names = _LISTS["models"]["tinker-cookbook"]
    _models(place, names)
    options = ["--model", "model", *(word for name in names for word in ("--name", name))]
    with serving(place, options, _variables(place)) as server:
        return _outcomes("tinker-cookbook", place, ["tests/recipes"], {"TINKER_BASE_URL": server.url})


def _skyrl(place: Path) -> dict[str, str]:
    checkout = Path(os.environ["MMROLLOUTS_SKYRL"])
    for name, digest in _LISTS["skyrl"].items():
        data = (checkout / name).read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise SourceError(f"{checkout / name} is of another commit than tinker_suites.toml names")
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data.replace(b"http://0.0.0.0:", b"http://127.0.0.1:"))
        (place / name).with_name("__init__.py").touch()
    (place / "tests" / "__init__.py").touch()
    package = place / "skyrl" / "tinker"  # the file imports two names of their server for tests that are left out
    package.mkdir(parents=True)
    (package / "api.py").write_text("_build_uv_run_cmd_engine = None\n", encoding="utf-8")
    (package / "config.py").write_text("EngineConfig = dict\n", encoding="utf-8")
    _models(place, _LISTS["models"]["skyrl"])
    _varied(place / "model")
    return _outcomes("skyrl", place, ["tests/tinker/test_api.py"], {})


_SUITES = {"tinker-cookbook": _cookbook, "skyrl": _skyrl}


def _models(place: Path, names: list[str]) -> None:
    """A tiny model in the directory of each name, where tokenizers are looked up too."""
    tiny_qwen3_vl(place / "model")
    for name in names:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).symlink_to(place / "model")


def _varied(model: Path) -> None:
    """Give it an output layer of its own: a random model without one says a token again and again, and a test stops at
    its fifth token, which must be new."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = load_file(model / "model.safetensors")
    shape = weights["model.language_model.embed_tokens.weight"].shape
    weights["lm_head.weight"] = np.random.default_rng(1).normal(scale=0.1, size=shape).astype(np.float32)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def _outcomes(suite: str, place: Path, tests: list[str], variables: Mapping[str, str]) -> dict[str, str]:
    """By the id of each test: passed, failed, error, skipped, or left out."""
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "outcomes_plugin", "-q", "--tb=short"]
    environment = {**_variables(place), **variables}
    listed = subprocess.run(
        [*pytest, "--collect-only", *tests], cwd=place, env=environment, check=False, capture_output=True, text=True
    )
    found = [line for line in listed.stdout.splitlines() if line.startswith(tests[0]) and "::" in line]
    rows = [row for row in _LISTS["left_out"] if row["suite"] == suite]
    for pattern in (pattern for row in rows for pattern in row["tests"]):
        if not any(fnmatchcase(test, pattern) for test in found):
            raise SourceError(f"tinker_suites.toml: {pattern} is no test of {suite}: {listed.stdout[-500:]}")
    left_out = [test for test in found if any(fnmatchcase(test, each) for row in rows for each in row["tests"])]
    with (place / "output.txt").open("wb") as output:
        subprocess.run(
            [*pytest, *(f"--deselect={test}" for test in left_out), *tests],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_S,
            check=False,
        )
    outcomes: dict[str, str] = json.loads((place / "outcomes.json").read_text(encoding="utf-8"))
    return dict.fromkeys(found, "not run") | dict.fromkeys(left_out, "left out") | outcomes


def _variables(place: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    uv = place / "bin" / "uv"
    if not uv.is_file():
        uv.parent.mkdir()
        uv.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{_HERE / "tinker_uv.py"}" "$@"\n', encoding="utf-8")
        uv.chmod(0o755)
    return {
        **kept,
        "PATH": f"{uv.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (place, _HERE / "plugin", _PROJECT))),
        "MMROLLOUTS_OUTCOMES": str(place / "outcomes.json"),
        "HF_HUB_OFFLINE": "1",
        "TINKER_API_KEY": "tml-local",
        "TINKER_COOKBOOK_RUNS_DIR": str(place / "logs"),
        "OMP_NUM_THREADS": "1",  # threads that wait for each other on busy cores cost more than they save
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", choices=list(_SUITES), action="append")
    chosen = parser.parse_args().suite or list(_SUITES)
    missed = 0
    tinker_environment.prepare()
    for name in chosen:
        if name == "skyrl" and "MMROLLOUTS_SKYRL" not in os.environ:
            print("skyrl: not run; MMROLLOUTS_SKYRL names no checkout of it")
            continue
        place = CACHE / "runs" / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        outcomes = _SUITES[name](place)
        for test, outcome in outcomes.items():
            print(f"{name}: {outcome:8} {test}")
        missed += sum(outcome not in ("passed", "left out") for outcome in outcomes.values())
    print(f"{missed} missed")
    return min(missed, 1)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (MissedError, SourceError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
