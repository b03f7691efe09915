"""Which tests run in the same process when several share the work."""

from typing import Any

import corpus
from xdist.scheduler import LoadScopeScheduling

#: Their tests share what a fixture of the module made in many seconds.
_WHOLE_MODULES = (
    "tests/rollouts/gateway/test_gateway_command.py",
    "tests/rollouts/test_demo.py",
    "tests/rollouts/test_full_disk.py",
)


class SharedWorkScheduling(LoadScopeScheduling):
    """Tests of one tokenizer of the corpus go to one process, so that the other need not read it too; so do those of a
    module with an expensive fixture. All others go wherever there is room.
    """

    def __init__(self, config: Any, log: Any) -> None:
        super().__init__(config, log)
        templates = {template: corpus.tokenizer_of(template) or template for template in corpus.templates()}
        self._tokenizers = {name: name for name in corpus.tokenizer_names()} | templates

    def _split_scope(self, nodeid: str) -> str:
        module, _, test = nodeid.partition("::")
        if module in _WHOLE_MODULES:
            return module
        parameters = test.partition("[")[2]
        named = [name for name in self._tokenizers if name in parameters] if parameters else []
        return self._tokenizers[max(named, key=len)] if named else nodeid
