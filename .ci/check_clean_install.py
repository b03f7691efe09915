"""Run in an environment that holds the wheel and its core dependencies: what is there, and what is not loaded."""

import importlib.util
import sys
from importlib.metadata import distribution
from pathlib import Path

import renderers
import rollouts
import transport

for package in (renderers, transport, rollouts):
    place = Path(package.__file__).parent
    assert "site-packages" in place.parts, f"{package.__name__} comes from {place}, not from the wheel"
    assert (place / "py.typed").is_file(), f"{package.__name__} has no py.typed"
assert (Path(rollouts.__file__).parent / "view" / "static" / "viewer.js").is_file(), "the wheel has no built viewer"
for heavy in ("torch", "transformers", "sklearn", "matplotlib"):
    assert heavy not in sys.modules, f"importing the packages loaded {heavy}"
    assert importlib.util.find_spec(heavy) is None, f"the core dependencies brought {heavy}"
metadata = distribution("mmrollouts").metadata
assert metadata["License-Expression"] == "Apache-2.0", metadata["License-Expression"]
assert transport.decode(transport.encode({"a": [1, 2.5, None]})) == {"a": [1, 2.5, None]}
print(f"mmrollouts {metadata['Version']} from a wheel: light and complete")
