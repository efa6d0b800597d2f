"""Rotary position embeddings: default, linear, llama3 and yarn frequencies."""

import math

import jax.numpy as jnp
import numpy as np

from graft_jax.config import RopeConfig
from graft_jax.types import Array, Float, Int


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular frequencies of the E/2 pairs and the factor on cos and sin.

    The formulas are those of transformers' `modeling_rope_utils` (YaRN: arXiv 2309.00071, section 3).

    Args:
        rope: the kind and its numbers.
        head_dim: E.

    Returns:
        float32 [E/2] radians a token, and the multiplier of cos and sin.
    """
    pairs = np.arange(0, head_dim, 2, dtype=np.float32)
    base = (1.0 / (np.float32(rope.theta) ** (pairs / np.float32(head_dim)))).astype(np.float32)
    if rope.kind == "linear":
        return base / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim), _yarn_attention_factor(rope)
    return base, 1.0


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    wavelength = 2 * np.pi / base
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    # Short waves (smooth >= 1) stay, long waves (smooth <= 0) are divided, the rest is mixed.
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1 - smooth) * base / rope.factor + smooth * base).astype(np.float32)


def _yarn(rope: RopeConfig, base: np.ndarray, head_dim: int) -> np.ndarray:
    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    return (base / rope.factor * ramp + base * (1 - ramp)).astype(np.float32)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def rotation(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T E2"], Float[Array, "B T E2"]]:
    """cos and sin of every position, float32, computed once for all layers."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies)[None, None, :]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "B T H E"], cos: Float[Array, "B T E2"], sin: Float[Array, "B T E2"]
) -> Float[Array, "B T H E"]:
    """Turns the pairs (i, i + E/2) of each head, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
