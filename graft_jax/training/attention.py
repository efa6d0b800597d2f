"""Attention of the training-time test: causal over the first step, and one entry a row of every later step.

Scores are never held for more than some rows at a time: the backward pass makes them again. Products are
written in the forms that XLA:CPU runs fast in bfloat16.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from graft_jax.models.layers import row_by_row
from graft_jax.types import Array, Float, Int

SECTIONS = 4  # of the queries; each sees only the keys up to its own end
ROWS = 128  # queries whose scores are held at a time


def attend_heads(
    query: Float[Array, "B S H E"],
    keys: Float[Array, "B S K E"],
    values: Float[Array, "B S K E"],
    own: Sequence[tuple[Float[Array, "B S K E"], Float[Array, "B S K E"]]],
    segments: Int[Array, "B S"],
) -> Float[Array, "B S HE"]:
    """`attend` in the layout of the models: query heads unscaled, and the own entries as pairs of key and value."""
    B, S, H, E = query.shape
    K = keys.shape[2]
    q = (query * E**-0.5).reshape(B, S, K, H // K, E).transpose(0, 2, 3, 1, 4)

    def heads_first(x: Array) -> Array:
        return x.transpose(0, 2, 1, 3)

    none = jnp.zeros((0, B, K, S, E))
    stacked = tuple(jnp.stack([heads_first(x) for x in entries]) for entries in zip(*own))
    own_keys, own_values = stacked or (none, none)
    out = attend(q, heads_first(keys), heads_first(values), own_keys, own_values, segments)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, S, H * E)


@jax.custom_vjp
def attend(
    query: Float[Array, "B K G S E"],
    keys: Float[Array, "B K S E"],
    values: Float[Array, "B K S E"],
    own_keys: Float[Array, "j B K S E"],
    own_values: Float[Array, "j B K S E"],
    segments: Int[Array, "B S"],
) -> Float[Array, "B K G S E"]:
    """Softmax attention, float32, of row s over `keys` up to s of its own segment and over its `own` entries.

    Args:
        query: scaled.
        keys, values: products are in their dtype.
        own_keys, own_values: entry j of row s belongs to that row alone.
    """
    return _forward(query, keys, values, own_keys, own_values, segments)[0]


def _forward(*args):
    def row(args):
        query, keys, values, own_keys, own_values, segments = args

        def rows(inputs, keys, values, seen):
            q, k_own, v_own, segment, at = inputs
            main, own = _weights(q, keys, k_own, segment, at, seen)
            out = _product("kqt,kte->kqe", _flat(main.astype(values.dtype)), values).reshape(q.shape)
            return out + jnp.einsum("kgsj,jkse->kgse", own, v_own)

        return _by_sections(rows, (query, own_keys, own_values, segments), keys, values, segments)

    return _over_batch(row, _batch_first(*args)), args


def _backward(args, d_out):
    def row(args):
        query, keys, values, own_keys, own_values, segments, d_out = args
        d_keys, d_values = jnp.zeros(keys.shape), jnp.zeros(values.shape)
        parts = []
        for start, stop in _sections(query.shape[2]):
            k, v = keys[:, :stop], values[:, :stop]

            def rows(carry, inputs, k=k, v=v, stop=stop):
                q, k_own, v_own, segment, at, d = inputs
                main, own = _weights(q, k, k_own, segment, at, segments[:stop])
                low = _flat(d).astype(v.dtype)
                d_main = _product("kqe,ket->kqt", low, v.transpose(0, 2, 1)).reshape(main.shape)
                d_own = jnp.einsum("kgse,jkse->kgsj", d, v_own)
                mean = (main * d_main).sum(-1, keepdims=True) + (own * d_own).sum(-1, keepdims=True)
                d_main, d_own = main * (d_main - mean), own * (d_own - mean)
                flat = _flat(d_main).astype(k.dtype)
                d_q = _product("kqt,kte->kqe", flat, k).reshape(q.shape)
                d_q += jnp.einsum("kgsj,jkse->kgse", d_own, k_own)
                made = (
                    carry[0] + _product("ktq,kqe->kte", _turned(flat), _flat(q).astype(k.dtype)),
                    carry[1] + _product("ktq,kqe->kte", _turned(_flat(main).astype(v.dtype)), low),
                )
                d_k_own = jnp.einsum("kgsj,kgse->jkse", d_own, q)
                return made, (d_q, d_k_own, jnp.einsum("kgsj,kgse->jkse", own, d))

            zero = (jnp.zeros(k.shape), jnp.zeros(v.shape))
            inputs = _chunks((query, own_keys, own_values, segments, jnp.arange(len(segments)), d_out), start, stop)
            (more_keys, more_values), made = jax.lax.scan(rows, zero, inputs)
            d_keys, d_values = d_keys.at[:, :stop].add(more_keys), d_values.at[:, :stop].add(more_values)
            parts.append(tuple(_joined(x, stop - start) for x in made))
        d_query, d_own_keys, d_own_values = (jnp.concatenate(x, axis=2) for x in zip(*parts))
        return d_query, d_keys, d_values, d_own_keys, d_own_values

    query, keys, values, own_keys, own_values, _ = args
    d = _over_batch(row, (*_batch_first(*args), d_out))
    return (
        d[0], d[1].astype(keys.dtype), d[2].astype(values.dtype),
        jnp.moveaxis(d[3], 0, 1), jnp.moveaxis(d[4], 0, 1), None,
    )  # fmt: skip


attend.defvjp(_forward, _backward)


def _batch_first(query, keys, values, own_keys, own_values, segments):
    return query, keys, values, jnp.moveaxis(own_keys, 1, 0), jnp.moveaxis(own_values, 1, 0), segments


def _over_batch(row, args):
    """One batch row at a time on a CPU, where scores should stay in its caches."""
    return jax.lax.map(row, args) if jax.default_backend() == "cpu" else jax.vmap(row)(args)


def _sections(S: int) -> list[tuple[int, int]]:
    size = -(-S // SECTIONS)
    return [(start, min(start + size, S)) for start in range(0, S, size)]


def _by_sections(rows, inputs, keys, values, segments):
    parts = []
    for start, stop in _sections(len(segments)):
        chunks = _chunks((*inputs, jnp.arange(len(segments))), start, stop)
        k, v, seen = keys[:, :stop], values[:, :stop], segments[:stop]
        out = jax.lax.map(lambda x, k=k, v=v, seen=seen: rows(x, k, v, seen), chunks)
        parts.append(_joined(out, stop - start))
    return jnp.concatenate(parts, axis=2)


def _chunks(inputs, start: int, stop: int):
    """Rows start to stop of each input (its axis of length S: the last but one, or the only one), chunk first."""
    count = -(-(stop - start) // ROWS)
    size = -(-(stop - start) // count)

    def split(x: Array) -> Array:
        axis = 0 if x.ndim == 1 else x.ndim - 2
        x = jax.lax.slice_in_dim(x, start, stop, axis=axis)
        x = jnp.pad(x, [(0, count * size - (stop - start) if i == axis else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)

    return tuple(map(split, inputs))


def _joined(x: Float[Array, "n a b c E"], count: int) -> Float[Array, "a b count E"]:
    n, a, b, c, E = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(a, b, n * c, E)[:, :, :count]


def _weights(q, keys, k_own, segment, at, seen):
    """Softmax weights over keys and own entries."""
    scores = _product("kqe,ket->kqt", _flat(q).astype(keys.dtype), keys.transpose(0, 2, 1))
    scores = scores.reshape(*q.shape[:3], -1)
    allowed = (at[:, None] >= jnp.arange(len(seen))[None, :]) & (segment[:, None] == seen[None, :])
    # Rows that pad the last chunk may see nothing: a finite number keeps theirs finite.
    scores = jnp.where(allowed[None, None], scores, jnp.float32(-1e30))
    own = jnp.einsum("kgse,jkse->kgsj", q, k_own)
    top = jnp.maximum(scores.max(-1, keepdims=True), own.max(-1, keepdims=True, initial=-jnp.inf))
    scores, own = jnp.exp(scores - top), jnp.exp(own - top)
    share = 1.0 / (scores.sum(-1, keepdims=True) + own.sum(-1, keepdims=True))
    return scores * share, own * share


def _flat(x: Float[Array, "K G s X"]) -> Float[Array, "K q X"]:
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _turned(x: Float[Array, "K q t"]) -> Float[Array, "K t q"]:
    return row_by_row(x.transpose(0, 2, 1))


def _product(form: str, a: Array, b: Array) -> Array:
    return jnp.einsum(form, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
