"""Models are loaded and saved without the progress bars of transformers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
from transformers.utils import logging

# The setting belongs to the process. Two threads that both restored it could leave it off.
_SETTING: Final = threading.Lock()


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Turn the progress bars of transformers off while the block runs, and restore the setting of the program after it.

        with without_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(directory)

    One block runs at a time; blocks of other threads wait.
    """
    with _SETTING:
        if not logging.is_progress_bar_enabled():
            yield
            return
        hub_is_quiet = are_progress_bars_disabled()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.enable_progress_bar()
            if hub_is_quiet:
                disable_progress_bars()
