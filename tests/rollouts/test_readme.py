"""README: its code runs, and the commands, extras and files that it and the documentation name exist."""

import ast
import builtins
import re
import symtable
import textwrap
import tomllib
from pathlib import Path

import pytest
from test_docs_pages import DOCS, run_page
from typer.main import get_command

from rollouts.cli.main import app

ROOT = DOCS.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
INSTALL = re.compile(r"""pip install (?:-e )?["']?(?:\.|mmrollouts)\[([\w,]+)\]""")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PROGRAM = re.compile(r"\b((?:benchmarks|examples|tests)/[\w/.-]+\.(?:py|sh))\b")


def unknown_extras(text):
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    return {extra for names in INSTALL.findall(text) for extra in names.split(",")} - known.keys()


def broken_links(page, text):
    """Links to files that do not exist. The build of the site makes the pages of the reference, and checks them."""
    targets = [target for target in LINK.findall(text) if not target.startswith(("http://", "https://"))]
    return [
        target
        for target in targets
        if not (path := page.parent / target).exists() and not path.resolve().is_relative_to(DOCS / "reference")
    ]


def unknown_commands(text):
    """Names behind `rollouts` in lines of a console that are no commands."""
    used = re.findall(r"^ {4}(?:[A-Z_]+=\S+ )*rollouts ([a-z][\w-]*)", text, re.MULTILINE)
    return set(used) - get_command(app).commands.keys()


def installs_from_an_index(text):
    """Commands that look for mmrollouts on an index, which has none; wheels that were built are found in a folder."""
    lines = re.findall(r"pip install [^\n`]*\bmmrollouts\b[^\n`]*", text)
    return [line for line in lines if "--find-links" not in line]


def missing_programs(text):
    return [name for name in PROGRAM.findall(text) if not (ROOT / name).is_file()]


def undefined_names(text):
    """Names that the Python of a page uses and does not define before, in functions: nowhere."""
    code = re.findall(r"^ *```(?:python|py)\b.*\n((?:.*\n)*?) *```$", text, re.MULTILINE)
    known, later, missing = {*dir(builtins), "__name__"}, set(), set()
    for statement in ast.parse("\n".join(map(textwrap.dedent, code))).body:
        top = symtable.symtable(ast.unparse(statement), "", "exec")
        scopes = [top]
        for scope in scopes:
            scopes += scope.get_children()
        bound = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
        used = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
        missing |= used - known - (set() if isinstance(statement, ast.Assign) else bound)
        later |= {symbol.get_name() for scope in scopes[1:] for symbol in scope.get_symbols() if symbol.is_global()}
        known |= bound
    return missing | (later - known)


def test_the_code_of_the_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_page("../README.md")
    assert (names["trajectory"].num_turns, names["batch"].input_ids.shape[0]) == (1, 1)
    assert Path("episode.html").read_text("utf-8").startswith("<!doctype html>")
    assert names["report"].max_abs < 1e-5
    assert capsys.readouterr().out == f"reward 0.0, mismatch {names['report'].max_abs:.1e}\n"


def test_the_two_commands_of_the_readme_are_what_the_checks_of_a_change_run():
    commands = re.findall(r"^ {4}(pip install .*?)(?: +#.*)?$", README.read_text("utf-8"), re.MULTILINE)
    assert commands == ['pip install -e ".[demo]" && rollouts demo', 'pip install -e ".[test]" && pytest']
    for stage, command in {"readme-demo": "rollouts demo", "readme-tests": "pytest"}.items():
        assert re.search(rf"^(?:stage|beside) {stage}$", (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE)
        assert f".ci/readme_command {command}\n" in (ROOT / ".ci" / "stages" / stage).read_text("utf-8")


def test_the_page_on_installing_lists_every_extra():
    section = (DOCS / "installing.md").read_text("utf-8").split("\n## ")[1]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(extras)


def test_the_readme_fits_two_screens():
    assert len(README.read_text("utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    text = page.read_text("utf-8")
    assert unknown_extras(text) == set()
    assert installs_from_an_index(text) == []
    assert broken_links(page, text) == []
    assert unknown_commands(text) == set()
    assert missing_programs(text) == []
    assert undefined_names(text) == set()


def test_names_that_do_not_exist_are_found():
    assert unknown_extras('pip install -e ".[demo,magic]"') == {"magic"}
    assert installs_from_an_index("    pip install 'mmrollouts[demo]'\n") == ["pip install 'mmrollouts[demo]'"]
    assert broken_links(README, "[a](docs/absent.md#b) and [c](docs/run.md)") == ["docs/absent.md"]
    assert unknown_commands("    rollouts demo\n    KEY=1 rollouts enchant --now") == {"enchant"}
    assert missing_programs("`python benchmarks/absent.py`, `python benchmarks/fleet.py`") == ["benchmarks/absent.py"]
    program = "```python\nimport a\ndef f(x):\n    return x, a, b, c\nrows = f(rows)\nb = [i for i in rows]\n```\n"
    assert undefined_names(program + "```py\nawait f(d)\n```\n") == {"c", "d", "rows"}


def missing_places(text):
    """Files and folders in the first column of CONTRIBUTING's tables of a package that the package does not have."""
    layout = text[text.index("## Layout") : text.index("## Names")]
    sections = re.split(r"^`(renderers|transport|rollouts)/`:", layout, flags=re.MULTILINE)[1:]
    missing = []
    for package, table in zip(sections[::2], sections[1::2], strict=True):
        for first in re.findall(r"^\| (`[^|]+) \| [^|]+ \|$", table, re.MULTILINE):
            folder = ROOT / package
            for name in re.findall(r"`([^`]+)`", first):
                # `episodes/turns.py`, `context.py`: the second one is in the folder of the first.
                places = [ROOT / package / name, folder / name]
                if not any(place.exists() for place in places):
                    missing.append(f"{package}/{name}")
                if "/" in name:
                    folder = (ROOT / package / name).parent
    return missing


def test_the_layout_of_the_contributing_page_is_that_of_the_packages():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert missing_places(text) == []
    assert missing_places(text.replace("| `wire/` |", "| `wires/` |")) == ["transport/wires/"]
