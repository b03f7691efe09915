"""Wire types that the receiver did not import: ours are found by name, those of others are named with their module."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from handmade import message

import transport
from renderers.installation import install_command
from rollouts.wire_types import DECLARED_IN as OF_ROLLOUTS
from transport import DecodeError, decode, decode_frames
from transport.wire import registry
from transport.wire.registry import DECLARED_IN as OF_RENDERERS

TREE = Path(transport.__file__).parents[1]
DECLARED_IN = {**OF_RENDERERS, **OF_ROLLOUTS}


def run(code: str, *arguments: object) -> str:
    """What a fresh process prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, cwd=TREE).stdout


def declarations() -> dict[str, str]:
    """Every wire name that a module of the three packages registers, and that module; read, not imported.

    The classes of `renderers` are registered from the table, so they are looked for by the name of the class.
    """
    found = dict(OF_RENDERERS)
    for name, home in found.items():
        cls = getattr(importlib.import_module(home), name.removeprefix("renderers."))
        assert (cls.__module__, cls.__name__) == (home, name.removeprefix("renderers."))
    for package in ("renderers", "transport", "rollouts"):
        for path in (TREE / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                call = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "wire_type"
                if call and isinstance(node.args[0], ast.Constant):
                    module = ".".join(path.relative_to(TREE).with_suffix("").parts)
                    found[ast.literal_eval(node.args[0])] = module
    return found


@pytest.mark.slow
def test_the_tables_have_every_type_of_this_distribution_and_no_other() -> None:
    assert declarations() == DECLARED_IN
    assert dict(registry._declaring_modules()) == dict(OF_ROLLOUTS)


def test_a_type_of_ours_that_needs_what_is_not_installed_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_by_name", {})
    for name in [name for name in sys.modules if name.startswith("rollouts.training")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DecodeError, match=re.escape(install_command("torch"))) as caught:
        decode_frames(message(None, types=[["rollouts.MismatchReport", 1, ["a", "b"]]]))
    assert "rollouts.training.mismatch.report declares it" in str(caught.value)


OTHERS = """
import sys
from dataclasses import dataclass
from transport import encode, wire_type

@wire_type("globex.Job")
@dataclass
class Job:
    prompt: str

if __name__ == "__main__":
    sys.stdout.buffer.write(encode(Job("go")))
"""


@pytest.mark.slow
def test_the_type_of_another_distribution_is_named_with_the_module_to_import_and_that_is_not_imported(
    tmp_path: Path,
) -> None:
    (tmp_path / "acme_jobs.py").write_text(OTHERS)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "import acme_jobs; from transport import encode; print(encode(acme_jobs.Job('go')).hex())"
    sent = bytes.fromhex(run(code).strip())
    with pytest.raises(DecodeError, match=r"'globex\.Job'.*`import acme_jobs`"):
        decode(sent)
    receive = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom transport import decode, DecodeError\n"
    receive += f"try: decode(bytes.fromhex({sent.hex()!r}))\nexcept DecodeError: print('acme_jobs' in sys.modules)"
    assert run(receive).strip() == "False"


def test_a_type_of_a_main_script_says_that_it_needs_a_module(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(TREE)!r})\n" + OTHERS)
    sent = subprocess.run([sys.executable, script], check=True, capture_output=True, timeout=120).stdout
    with pytest.raises(DecodeError, match="main script"):
        decode(sent)


def test_whatever_a_peer_calls_its_module_is_shown_and_never_imported() -> None:
    sys.modules.pop("antigravity", None)
    with pytest.raises(DecodeError, match="antigravity"):
        decode_frames(message(None, types=[["acme.Unheard", 1, [], "antigravity"]]))
    assert "antigravity" not in sys.modules
    with pytest.raises(DecodeError) as caught:
        decode_frames(message(None, types=[["n" * 10_000, 1, [], "m" * 10_000]]))
    assert len(str(caught.value)) < 1_000
