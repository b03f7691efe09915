"""Tiny mixtures of experts, and samples of them whose sampler took other experts than the model takes."""

import numpy as np
import torch
import transformers
from model_families import TEXT, text_config, with_seed
from transformers import AutoModelForCausalLM

from rollouts.training import TrainingSample

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 16}
MODELS = {
    "gpt_oss": lambda: text_config("gpt_oss"),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**TEXT, **EXPERTS, vocab_size=300),
    # The first layer has no experts; later ones choose groups of experts first.
    "deepseek_v3": lambda: deepseek(transformers.DeepseekV3Config),
    "one group of experts": lambda: deepseek(transformers.DeepseekV3Config, n_group=1, topk_group=1),
    # Its scores outside of the groups that it chose are 0.
    "deepseek_v2": lambda: deepseek(transformers.DeepseekV2Config, topk_method="group_limited_greedy"),
    "mixtral": lambda: transformers.MixtralConfig(**TEXT, num_local_experts=4, vocab_size=300),
    "olmoe": lambda: transformers.OlmoeConfig(**TEXT, **EXPERTS, norm_topk_prob=False, vocab_size=300),
}


def deepseek(config_class, **groups):
    layers = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8}
    options = {**TEXT, **layers, **LATENT, **GROUPS, **groups}
    return config_class(**options, first_k_dense_replace=1, vocab_size=300)


def tiny(name):
    return with_seed(lambda: AutoModelForCausalLM.from_config(MODELS[name]()))


def routers_of(model):
    return [module for _, module in model.named_modules() if type(module).__name__.lower().endswith("topkrouter")]


class Sampler:
    """A model some of whose routers' choices differ, as numerical noise does it near a tie; it reports its choices."""

    def __init__(self, model, share):
        self.model, self.share = model, share

    def sample(self, name, ids, trained):
        """A sample whose log-probabilities are computed here by transformers alone."""
        chosen = []
        hooks = [each.register_forward_hook(self._other_experts(chosen)) for each in routers_of(self.model)]
        with torch.no_grad():
            logits = self.model(torch.from_numpy(ids)[None].long()).logits[0]
        for hook in hooks:
            hook.remove()
        logprobs = torch.log_softmax(logits[:-1].float(), -1).gather(-1, torch.from_numpy(ids[1:, None]).long())
        experts = np.stack(chosen, axis=1)
        mask = np.arange(len(ids)) >= len(ids) - trained
        columns = [np.where(mask, np.append(0, logprobs[:, 0].numpy()), 0), mask]
        predicting = np.concatenate([np.zeros_like(experts[:1]), experts[:-1]])
        return TrainingSample(
            ids, mask, *(each.astype(np.float32) for each in columns), name=name, routed_experts=predicting
        )

    def _other_experts(self, chosen):
        rng = np.random.default_rng(len(chosen))

        def hook(module, args, output):
            logits, _, experts = output
            other = (experts[:, -1] + 1) % logits.shape[-1]
            while bool((taken := (other[:, None] == experts).any(-1)).any()):
                other = torch.where(taken, (other + 1) % logits.shape[-1], other)
            changed = torch.from_numpy(rng.random(len(experts)) < self.share)
            experts = torch.cat([experts[:, :-1], torch.where(changed, other, experts[:, -1])[:, None]], dim=1)
            chosen.append(experts.numpy().astype(np.uint8))
            return logits, weights_of(module, logits, experts), experts

        return hook


def weights_of(router, logits, experts):
    """The weights of chosen experts by the formula of each architecture."""
    if type(router).__name__ == "GptOssTopKRouter":
        return torch.softmax(logits.gather(1, experts), -1)
    if type(router).__name__ == "DeepseekV2TopkRouter":
        return torch.softmax(logits, -1).gather(1, experts) * router.routed_scaling_factor
    if type(router).__name__ in ("Qwen3MoeTopKRouter", "MixtralTopKRouter", "OlmoeTopKRouter"):
        weights = torch.softmax(logits.float(), -1).gather(1, experts)
        return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights
    weights = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


def sampled(model, share, count=3, length=40, *, shared=0):
    """Samples of `length` tokens, all but 16 trained, which begin with `shared` equal tokens and experts."""
    rng = np.random.default_rng(0)
    sampler = Sampler(model, share)
    ids = rng.integers(3, 300, (count, length)).astype(np.int32)
    ids[:, :shared] = ids[0, :shared]
    return [sampler.sample(f"s{index}", each, length - 16) for index, each in enumerate(ids)]
