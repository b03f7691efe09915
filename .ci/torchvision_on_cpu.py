"""Let a torchvision built for CUDA be imported beside a torch built for CPU.

PyPI has torchvision for Linux in one build only; beside torch +cpu its compiled operators cannot load, and importing it
then fails where it declares shapes for two of them (nms, qnms). Those two declarations are made conditional; the
transforms, which are all that image processors use, need no compiled operator. Does nothing where torchvision works.
"""

import importlib.util
import pathlib

spec = importlib.util.find_spec("torchvision")
assert spec is not None
assert spec.origin is not None
path = pathlib.Path(spec.origin).parent / "_meta_registrations.py"
source = path.read_text()
for operator in ("nms", "qnms"):
    plain = f'@torch.library.register_fake("torchvision::{operator}")\n'
    guarded = f"@(lambda f: f) if not torchvision.extension._has_ops() else {plain[1:]}"
    if guarded not in source:
        assert plain in source, operator
        source = source.replace(plain, guarded)
path.unlink()  # uv links the file to its cache, where it stays as it was
path.write_text(source)
