"""The limits that docs/security.md states are those of the code."""

import inspect
import re
from dataclasses import fields

import pytest
from test_docs_pages import DOCS

from renderers import MediaPolicy, MediaStore
from rollouts.engines.protocol import EngineLimits
from rollouts.engines.vllm import HttpLimits
from rollouts.environments import ToolEnvironment
from rollouts.serve.gateway.chat_request import GatewayLimits
from transport import DecodeLimits
from transport.link import LinkLimits

CLASSES = (MediaPolicy, DecodeLimits, LinkLimits, HttpLimits, EngineLimits, GatewayLimits, MediaStore, ToolEnvironment)
#: Classes all of whose numbers are limits.
COMPLETE = (MediaPolicy, DecodeLimits, LinkLimits, EngineLimits, GatewayLimits)
ROW = re.compile(r"^\| `(\w+)\.(\w+)` \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def stated_limits(text):
    return {(owner, name): default for owner, name, default in ROW.findall(text)}


def as_stated(name, value):
    """A default as the page writes it."""
    if "bytes" in name:
        size, unit = (value >> 30, "GiB") if value >= 1 << 30 else (value >> 20, "MiB")
        return f"{size} {unit}"
    return f"{value:,.0f} s" if name == "timeout" or name.endswith("seconds") else f"{value:,}"


def differences(text):
    defaults = {
        (owner.__name__, parameter.name): parameter.default
        for owner in CLASSES
        for parameter in inspect.signature(owner).parameters.values()
    }
    return [
        f"{owner}.{name}: {stated}"
        for (owner, name), stated in stated_limits(text).items()
        if stated != as_stated(name, defaults[owner, name])
    ]


@pytest.fixture(scope="module")
def page():
    return (DOCS / "security.md").read_text("utf-8")


def test_the_page_states_the_default_of_each_limit(page):
    assert stated_limits(page)
    assert differences(page) == []


def test_another_default_on_the_page_is_found(page):
    assert differences(page.replace("| 32 MiB |", "| 33 MiB |")) == ["MediaPolicy.max_bytes: 33 MiB"]
    assert differences(page.replace("| 3,600 s | a call", "| 60 s | a call")) == ["HttpLimits.total_seconds: 60 s"]


def test_the_page_leaves_no_limit_out(page):
    numbers = {
        (owner.__name__, field.name)
        for owner in COMPLETE
        for field in fields(owner)
        if isinstance(field.default, int | float)
    }
    assert numbers - stated_limits(page).keys() == set()
