"""Reads and writes the toy targets as Hugging Face folders, apart from the library's own loaders."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
import tokenizers

from graft_jax.config import ModelConfig
from graft_jax.models.layers import is_transposed
from graft_jax.models.transformer import TargetParams, abstract_params
from toy.language import NUM_TOKENS

FOLDER = Path(__file__).parent
NAMES = ("llama", "qwen3")

_LAYER = {
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def _hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The tensor's name in a Hugging Face checkpoint, and whether it is a linear weight (out, in)."""
    if path[0].name == "layers":
        field = path[2].name
        return f"model.layers.{path[1].idx}.{_LAYER[field]}.weight", not field.endswith("norm")
    return f"{_TOP[path[0].name]}.weight", path[0].name == "head"


def load(name: str, dtype=jnp.float32) -> tuple[ModelConfig, TargetParams]:
    """Loads a toy target: "llama" (untied, llama3 rope) or "qwen3" (tied, query and key norms).

    The tokenizer is taken to have 300 ids: `num_tokens` is 300, and rows 300 to 319 of the head are traps
    that win the arg-max often wherever somebody forgets to mask them.
    """
    config = ModelConfig.from_hf(json.loads((FOLDER / name / "config.json").read_text()), strict=True)
    config = dataclasses.replace(config, num_tokens=NUM_TOKENS)
    leaves, tree = jax.tree.flatten_with_path(abstract_params(config, dtype))
    out = []
    with safetensors.safe_open(FOLDER / name / "model.safetensors", framework="numpy") as file:
        for path, shape in leaves:
            tensor_name, is_linear = _hf_name(path)
            tensor = file.get_tensor(tensor_name).astype(shape.dtype)
            out.append(jnp.asarray(tensor.T if is_linear and is_transposed(dtype) else tensor))
    return config, jax.tree.unflatten(tree, out)


def save(name: str, config: ModelConfig, params: TargetParams) -> None:
    """Writes float32 parameters as a folder with bfloat16 weights."""
    tensors = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        tensor_name, is_linear = _hf_name(path)
        tensor = np.asarray(leaf, np.float32)
        tensor = (tensor.T if is_linear else tensor).astype(ml_dtypes.bfloat16)
        tensors[tensor_name] = np.ascontiguousarray(tensor)
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the writer keeps it to its owner
    text = json.dumps({**config.to_hf(), "bos_token_id": 0, "torch_dtype": "bfloat16"}, indent=2)
    (folder / "config.json").write_text(text + "\n")
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """Writes a tokenizer that calls the ids t0 ... t299, so that loaders know that there are no more."""
    words = {f"t{i}": i for i in range(NUM_TOKENS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"), pretty=False)


def facts(name: str) -> dict[str, Any]:
    """What the training script measured: loss, entropy, share of distinct 4-grams, seeds of safe prompts."""
    return json.loads((FOLDER / "facts.json").read_text())[name]
