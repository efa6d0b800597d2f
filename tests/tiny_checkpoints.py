"""Tiny checkpoints for tests of loading, written by the official libraries where they can."""

import json
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from graft_jax.config import ModelConfig
from graft_jax.io import weights
from graft_jax.models.transformer import TargetParams, abstract_params

# The two models of the shared list of cases: head_dim is not hidden_size / heads in the first.
TINY_Q: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "eos_token_id": [1, 2],
}  # fmt: skip
TINY_L: dict[str, Any] = {
    **{key: value for key, value in TINY_Q.items() if key != "head_dim"},
    "model_type": "llama", "tie_word_embeddings": False, "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64},
}  # fmt: skip
# qwen2 has biases on q, k and v. One small layer: mutations of it load in milliseconds.
SMALL: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
NUM_TOKENS = 300


def random_params(config: ModelConfig, dtype="float32", seed: int = 0) -> TargetParams:
    """Random weights with std 0.2; norms and biases are random too, so that a mixed-up one shows."""
    rng = np.random.RandomState(seed)  # its stream never changes, and stored reference arrays rest on it

    def leaf(path, spec):
        norm = path[-1].name.endswith("norm")
        array = rng.uniform(0.5, 1.5, spec.shape) if norm else rng.normal(0.0, 0.2, spec.shape)
        return jax.device_put(array.astype(np.float32).astype(spec.dtype))

    return jax.tree.map_with_path(leaf, abstract_params(config, dtype))


def named_tensors(config: ModelConfig, params: TargetParams) -> dict[str, np.ndarray]:
    """The tensors as a Hugging Face checkpoint names and lays them out."""
    shapes, tensor = weights.stored(config, params)
    return {name: np.array(tensor(name), order="C") for name in shapes}


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """A Hugging Face folder without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        safetensors.numpy.save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def byte_tokenizer(size: int = NUM_TOKENS) -> tokenizers.Tokenizer:
    """Bytes as tokens, a few merges, then special tokens <|0|>, <|1|> ... up to `size` ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "r"), ("i", "n")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<|im_start|>", "<|im_end|>", *(f"<|{i}|>" for i in range(size))]
    backend.add_special_tokens([AddedToken(name, special=True) for name in names[: size - len(vocabulary)]])
    return backend


def write_tokenizer(folder: Path, size: int = NUM_TOKENS, **settings: Any) -> None:
    byte_tokenizer(size).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"} | settings))


def permute_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama GGUF files keep them: the halves of each head interleaved."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    config: ModelConfig,
    params: TargetParams,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """A GGUF file without a tokenizer, written by the `gguf` package.

    Args:
        kind: of the matrices; vectors stay float32.
        metadata: further keys; None takes a key out.

    Returns:
        The tensors as dequantised, under their Hugging Face names and in their layout.
    """
    arch = config.model_type
    keys: dict[str, Any] = {
        f"{arch}.block_count": config.num_layers, f"{arch}.context_length": config.max_position,
        f"{arch}.embedding_length": config.hidden_size,
            f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim, f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.rope.dimension_count": config.head_dim, f"{arch}.rope.freq_base": config.rope.theta,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }  # fmt: skip
    if config.eos_token_ids:
        keys["tokenizer.ggml.eos_token_id"] = config.eos_token_ids[0]
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (keys | (metadata or {})).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
            }
            add[type(value)](key, value)
    tensors = named_tensors(config, params)
    names = dict(zip((s.path for s in weights.slots(config, "hf")), (s.source for s in weights.slots(config, "hf"))))
    out = {}
    for slot in weights.slots(config, "gguf"):
        array = tensors[names[slot.path]].astype(np.float32)
        stored = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(str(slot.path[-1])[:1], 0)
        turned = arch == "llama" and slot.path[-1] in ("q", "k", "q_bias", "k_bias")
        array = permute_heads(array, heads) if turned else array
        raw = gguf.quants.quantize(array, stored)
        writer.add_tensor(slot.source, raw, raw_dtype=stored)
        array = gguf.quants.dequantize(raw, stored).reshape(array.shape)
        if turned:
            array = array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        out[names[slot.path]] = array
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
