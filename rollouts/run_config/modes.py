"""The mode of a run: how old tokens may be where another process changes the weights of the server."""

from __future__ import annotations

import sys

from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.sections import AsynchronousSection, SynchronousSection
from rollouts.runner.modes import Asynchronous, Mode, OneStepOffPolicy, Synchronous


def make_mode(file: ConfigFile) -> Mode:
    """The mode of a configuration; one without a limit if it names none."""
    section = file.config.mode
    if section is None:
        return Asynchronous(sys.maxsize)
    if isinstance(section, AsynchronousSection):
        return Asynchronous(section.max_staleness, section.on_stale)
    return Synchronous() if isinstance(section, SynchronousSection) else OneStepOffPolicy()
