"""Linear layers, norms and two-part attention.

Weight layout depends on the dtype, because it decides the speed of a matrix product with few rows on a
CPU: float32 weights are stored (in, out), bfloat16 weights (out, in). Products accumulate in float32.
"""

import functools

import jax
import jax.numpy as jnp

from graft_jax.types import Array, Bool, Float, Int


def is_transposed(dtype) -> bool:
    """Whether linear weights of this dtype are stored (in, out) rather than (out, in)."""
    return jnp.dtype(dtype) == jnp.float32


def linear(
    x: Float[Array, "B T I"], weight: Float[Array, "P Q"], bias: Float[Array, "O"] | None = None
) -> Float[Array, "B T O"]:
    """x times weight, as float32. `weight` is (I, O) if float32, else (O, I)."""
    contracting = 0 if is_transposed(weight.dtype) else 1
    y = jax.lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((x.ndim - 1,), (contracting,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y if bias is None else y + bias.astype(jnp.float32)


def rms_norm(x: Float[Array, "*N M"], weight: Float[Array, "M"], eps: float) -> Float[Array, "*N M"]:
    """Root-mean-square norm over the last axis, computed and returned in float32."""
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * weight.astype(jnp.float32)


def attend(
    query: Float[Array, "B T H E"],
    cache_keys: Float[Array, "B K E S"],
    cache_values: Float[Array, "B K S E"],
    cached: Int[Array, "B"],
    keys: Float[Array, "B T K E"],
    values: Float[Array, "B T K E"],
    mask: Bool[Array, "B T T"],
    windows: tuple[int, ...] = (),
) -> Float[Array, "B T H*E"]:
    """Grouped-query attention over the committed cache and the block of new rows.

    Every query row sees the first `cached` cache entries of its batch row, and those rows of its own
    block that `mask` names: ancestors in a tree pass, the causal past in prefill. Both parts share one
    softmax, in float32.

    Args:
        windows: cache lengths to choose from, at run time: only the smallest that holds every row's
            `cached` entries is read. () reads all S. It pays where arithmetic is dear (a CPU).
    """
    S = cache_keys.shape[-1]
    widths = [width for width in sorted(windows) if width < S] + [S]

    def within(width: int):
        return _attend_all(query, cache_keys[..., :width], cache_values[:, :, :width], cached, keys, values, mask)

    if len(widths) == 1:
        return within(S)
    index = jnp.searchsorted(jnp.array(widths), cached.max())
    return jax.lax.switch(index, [lambda width=width: within(width) for width in widths])


def _attend_all(query, cache_keys, cache_values, cached, keys, values, mask):
    B, T, H, E = query.shape
    K, S = keys.shape[2], cache_keys.shape[-1]
    G = H // K
    # [B, K, G*T, E]: one matrix product a key/value head
    q = (query * E**-0.5).reshape(B, T, K, G, E).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, E)
    q = q.astype(keys.dtype)
    product = functools.partial(
        jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    old = product("bkqe,bkes->bkqs", q, cache_keys)
    new = product("bkqe,btke->bkqt", q, keys)
    seen = jnp.where(jnp.arange(S)[None, :] < cached[:, None], 0.0, -jnp.inf)
    old += seen[:, None, None, :]
    new = new.reshape(B, K, G, T, T) + jnp.where(mask, 0.0, -jnp.inf)[:, None, None, :, :]
    new = new.reshape(B, K, G * T, T)

    # Every row sees itself, so the maximum is finite.
    peak = jnp.maximum(old.max(axis=-1, keepdims=True), new.max(axis=-1, keepdims=True))
    old = jnp.exp(old - peak).astype(values.dtype)
    new = jnp.exp(new - peak).astype(values.dtype)
    # The sums are products with ones: as reductions, a CPU would compute the exponentials twice.
    total = product("bkqs,s->bkq", old, jnp.ones(S, values.dtype))
    total += product("bkqt,t->bkq", new, jnp.ones(T, values.dtype))
    out = product("bkqs,bkse->bkqe", old, cache_values) + product("bkqt,btke->bkqe", new, values)
    out = (out / total[..., None]).reshape(B, K, G, T, E).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, H * E)
