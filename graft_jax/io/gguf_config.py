"""The model configuration in GGUF metadata, read by way of the Hugging Face keys."""

from typing import Any

import numpy as np

from graft_jax.config import FAMILIES, ModelConfig, Reader
from graft_jax.io.gguf import GGUFFile
from graft_jax.io.tensors import to_float32

# Keys under the architecture's prefix that do not change a forward pass.
_INERT = frozenset(("rope.scaling.finetuned", "vocab_size"))


def read_config(file: GGUFFile, *, strict: bool = False) -> ModelConfig:
    """The configuration of a llama, qwen2 or qwen3 GGUF file.

    Raises:
        ValueError: a key is missing or wrong, or asks for something unsupported.
    """
    reader = Reader(file.metadata, str(file.path))
    family = reader.take("general.architecture", str)
    if family not in FAMILIES:
        raise ValueError(f"{file.path}: general.architecture {family!r} is not supported; use one of {FAMILIES}")
    prefix = family + "."
    inner = Reader(
        {key[len(prefix) :]: value for key, value in file.metadata.items() if key.startswith(prefix)},
        f"{file.path}: metadata {prefix}*",
    )
    inner.taken |= _INERT
    hidden, heads = inner.take("embedding_length", int), inner.take("attention.head_count", int)
    head_dim = inner.take("attention.key_length", int, None) or hidden // max(heads, 1)
    values = inner.take("attention.value_length", int, head_dim)
    turned = inner.take("rope.dimension_count", int, head_dim)
    if values != head_dim or turned != head_dim:
        raise ValueError(
            f"{file.path}: heads of {head_dim} with values of {values} and {turned} rotary dimensions are "
            "not supported; all three must be equal"
        )
    for key in ("expert_count", "attention.sliding_window"):
        if inner.take(key, int, 0):
            raise ValueError(f"{file.path}: {prefix}{key}={inner.config[key]!r} is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{file.path}: tensor token_embd.weight is missing")
    max_position = inner.take("context_length", int)
    biased = "blk.0.attn_q.bias" in file.tensors
    eos = [reader.take(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("eos", "eot", "eom")]
    config = {
        "model_type": family,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": inner.take("feed_forward_length", int),
        "num_hidden_layers": inner.take("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": inner.take("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": inner.take("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": max_position,
        "rope_theta": inner.take("rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(file, inner, max_position, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": biased,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "eos_token_id": [token for token in eos if token is not None],
    }
    inner.finish(strict)
    return ModelConfig.from_hf(config, strict=strict, where=str(file.path))


def _rope_scaling(file: GGUFFile, inner: Reader, max_position: int, head_dim: int) -> dict[str, Any] | None:
    kind = inner.take("rope.scaling.type", str, "none")
    factor = inner.take("rope.scaling.factor", float, None)
    original = inner.take("rope.scaling.original_context_length", int, None)
    attention = inner.take("rope.scaling.attn_factor", float, None)
    legacy = inner.take("rope.scale_linear", float, None)  # written before rope.scaling.* existed
    divisors = file.tensors.get("rope_freqs.weight")
    if divisors is not None:
        if kind != "none":
            raise ValueError(f"{file.path}: rope_freqs.weight beside rope.scaling.type {kind!r} is not supported")
        theta = inner.take("rope.freq_base", float, 10000.0)
        numbers = to_float32(divisors.rows(0, divisors.shape[0]))
        return fit_llama3(numbers, theta, head_dim, str(file.path))
    if kind == "none":
        return {"rope_type": "linear", "factor": legacy} if legacy not in (None, 1.0) else None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{file.path}: rope.scaling.type {kind!r} is not supported; 'linear' and 'yarn' are")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original or max_position
        if attention not in (None, 1.0):
            raise ValueError(f"{file.path}: rope.scaling.attn_factor={attention} is not supported")
    return scaling


def fit_llama3(divisors: np.ndarray, theta: float, head_dim: int, where: str) -> dict[str, Any]:
    """The llama3 rope settings whose frequencies are the default ones over `divisors`.

    GGUF stores llama3 scaling as one divisor a frequency. Between the two bounds, 1/divisor is linear in
    the inverse wavelength, and only the ratios of low bound, high bound and original length matter.

    Args:
        divisors: float32 [E/2].

    Raises:
        ValueError: the divisors follow no llama3 rule.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    numbers = divisors.astype(np.float64)
    if numbers.shape != frequencies.shape or not (np.isfinite(numbers) & (numbers > 0)).all():
        raise ValueError(f"{where}: rope_freqs.weight must be {len(frequencies)} numbers above 0")
    factor = float(numbers.max())
    mixed = (numbers > 1.0001) & (numbers < factor * 0.9999)
    if mixed.sum() >= 2:
        smooth = (1 / numbers[mixed] - 1 / factor) / (1 - 1 / factor)
        slope, shift = np.polyfit(frequencies[mixed] / (2 * np.pi), smooth, 1)
        # smooth = (original / wavelength - low) / (high - low); with low = 1 the rest follows
        span = -1 / shift
        original = round(slope * span)
        scaling = {
            "rope_type": "llama3",
            "factor": round(factor, 4),
            "low_freq_factor": 1.0,
            "high_freq_factor": round(1 + span, 4),
            "original_max_position_embeddings": original,
        }
        expected = (frequencies / (2 * np.pi) * original - 1) / (scaling["high_freq_factor"] - 1)
        expected = np.clip(expected, 0, 1)
        expected = 1 / (expected + (1 - expected) / scaling["factor"])
        if np.allclose(expected, numbers, rtol=1e-3):
            return scaling
    raise ValueError(f"{where}: rope_freqs.weight follows no rule that is supported (llama3 is)")
