"""Opening, loading and saving whole target checkpoints."""

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from graft_jax.config import ModelConfig
from graft_jax.io import gguf, gguf_config, hub, safetensors, torch_bin, weights
from graft_jax.io.tensors import PLAIN_DTYPES, SourceTensor
from graft_jax.models.transformer import TargetParams
from graft_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: everything but the numbers.

    Attributes:
        path: the GGUF file or the folder.
        config: with the stop ids of all files, and `num_tokens` from the tokenizer if there is one.
        pairs: the ledger: each parameter with its tensor.
        tokenizer: None if the checkpoint has none; token ids still work.
    """

    path: Path
    config: ModelConfig
    pairs: list[tuple[weights.Slot, SourceTensor]]
    tokenizer: Tokenizer | None

    def ledger(self) -> list[tuple[str, str, tuple[int, ...], str]]:
        """Rows of (tensor, stored type, stored shape, parameter), for people."""
        return [(tensor.name, tensor.kind, tensor.shape, ".".join(map(str, slot.path))) for slot, tensor in self.pairs]

    def load(self, dtype: Any, sharding: Any = None) -> TargetParams:
        """Reads the numbers. Arguments and errors as `load_target`'s."""
        return weights.load(self.config, self.pairs, check_dtype(dtype), sharding)


def check_dtype(dtype: Any) -> np.dtype:
    """A weight dtype, or a ValueError."""
    try:
        found = np.dtype(jnp.dtype(dtype))
    except TypeError:
        found = None
    if found is None or found.name not in ("float32", "bfloat16"):
        raise ValueError(f"{dtype=} is not supported; use 'float32' or 'bfloat16'")
    return found


def load_target(
    model: str | Path, *, dtype: Any, strict_config: bool = False, sharding: Any = None
) -> tuple[ModelConfig, TargetParams, Tokenizer | None]:
    """Loads a target model.

    Args:
        model: `smollm2-135m`, a .gguf file, a Hugging Face folder or a hub id.
        dtype: of the weights: "float32" or "bfloat16".
        strict_config: unknown configuration keys are an error instead of a warning.
        sharding: where to place the weights: None, one `jax.sharding.Sharding`, or a `TargetParams` of them.

    Returns:
        The configuration, the weights, and the tokenizer (None if the checkpoint has none).

    Raises:
        ValueError: the checkpoint is missing, broken or unsupported; names the file and the key or tensor.
    """
    check_dtype(dtype)
    checkpoint = open_checkpoint(model, strict_config=strict_config)
    return checkpoint.config, checkpoint.load(dtype, sharding), checkpoint.tokenizer


def open_checkpoint(model: str | Path, *, strict_config: bool = False) -> Checkpoint:
    """Reads configuration, tensor list and tokenizer, and matches every tensor with its parameter."""
    path = hub.resolve(model)
    if path.is_dir():
        return _open_folder(path, strict_config)
    if path.suffix != ".gguf":
        raise ValueError(f"model={str(path)!r}: a file must end in .gguf; other models are folders with config.json")
    file = gguf.open_file(path)
    config = gguf_config.read_config(file, strict=strict_config)
    pairs = weights.match(config, file.tensors, "gguf", str(path))
    tokenizer = Tokenizer.from_gguf(file.metadata, str(path))
    return Checkpoint(path, _with_tokens(config, tokenizer, path), pairs, tokenizer)


def _open_folder(folder: Path, strict: bool) -> Checkpoint:
    source = folder / "config.json"
    if not source.is_file():
        inside = ", ".join(sorted(file.name for file in folder.glob("*.gguf")))
        raise ValueError(
            f"{folder}: has no config.json" + (f"; to load {inside}, pass the file itself" if inside else "")
        )
    config = ModelConfig.from_hf(
        safetensors.parse_json(source.read_bytes(), str(source)), strict=strict, where=str(source)
    )
    config = dataclasses.replace(
        config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *_generation_eos(folder))))
    )
    tensors = folder_tensors(folder)
    config, used = weights.settle_head(config, tensors)
    pairs = weights.match(config, tensors, "hf", str(folder), frozenset(used))
    tokenizer = Tokenizer.from_folder(folder)
    return Checkpoint(folder, _with_tokens(config, tokenizer, folder), pairs, tokenizer)


def folder_tensors(folder: Path, dtypes: Mapping[str, np.dtype] = PLAIN_DTYPES) -> dict[str, SourceTensor]:
    """The tensors of a Hugging Face folder, whichever way it keeps them."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return dict(safetensors.open_file(single, dtypes))
    if index.is_file():
        return dict(safetensors.open_folder(folder, index, dtypes))
    single, index = folder / "pytorch_model.bin", folder / "pytorch_model.bin.index.json"
    if single.is_file():
        return torch_bin.open_files([single], dtypes)
    if index.is_file():
        return torch_bin.open_files([folder / file for file in safetensors.shards(folder, index)], dtypes)
    raise ValueError(
        f"{folder}: has no weights; looked for model.safetensors, model.safetensors.index.json, "
        "pytorch_model.bin and pytorch_model.bin.index.json"
    )


def _generation_eos(folder: Path) -> tuple[int, ...]:
    """Stop ids in generation_config.json, which chat models often keep only there."""
    source = folder / "generation_config.json"
    if not source.is_file():
        return ()
    eos = safetensors.parse_json(source.read_bytes(), str(source)).get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"{source}: eos_token_id={eos!r} must be a whole number or a list of them")
    return tuple(ids)


def _with_tokens(config: ModelConfig, tokenizer: Tokenizer | None, path: Path) -> ModelConfig:
    """Ids that no token has are padding rows of the embedding, never to be emitted."""
    if tokenizer is None:
        return config
    if tokenizer.num_tokens > config.vocab_size:
        warnings.warn(
            f"{path}: the tokenizer has ids up to {tokenizer.num_tokens - 1}, but the embedding only "
            f"{config.vocab_size} rows; text that needs the others cannot be used",
            stacklevel=2,
        )
    return dataclasses.replace(config, num_tokens=min(tokenizer.num_tokens, config.vocab_size))


def save_hf(
    folder: str | Path,
    config: ModelConfig,
    params: TargetParams,
    tokenizer: Tokenizer | None = None,
    *,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a Hugging Face folder: config.json, safetensors in the parameters' dtype, the tokenizer.

    A broken run leaves no half-written checkpoint.

    Args:
        folder: must not exist, or be empty.
        shard_bytes: largest size of one file.

    Raises:
        ValueError: the folder is in the way.
    """
    with new_folder(folder) as temporary:
        shapes, tensor = weights.stored(config, params)
        safetensors.write_folder(temporary, shapes, np.dtype(params.dtype), tensor, shard_bytes)
        written = config.to_hf() | {"dtype": np.dtype(params.dtype).name}
        (temporary / "config.json").write_text(json.dumps(written, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save(temporary)


@contextlib.contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder that takes the name `folder` when all went well, and vanishes otherwise.

    Raises:
        ValueError: the folder is in the way.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder={str(folder)!r} exists already and is not an empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
