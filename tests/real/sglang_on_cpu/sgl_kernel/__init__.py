"""Stands in for SGLang's compiled kernels, which have no build for CPUs on the index.

SGLang imports names of them when it starts; none is called in float32 with torch-native attention on a CPU without AMX.
One that is called says so.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.4.10"

#: Operators whose names the definitions of models read. (For others SGLang asks whether they exist.)
_READ_BY_MODELS = (
    "fused_dual_residual_rmsnorm_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
    "rmsnorm_cpu",
)


def _missing(name: str) -> Callable[..., NoReturn]:
    def missing(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not here")

    return missing


for _name in _READ_BY_MODELS:
    setattr(torch.ops.sgl_kernel, _name, _missing(_name))


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)
