"""Linear layers, norms and two-part attention.

Weight layout depends on the dtype, because it decides the speed of a matrix product with few rows on a
CPU: float32 weights are stored (in, out), bfloat16 weights (out, in). Products accumulate in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from graft_jax.types import Array, Bool, Float, Int


def is_transposed(dtype) -> bool:
    """Whether linear weights of this dtype are stored (in, out) rather than (out, in)."""
    return jnp.dtype(dtype) == jnp.float32


def abstract_matrix(rows_in: int, rows_out: int, dtype) -> Any:
    """The `jax.ShapeDtypeStruct` of a linear weight."""
    shape = (rows_in, rows_out) if is_transposed(dtype) else (rows_out, rows_in)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def random_like(abstract: Any, key: Array, std: float) -> Any:
    """Random weights of the given shapes: normal with `std`, norms (by their names) one, whole numbers counted up."""
    leaves, tree = jax.tree.flatten_with_path(abstract)
    keys = jax.random.split(key, len(leaves))

    def leaf(path, shape, key):
        names = [entry.name for entry in path if isinstance(entry, jax.tree_util.GetAttrKey)]
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jnp.arange(shape.shape[0], dtype=shape.dtype)
        if names[-1].endswith(("norm", "norms")):
            return jnp.ones(shape.shape, shape.dtype)
        return (std * jax.random.normal(key, shape.shape, jnp.float32)).astype(shape.dtype)

    return jax.tree.unflatten(tree, [leaf(path, shape, k) for (path, shape), k in zip(leaves, keys)])


def linear(
    x: Float[Array, "B T I"], weight: Float[Array, "P Q"], bias: Float[Array, "O"] | None = None
) -> Float[Array, "B T O"]:
    """x times weight, as float32. `weight` is (I, O) if float32, else (O, I)."""
    contracting = 0 if is_transposed(weight.dtype) else 1
    y = matmul(x, weight, contracting)
    return y if bias is None else y + jnp.expand_dims(bias.astype(jnp.float32), range(y.ndim - 1))


def matmul(x: Float[Array, "*N I"], weight: Float[Array, "P Q"], contracting: int) -> Float[Array, "*N O"]:
    """x times weight over the weight's axis `contracting`, accumulated and returned in float32."""
    # Rows are flattened first: with a batch axis XLA:CPU copies the weight to another layout before a loop.
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)
    half = weight.dtype == jnp.bfloat16
    if rows.shape[0] == 1 and half:
        # A bfloat16 matrix product with one row is ten times slower than with two on a CPU.
        return matmul(jnp.repeat(rows, 2, axis=0), weight, contracting)[:1].reshape(*x.shape[:-1], -1)
    if rows.shape[0] == 1 and contracting == 0 and weight.shape[0] % 2 == 0:
        # XLA:CPU gives one row times an (in, out) matrix to one core; as the sum of two products it uses two.
        halves = weight.reshape(2, weight.shape[0] // 2, weight.shape[1])
        y = jax.lax.dot_general(
            rows.reshape(2, -1), halves, (((1,), (1,)), ((0,), (0,))), precision=jax.lax.Precision.HIGHEST
        )
        return y.sum(axis=0).reshape(*x.shape[:-1], -1)
    y: Array = _halves(rows, weight, contracting) if half else _product2(rows, weight, 1, contracting)
    return y.reshape(*x.shape[:-1], -1)


def _product2(a: Float[Array, "P Q"], b: Float[Array, "X Y"], axis_a: int, axis_b: int) -> Float[Array, "m n"]:
    return jax.lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _halves(rows: Float[Array, "n I"], weight: Float[Array, "P Q"], contracting: int) -> Float[Array, "n O"]:
    """A product in bfloat16 whose gradients are bfloat16 products too; JAX's own would be mixed ones in float32."""
    return _product2(rows, weight, 1, contracting)


def _halves_forward(rows, weight, contracting):
    return _product2(rows, weight, 1, contracting), (rows, weight)


def _halves_backward(contracting, saved, dy):
    rows, weight = saved
    dy = dy.astype(weight.dtype)
    return (
        input_gradient(dy, weight, contracting).astype(rows.dtype),
        weight_gradient(rows, dy, contracting).astype(weight.dtype),
    )


_halves.defvjp(_halves_forward, _halves_backward)


def input_gradient(dy: Float[Array, "n O"], weight: Float[Array, "P Q"], contracting: int) -> Float[Array, "n I"]:
    """The gradient of `matmul` by its rows, float32; both arguments of one dtype."""
    return _product2(dy, weight, 1, 1 - contracting)


def weight_gradient(rows: Float[Array, "n I"], dy: Float[Array, "n O"], contracting: int) -> Float[Array, "P Q"]:
    """The gradient of `matmul` by its weight, float32, in the weight's layout; both arguments of one dtype."""
    # XLA:CPU runs a product over both arguments' first axes four times slower than a transposition and one
    # over adjoining axes, or not at all.
    dw = jax.lax.optimization_barrier(_product2(row_by_row(rows.T), dy, 1, 0))
    return dw if contracting == 0 else dw.T


def row_by_row(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """The array, kept in memory as its axes say.

    A bfloat16 product of a matrix that was turned in the same program is run in float32 by XLA:CPU, five times slower:
    it undoes the turn. This keeps it from that.
    """
    if jax.default_backend() != "cpu":
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def take_rows(table: Float[Array, "V M"], index: Int[Array, "*N"]) -> Float[Array, "*N M"]:
    """Rows of a matrix, in its dtype."""
    # XLA:CPU gathers from float32 only, and in a loop it converts a bfloat16 table as a whole and keeps the copy.
    # Tied to the index, which the loop changes, the conversion stays where only the rows taken need it.
    table, index = jax.lax.optimization_barrier((table, index))
    return jax.lax.optimization_barrier(table[index])


def rms_norm(x: Float[Array, "*N M"], weight: Float[Array, "M"], eps: float) -> Float[Array, "*N M"]:
    """Root-mean-square norm over the last axis, computed and returned in float32."""
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))


