"""An adapter turns training samples into the type of another trainer; rows of `datasets` become samples again.

Each module is for one trainer and imports its package only when called. What a type cannot hold is an
`AdapterError` that names the sample and the part.
"""

from rollouts.training.adapters.checks import AdapterError
from rollouts.training.adapters.datasets import dataset_row, row_features, sample_from_row
from rollouts.training.adapters.prime_rl import prime_rl_micro_batch, prime_rl_sample
from rollouts.training.adapters.record_dataset import record_dataset
from rollouts.training.adapters.skyrl import skyrl_training_batch
from rollouts.training.adapters.tinker import tinker_datum, tinker_model_input
from rollouts.training.adapters.trl import trl_grpo_inputs, trl_sft_batch, trl_sft_row
from rollouts.training.adapters.verl import verl_data_proto

__all__ = [
    "AdapterError",
    "dataset_row",
    "prime_rl_micro_batch",
    "prime_rl_sample",
    "record_dataset",
    "row_features",
    "sample_from_row",
    "skyrl_training_batch",
    "tinker_datum",
    "tinker_model_input",
    "trl_grpo_inputs",
    "trl_sft_batch",
    "trl_sft_row",
    "verl_data_proto",
]
