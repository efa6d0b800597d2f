"""`pytorch_model.bin` files, read by torch where it is installed."""

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graft_jax.io.tensors import BFLOAT16, PLAIN_DTYPES, SourceTensor

_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "bool": "BOOL"}


@dataclasses.dataclass(frozen=True)
class TorchTensor:
    """A tensor that torch has mapped from its file."""

    name: str
    where: str
    kind: str
    shape: tuple[int, ...]
    tensor: Any

    def rows(self, start: int, stop: int) -> np.ndarray:
        block = self.tensor[start:stop].detach().contiguous()
        if self.kind == "BF16":  # numpy knows no bfloat16: hand the bits over
            return block.view(importlib.import_module("torch").int16).numpy().view(BFLOAT16)
        return block.numpy()


def open_files(paths: list[Path], dtypes: Mapping[str, np.dtype] = PLAIN_DTYPES) -> dict[str, SourceTensor]:
    """The tensors of all files, by name.

    Only plain tensors are unpickled (`weights_only`), so a file can run no code.

    Raises:
        ValueError: torch is not installed, a file is broken, or a tensor's dtype is unsupported.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise ValueError(
            f"{paths[0]}: reading a .bin checkpoint needs torch (pip install torch); "
            "or convert it to safetensors where torch is installed"
        ) from None
    tensors: dict[str, SourceTensor] = {}
    for path in paths:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds, also for files cut off
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ValueError(f"{path}: torch cannot read it: {reason}") from None
        if not isinstance(state, dict):
            raise ValueError(f"{path}: must hold a dictionary of tensors, got a {type(state).__name__}")
        for name, tensor in state.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise ValueError(f"{path}: entry {name!r} is a {type(tensor).__name__}, not a tensor")
            kind = _KINDS.get(str(tensor.dtype).removeprefix("torch."), "")
            if kind not in dtypes:
                raise ValueError(f"{path}: tensor {name} has dtype {tensor.dtype}; supported are {', '.join(dtypes)}")
            if name in tensors:
                raise ValueError(f"{path}: tensor {name} stands in another file as well")
            tensors[name] = TorchTensor(name, str(path), kind, tuple(tensor.shape), tensor)
    return tensors
