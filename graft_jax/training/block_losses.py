"""Losses of block drafters: blocks at random anchors of a text, all in one pass (DFlash; Domino, section 3.3).

A block at anchor a is what the drafter sees when the token at a is its root: features of the positions before
a, the token itself, and masks. It runs through the very functions that draft. Slot d of those that say
something is trained to say the token at a + d + 1, in both label conventions.
"""

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.config import ModelConfig
from graft_jax.models import dflash, domino
from graft_jax.models.cache import KVCache
from graft_jax.models.dflash import DFlashParams, DominoParams
from graft_jax.models.dflash_config import DFlashConfig, DominoConfig
from graft_jax.models.layers import input_gradient, is_transposed, linear, matmul, weight_gradient
from graft_jax.models.transformer import TargetParams
from graft_jax.training import softmax
from graft_jax.training.features import positions
from graft_jax.types import Array, Bool, Float, Int

BLOCKS = 16  # run as one batch
ROWS = 128  # of logits held at a time


def sample_anchors(
    key: Array, loss_mask: Bool[Array, "B S"], count: int
) -> tuple[Int[Array, "B N"], Bool[Array, "B N"]]:  # fmt: skip
    """Anchors drawn uniformly without replacement, rising, and which of them count.

    An anchor is a position that is trained and whose next one is. Rows with fewer than `count` get fewer.
    """
    fits = loss_mask & jnp.pad(loss_mask[:, 1:], ((0, 0), (0, 1)))
    draw = jnp.where(fits, jax.random.uniform(key, fits.shape), -1.0)
    score, anchors = jax.lax.top_k(draw, count)
    keep = score >= 0
    anchors = jnp.where(keep, anchors, fits.shape[1])  # what does not count goes to the end
    anchors = jnp.sort(anchors, axis=1)
    keep = anchors < fits.shape[1]
    return jnp.where(keep, anchors, 0), keep


def targets(
    tokens: Int[Array, "B S"],
    loss_mask: Bool[Array, "B S"],
    anchors: Int[Array, "B N"],
    keep: Bool[Array, "B N"],
    depth: int,
    gamma: float,
    segments: Int[Array, "B S"] | None = None,
) -> tuple[Int[Array, "B N D"], Float[Array, "B N D"]]:
    """Labels of every slot and their weights, exp(-d / gamma), 0 behind the text and where nothing is trained."""
    S = tokens.shape[1]
    slot = jnp.arange(depth)
    where = anchors[:, :, None] + 1 + slot[None, None, :]
    flat = jnp.minimum(where, S - 1).reshape(tokens.shape[0], -1)

    def take(x: Array) -> Array:
        return jnp.take_along_axis(x, flat, axis=1).reshape(where.shape)

    counts = take(loss_mask) & (where < S) & keep[:, :, None]
    if segments is not None:
        counts &= take(segments) == jnp.take_along_axis(segments, anchors, axis=1)[:, :, None]
    decay = jnp.exp(-slot.astype(jnp.float32) / gamma)
    return take(tokens), jnp.where(counts, decay[None, None, :], 0.0)


def outputs(
    config: DFlashConfig,
    params: DFlashParams,
    embed: Float[Array, "V M"],
    taps: tuple[Float[Array, "B S M"], ...],
    tokens: Int[Array, "B S"],
    anchors: Int[Array, "B N"],
    segments: Int[Array, "B S"] | None = None,
) -> Float[Array, "B N D M"]:
    """What the backbone says in every slot that says something, of all blocks of a text.

    Blocks run in groups, each group as a batch; a group's cache is repeated for each of its blocks.
    """
    B, S = tokens.shape
    N = anchors.shape[1]
    made = dflash.context(config, params, taps, jnp.broadcast_to(jnp.arange(S)[None, :], (B, S)))
    roots = jnp.take_along_axis(tokens, anchors, axis=1)
    first = jnp.zeros_like(anchors)
    if segments is not None:
        first = jnp.take_along_axis(jnp.arange(S)[None, :] - positions(segments), anchors, axis=1)

    def run(group):
        root, length, start = (x.reshape(-1) for x in group)
        count = group[0].shape[1]
        cache = KVCache(
            tuple(jnp.repeat(key.transpose(0, 2, 3, 1), count, axis=0) for key in made.keys),
            tuple(jnp.repeat(value.transpose(0, 2, 1, 3), count, axis=0) for value in made.values),
        )
        out = dflash.hidden(config, params, embed, root, cache, length, start=start)
        return out.reshape(B, count, *out.shape[1:])

    groups = -(-N // BLOCKS)
    if groups == 1:
        return run((roots, anchors, first))[:, :, config.first_slot :]
    size = -(-N // groups)

    def split(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, groups * size - N))).reshape(B, groups, size).transpose(1, 0, 2)

    out = jax.lax.map(jax.checkpoint(run), (split(roots), split(anchors), split(first)))
    return jnp.moveaxis(out, 0, 1).reshape(B, groups * size, *out.shape[3:])[:, :N, config.first_slot :]


