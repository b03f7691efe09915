"""A pytest plugin that gives this project's `renderers` the private names that helpers of foreign tests import.

renderers 0.1.12's tests look up configurations and models with them; without, whole files would not be collected.
"""

import ast
import os
from pathlib import Path

from renderers import base, configs

if not hasattr(configs, "_config_class_for"):
    configs._config_class_for = configs.config_class
    (_source,) = Path(os.environ["MMROLLOUTS_STOCK_RENDERERS"]).glob("base.py")
    for _node in ast.parse(_source.read_text(encoding="utf-8")).body:
        if isinstance(_node, ast.AnnAssign) and getattr(_node.target, "id", "") == "MULTIMODAL_MODELS":
            base.MULTIMODAL_MODELS = ast.literal_eval(_node.value)
