"""New weights for vLLM servers from the tensors of a trainer, by vLLM's weight transfer."""

from rollouts.engines.vllm.transfer.buckets import TensorInfo
from rollouts.engines.vllm.transfer.engine import TransferEngine
from rollouts.engines.vllm.transfer.senders import FileSender, IPCSender, NCCLSender, WeightSender

__all__ = ["FileSender", "IPCSender", "NCCLSender", "TensorInfo", "TransferEngine", "WeightSender"]