def attend(
    query: Float[Array, "B T H E"],
    cache_keys: Float[Array, "B K E S"],
    cache_values: Float[Array, "B K S E"],
    cached: Int[Array, "B"],
    keys: Float[Array, "B U K E"],
    values: Float[Array, "B U K E"],
    mask: Bool[Array, "B T U"],
    block: int = 0,
    first: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H*E"]:
    """Grouped-query attention over the committed cache and the block of new rows.

    Every query row sees the first `cached` cache entries of its batch row, and those new rows that `mask`
    names, itself at least: ancestors in a tree pass, the causal past in prefill. There may be more new rows
    than queries, when a tree grows level by level. Both parts share one softmax, in float32.

    Args:
        block: read the cache in blocks of so many entries, and only as many blocks as the longest row
            fills; S must be a multiple. 0 reads all S at once. Blocks pay where arithmetic is dear (a
            CPU); on other devices a loop costs more than the empty part of the cache.
        first: the first cache entry that each query row sees, for sliding windows; None sees all.
    """
    B, T, H, E = query.shape
    K, S = keys.shape[2], cache_keys.shape[-1]
    G = H // K
    # [B, K, G*T, E]: one matrix product a key/value head
    q = (query * E**-0.5).reshape(B, T, K, G, E).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, E)
    q = q.astype(keys.dtype)

    # The new rows come first: every row sees itself, so the running maximum is finite from the start.
    own = _product("bkqe,btke->bkqt", q, keys)
    own = own.reshape(B, K, G, T, -1) + jnp.where(mask, 0.0, -jnp.inf)[:, None, None, :, :]
    own = own.reshape(B, K, G * T, -1)
    peak = own.max(axis=-1, keepdims=True)
    running = (peak, *_weigh(own, peak, values.transpose(0, 2, 1, 3)))

    def merge(start, width: int, running):
        """One step of the streaming softmax: rescale what there is, add a block of the cache."""
        peak, total, out = running
        old_keys = jax.lax.dynamic_slice_in_dim(cache_keys, start, width, axis=3)
        old_values = jax.lax.dynamic_slice_in_dim(cache_values, start, width, axis=2)
        entry = (start + jnp.arange(width))[None, None, :]
        seen = entry < cached[:, None, None]
        if first is not None:
            seen &= entry >= jnp.tile(first, (1, G))[:, :, None]
        old = _product("bkqe,bkes->bkqs", q, old_keys) + jnp.where(seen, 0.0, -jnp.inf)[:, None]
        new_peak = jnp.maximum(peak, old.max(axis=-1, keepdims=True))
        more, added = _weigh(old, new_peak, old_values)
        shrink = jnp.exp(peak - new_peak)
        return new_peak, total * shrink + more, out * shrink + added

    if 0 < block < S:
        steps = (cached.max() + block - 1) // block
        running = jax.lax.fori_loop(0, steps, lambda i, c: merge(i * block, block, c), running)
    else:
        running = merge(0, S, running)
    _, total, out = running
    out = (out / total).reshape(B, K, G, T, E).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, H * E)


def _product(formula: str, x: Array, y: Array) -> Array:
    return jnp.einsum(formula, x, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _weigh(scores: Float[Array, "B K Q S"], peak: Float[Array, "B K Q 1"], values: Float[Array, "B K S E"]):
    """Sum of exp(scores - peak), [B, K, Q, 1], and the values summed with these weights, [B, K, Q, E]."""
    weights = jnp.exp(scores - peak).astype(values.dtype)
    # The sum is a product with ones: as a reduction, a CPU would compute the exponentials twice.
    total = _product("bkqs,s->bkq", weights, jnp.ones(weights.shape[-1], weights.dtype))
    return total[..., None], _product("bkqs,bkse->bkqe", weights, values)
