"""Losses of block drafters: blocks at random anchors of a text, all in one pass (DFlash; Domino, section 3.3).

A block at anchor a is what the drafter sees when the token at a is its root: features of the positions before
a, the token itself, and masks. It runs through the very functions that draft. Slot d of those that say
something is trained to say the token at a + d + 1, in both label conventions.
"""

import jax
import jax.numpy as jnp

from graft_jax.config import ModelConfig
from graft_jax.models import dflash, domino, transformer
from graft_jax.models.cache import KVCache
from graft_jax.models.dflash import DFlashParams, DominoParams
from graft_jax.models.dflash_config import DFlashConfig
from graft_jax.models.layers import linear
from graft_jax.models.transformer import TargetParams
from graft_jax.types import Array, Bool, Float, Int


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
) -> tuple[Int[Array, "B N D"], Float[Array, "B N D"]]:
    """Labels of every slot and their weights, exp(-d / gamma), 0 behind the text and where nothing is trained."""
    S = tokens.shape[1]
    slot = jnp.arange(depth)
    where = anchors[:, :, None] + 1 + slot[None, None, :]
    flat = jnp.minimum(where, S - 1).reshape(tokens.shape[0], -1)
    labels = jnp.take_along_axis(tokens, flat, axis=1).reshape(where.shape)
    counts = jnp.take_along_axis(loss_mask, flat, axis=1).reshape(where.shape)
    counts &= (where < S) & keep[:, :, None]
    decay = jnp.exp(-slot.astype(jnp.float32) / gamma)
    return labels, jnp.where(counts, decay[None, None, :], 0.0)


def outputs(
    config: DFlashConfig,
    params: DFlashParams,
    embed: Float[Array, "V M"],
    taps: tuple[Float[Array, "B S M"], ...],
    tokens: Int[Array, "B S"],
    anchors: Int[Array, "B N"],
) -> Float[Array, "B N D M"]:
    """What the backbone says in every slot that says something, of all blocks of a text."""
    B, S = tokens.shape
    made = dflash.context(config, params, taps, jnp.broadcast_to(jnp.arange(S)[None, :], (B, S)))
    cache = KVCache(
        tuple(key.transpose(0, 2, 3, 1) for key in made.keys),
        tuple(value.transpose(0, 2, 1, 3) for value in made.values),
    )
    roots = jnp.take_along_axis(tokens, anchors, axis=1)

    def run(root, length):
        return dflash.hidden(config, params, embed, root, cache, length)

    return jax.vmap(run, in_axes=1, out_axes=1)(roots, anchors)[:, :, config.first_slot :]


def dflash_loss(
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
) -> Float[Array, ""]:
    """Weighted cross-entropy of all slots, in nats."""
    labels, weights = targets(tokens, loss_mask, anchors, keep, config.num_drafted, gamma)
    hidden = outputs(config, params, target.embed, taps, tokens, anchors)
    return mean_cross_entropy(base_logits(target_config, target, hidden), labels, weights)


def domino_loss(
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
    base_weight: Float[Array, ""],
) -> Float[Array, ""]:
    """(1 - w) CE(corrected) + w CE(base), the state running over the true tokens.

    Args:
        base_weight: w, from `base_anchor`; at 1 the head learns nothing.
    """
    assert config.domino is not None and params.domino is not None
    labels, weights = targets(tokens, loss_mask, anchors, keep, config.num_drafted, gamma)
    hidden = outputs(config, params, target.embed, taps, tokens, anchors)
    base = base_logits(target_config, target, hidden)
    roots = jnp.take_along_axis(tokens, anchors, axis=1)
    final = corrected_logits(config.domino.prefix, params.domino, target.embed, hidden, base, roots, labels)
    corrected = mean_cross_entropy(final, labels, weights)
    return (1.0 - base_weight) * corrected + base_weight * mean_cross_entropy(base, labels, weights)


def base_anchor(step: Int[Array, ""], total: int, ratio: float = 1.0, start: float = 1.0) -> Float[Array, ""]:
    """Domino's curriculum: from `start` down to 0 in a line, over the first `ratio` of `total` steps."""
    share = step.astype(jnp.float32) / max(1, int(ratio * total))
    return start * jnp.maximum(0.0, 1.0 - share)


def base_logits(
    target_config: ModelConfig, target: TargetParams, hidden: Float[Array, "B N D M"]
) -> Float[Array, "B N D V"]:  # fmt: skip
    B, N, D, M = hidden.shape
    return transformer.logits(target_config, target, hidden.reshape(B, N * D, M)).reshape(B, N, D, -1)


def corrected_logits(
    prefix: int,
    head: DominoParams,
    embed: Float[Array, "V M"],
    hidden: Float[Array, "B N D M"],
    base: Float[Array, "B N D V"],
    roots: Int[Array, "B N"],
    labels: Int[Array, "B N D"],
) -> Float[Array, "B N D V"]:
    """Logits of every slot given the true tokens before it."""
    B, N, D, M = hidden.shape
    before = jnp.concatenate([roots[:, :, None], labels[:, :, :-1]], axis=2)

    def step(state, tokens):
        state = domino.advance(head, embed, state, tokens)
        return state, state

    G = head.gru_state.shape[0] if head.gru_state.dtype == jnp.float32 else head.gru_state.shape[1]
    _, states = jax.lax.scan(step, jnp.zeros((B, N, G), jnp.float32), before.transpose(2, 0, 1))
    states = states.transpose(1, 2, 0, 3).reshape(B, N * D, G)
    low = domino.compress(head, linear(hidden.reshape(B, N * D, M), head.hidden_down), states)
    delta = domino.correction(head, low).reshape(base.shape)
    return jnp.where((jnp.arange(D) >= prefix)[None, None, :, None], base + delta, base)


def mean_cross_entropy(
    logits: Float[Array, "B N D V"], labels: Int[Array, "B N D"], weights: Float[Array, "B N D"]
) -> Float[Array, ""]:
    """In nats; 0 where all weights are."""
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    loss = jax.nn.logsumexp(logits, axis=-1) - picked
    loss = jnp.where(weights > 0, loss, 0.0)  # a label without weight may be a token that is masked out
    return (weights * loss).sum() / (weights.sum() + 1e-6)