class BlockMetrics(flax.struct.PyTreeNode):
    """By slot: mean loss, accuracy against the text's token, and labels that counted."""

    losses: Float[Array, "D"]
    accuracy: Float[Array, "D"]
    labels: Int[Array, "D"]


def block_loss(
    config: DFlashConfig,
    params: DFlashParams,
    target_config: ModelConfig,
    target: TargetParams,
    taps: tuple[Float[Array, "B S M"], ...],
    tokens: Int[Array, "B S"],
    loss_mask: Bool[Array, "B S"],
    anchors: Int[Array, "B N"],
    keep: Bool[Array, "B N"],
    gamma: float,
    base_weight: Float[Array, ""] | None = None,
    segments: Int[Array, "B S"] | None = None,
) -> tuple[Float[Array, ""], BlockMetrics]:
    """Weighted cross-entropy of all slots, in nats; of a Domino drafter (1 - w) CE(corrected) + w CE(base).

    Domino's state runs over the true tokens. Some rows of logits are held at a time.

    Args:
        base_weight: w, from `base_anchor`; at 1 the head learns nothing. Of no use to a DFlash drafter.
        segments: texts of a row, which do not see one another; one text a row if None.
    """
    labels, weights = targets(tokens, loss_mask, anchors, keep, config.num_drafted, gamma, segments)
    hidden = outputs(config, params, target.embed, taps, tokens, anchors, segments)
    B, N, D, M = hidden.shape
    share = weights / (weights.sum() + 1e-6)
    rows, head = hidden.reshape(-1, M), params.domino
    low = up = None
    by_final, by_base = share, jnp.zeros_like(share)
    if head is not None:
        assert config.domino is not None and base_weight is not None
        roots = jnp.take_along_axis(tokens, anchors, axis=1)
        low = _compressed(config.domino, head, target.embed, hidden, roots, labels)
        low = jnp.where((jnp.arange(D) >= config.domino.prefix)[None, None, :, None], low, 0.0).reshape(B * N * D, -1)
        up, by_final, by_base = head.up, share * (1.0 - base_weight), share * base_weight
    rows_of_head = target.embed if target.head is None else target.head
    contracting = 1 if target.head is None or not is_transposed(target.head.dtype) else 0
    labels, by_final, by_base = labels.reshape(-1), by_final.reshape(-1), by_base.reshape(-1)
    spec = (contracting, target_config.num_tokens)
    total, entropy, right = _cross_entropy(
        spec, rows, low, jax.lax.stop_gradient(rows_of_head), up, labels, by_final, by_base
    )
    counted = weights > 0
    count = counted.sum(axis=(0, 1), dtype=jnp.int32)
    least = jnp.maximum(count, 1).astype(jnp.float32)
    entropy = jnp.where(counted, entropy.reshape(weights.shape), 0.0).sum(axis=(0, 1)) / least
    accuracy = (right.reshape(weights.shape) & counted).sum(axis=(0, 1)).astype(jnp.float32) / least
    return total, BlockMetrics(entropy, accuracy, count)


def base_anchor(step: Int[Array, ""], total: int, ratio: float = 1.0, start: float = 1.0) -> Float[Array, ""]:
    """Domino's curriculum: from `start` down to 0 in a line, over the first `ratio` of `total` steps."""
    share = step.astype(jnp.float32) / max(1, int(ratio * total))
    return start * jnp.maximum(0.0, 1.0 - share)


