"""A backend of vLLM's weight transfer that runs without a GPU: the trainer writes a file for each bucket of tensors.

vLLM's own backends move tensors with NCCL and CUDA IPC. Everything else of a transfer is the same: the calls and their
order, what is said about the tensors, the reload of the model layer by layer.
"""

from dataclasses import dataclass

from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class FilesInitInfo(WeightTransferInitInfo):
    rank_offset: int
    world_size: int


@dataclass
class FilesUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    path: str


class FilesEngine(WeightTransferEngine):
    init_info_cls = FilesInitInfo
    update_info_cls = FilesUpdateInfo

    def init_transfer_engine(self, init_info):
        assert 1 <= init_info.rank_offset < init_info.world_size

    def start_weight_update(self):
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))  # without synchronising a GPU

    def receive_weights(self, update_info):
        tensors = load_file(update_info.path)
        found = [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in update_info.names]
        dtypes = [f"torch.{name}" for name in update_info.dtype_names]
        assert found == list(zip(update_info.names, dtypes, update_info.shapes, strict=True))
        self.model.load_weights([(name, tensors[name]) for name in update_info.names])

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self):
        pass


class RegisteredBackend:
    """What vLLM imports, and with it this module, before it makes the engine."""


WeightTransferEngineFactory.register_engine("files", FilesEngine)
