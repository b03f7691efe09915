"""Runs `examples/tinker_recipe.py`, and keeps what the recipe trains on.

    python tests/dropin/tinker_recorded_recipe.py FILE RECIPE [OPTION=VALUE ...]

FILE gets a pickled pair for each step: the datums, and the numbers of AdamW, as the recipe hands them to the client.
The adapter begins from seed 0, which the recipe leaves open. Nothing else of the recipe or of the client is replaced.
"""

import pickle
import runpy
import sys
from functools import partialmethod
from pathlib import Path

import tinker

compute, step = tinker.TrainingClient.forward_backward, tinker.TrainingClient.optim_step
sent = []


def forward_backward(self, data, loss_fn, **options):
    sent.append(data)
    return compute(self, data, loss_fn, **options)


def optim_step(self, params):
    with path.open("ab") as file:
        pickle.dump((sent.pop(), params.model_dump()), file)
    return step(self, params)


if __name__ == "__main__":
    path = Path(sys.argv.pop(1))
    tinker.TrainingClient.forward_backward, tinker.TrainingClient.optim_step = forward_backward, optim_step
    create = tinker.ServiceClient.create_lora_training_client
    tinker.ServiceClient.create_lora_training_client = partialmethod(create, seed=0)
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "tinker_recipe.py"), run_name="__main__")