def _compressed(
    config: DominoConfig,
    head: DominoParams,
    embed: Float[Array, "V M"],
    hidden: Float[Array, "B N D M"],
    roots: Int[Array, "B N"],
    labels: Int[Array, "B N D"],
) -> Float[Array, "B N D R"]:
    """The low-rank input of every slot's correction, given the true tokens before it."""
    B, N, D, M = hidden.shape
    before = jnp.concatenate([roots[:, :, None], labels[:, :, :-1]], axis=2)

    def step(state, tokens):
        state = domino.advance(head, embed, state, tokens)
        return state, state

    _, states = jax.lax.scan(step, jnp.zeros((B, N, config.gru_size), jnp.float32), before.transpose(2, 0, 1))
    states = states.transpose(1, 2, 0, 3).reshape(B, N * D, config.gru_size)
    low = domino.compress(head, linear(hidden.reshape(B, N * D, M), head.hidden_down), states)
    return low.reshape(B, N, D, -1)


def _cross_entropy_sum(spec, hidden, low, head, up, labels, by_final, by_base) -> tuple[Array, Array, Array]:
    """Sum of `by_final` CE(base + low up) + `by_base` CE(base) with base = hidden head.

    The gradient of a cross-entropy by its logits is known with the logits, so that none is kept nor made twice.

    Args:
        spec: the head's contracting axis, and how many of its ids tokens have.
        head: a constant.

    Returns:
        The sum; the final cross-entropy of each row; whether the label is its arg-max (any of them).
    """
    return _scan(spec, hidden, low, head, up, labels, by_final, by_base, gradients=False)[0]


_cross_entropy = jax.custom_vjp(_cross_entropy_sum, nondiff_argnums=(0,))


def _cross_entropy_forward(spec, *args):
    return _scan(spec, *args, gradients=True)


def _cross_entropy_backward(spec, saved, cotangents):
    by_hidden, by_low, by_up = jax.tree.map(lambda x: (x * cotangents[0]).astype(x.dtype), saved)
    return by_hidden, by_low, None, by_up, None, None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _scan(spec, hidden, low, head, up, labels, by_final, by_base, gradients: bool):
    contracting, num_tokens = spec
    n = hidden.shape[0]
    V = head.shape[1 - contracting]
    padding = jnp.where(jnp.arange(V) < num_tokens, 0.0, -jnp.inf)

    def chunk(by_up, inputs):
        x, small, label, of_final, of_base = inputs
        base = matmul(x, head, contracting) + padding[None, :]
        final = base if up is None else base + matmul(small, up, 1)
        hot = label[:, None] == jnp.arange(V)[None, :]

        def entropy(logits, weight):
            """Cross-entropy, the gradient of its weighted sum by the logits, and whether the label is likeliest."""
            exponentials, total, top = softmax.parts(logits)
            picked = jnp.take_along_axis(logits, label[:, None], axis=-1)
            # A label without weight may be a token that is masked out.
            ce = jnp.where((of_final + of_base)[:, None] > 0, jnp.log(total) + top - picked, 0.0)[:, 0]
            by_logits = exponentials * (weight[:, None] / total) - jnp.where(hot, weight[:, None], 0.0)
            return ce, by_logits, (picked >= top)[:, 0]

        ce, d_final, right = entropy(final, of_final)
        ce_base, d_by_base, _ = (ce, jnp.zeros_like(d_final), right) if up is None else entropy(base, of_base)
        value = (of_final * ce + of_base * ce_base).sum()
        if not gradients:
            return by_up, (value, ce, right)
        d_base = d_final + d_by_base
        by_x = input_gradient(d_base.astype(head.dtype), head, contracting).astype(x.dtype)
        by_small = None
        if up is not None:
            d_final = d_final.astype(up.dtype)
            by_small = input_gradient(d_final, up, 1).astype(small.dtype)
            by_up += weight_gradient(small.astype(up.dtype), d_final, 1)
        return by_up, (value, ce, right, by_x, by_small)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, -n % ROWS)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, ROWS, *x.shape[1:])

    inputs = jax.tree.map(split, (hidden, low, labels, by_final, by_base))
    zero = None if up is None or not gradients else jnp.zeros(up.shape)
    by_up, made = jax.lax.scan(chunk, zero, inputs)
    value, *rest = made
    ce, right, *found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n], tuple(rest))
    result = (value.sum(), ce, right)
    if not gradients:
        return result, None
    return result, (found[0], found[1], None if up is None or by_up is None else by_up.astype(up.dtype))
