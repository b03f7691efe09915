"""The experts that a server on a CPU chooses: vLLM itself returns them from GPUs alone (its model runner V2).

vLLM binds its own hooks to the routers of the model; where they deliver to is here. Requests are sent one by one.
"""

import torch
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

_compute_routing = CPURouter._compute_routing


def _rounded_routing(self, hidden_states, router_logits, *args, **kwargs):
    """Chooses by logits of 3 bits, as noise does it near a tie, and weights by the exact ones."""
    rounded = router_logits.to(torch.float8_e4m3fn).to(router_logits.dtype)
    _, experts = _compute_routing(self, hidden_states, rounded, *args, **kwargs)
    weights = router_logits.softmax(dim=-1).gather(1, experts.long())
    return weights / weights.sum(dim=-1, keepdim=True) if self.renormalize else weights, experts


class Capturer:
    """By layer, the experts (tokens, k) of each pass."""

    def __init__(self):
        self.layers = {}

    def capture(self, layer_id, topk_ids):
        self.layers.setdefault(layer_id, []).append(topk_ids.clone())


class RecordedExperts:
    """Calls of `/collective_rpc`."""

    def record_experts(self, rounded):
        """Record the experts from here on; `rounded`: those of `_rounded_routing`."""
        CPURouter._compute_routing = _rounded_routing if rounded else _compute_routing
        self.capturer = Capturer()
        bind_routed_experts_capturer(self.model_runner.model, self.capturer)

    def recorded_experts(self):
        """Lists (tokens, layers, k) since the last call, of all tokens that passed the model."""
        layers = [torch.cat(passes) for _, passes in sorted(self.capturer.layers.items())]
        self.capturer.layers.clear()
        return torch.stack(layers, dim=1).tolist()
