"""EAGLE-3's training-time test as a loss (`cnets.py` and `traineagle3` of the reference)."""

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.models import eagle3
from graft_jax.models.eagle3 import Eagle3Params, Projected
from graft_jax.models.eagle3_config import Eagle3Config
from graft_jax.models.layers import input_gradient, is_transposed, matmul, weight_gradient
from graft_jax.models.transformer import TargetParams
from graft_jax.training import attention, softmax
from graft_jax.training.features import CHUNK, Features, positions
from graft_jax.types import Array, Bool, Float, Int

DECAY = 0.8  # weight of step j is DECAY ** j


class Metrics(flax.struct.PyTreeNode):
    """By training-time-test step: mean loss, accuracy against the target's choice, and labels that counted."""

    losses: Float[Array, "J"]
    accuracy: Float[Array, "J"]
    labels: Int[Array, "J"]


def eagle3_loss(
    config: Eagle3Config,
    params: Eagle3Params,
    target: TargetParams,
    batch: Features,
    *,
    steps: int = 7,
) -> tuple[Float[Array, ""], Metrics]:
    """The training-time-test loss.

    Step 0 runs the head on true features; step j + 1 runs it on step j's output and the next true token,
    as drafting does. Row i of step j says the token at i + j + 2, so its label counts where `mask` holds that
    token and it belongs to the row's text; also the target's own choice must lie in the draft vocabulary. The
    loss of a label is the cross-entropy between the target's softmax, restricted to the draft vocabulary and
    renormalised, and the head's; a step's loss is the mean over its labels (the reference divides by all rows
    instead), 0 where there are none; the total is the sum of `DECAY`^j times step j's.

    Args:
        params: with bfloat16 weights the products, forward and backward, are in bfloat16.
        target: for the embedding and the head; its weights are constants.
        steps: 7 in the reference, 4 in SpecPV's long-context recipe.
    """
    embed = jax.lax.stop_gradient(target.embed)
    hidden = eagle3.fuse(config, params, batch.taps)
    where = positions(batch.segments)
    past: list[Projected] = []
    outputs, labels, wanted = [], [], []
    to_draft = _to_draft(config, params)
    for j in range(steps):
        past.append(eagle3.project(config, params, embed, _shift(batch.tokens, j + 1), hidden, where + j))
        attended = _attend(past, batch.segments, params.q.dtype)
        hidden = eagle3.finish(config, params, past[-1].residual, attended)
        outputs.append(eagle3.normed(config, params, hidden))
        best = _shift(batch.best, j + 1)
        labels.append(best if to_draft is None else to_draft[best])
        wanted.append(_shift(batch.mask, j + 2) & (_shift(batch.segments, j + 2) == batch.segments))
    asked = jnp.stack(wanted).reshape(steps, -1)
    label = jnp.stack(labels).reshape(steps, -1)
    counts = (asked & (label >= 0)).sum(axis=1, dtype=jnp.int32)
    scale = DECAY ** jnp.arange(steps, dtype=jnp.float32) / jnp.maximum(counts, 1).astype(jnp.float32)
    M = config.hidden_size
    total, sums, correct = _distil(
        jnp.stack(outputs).reshape(steps, -1, M), params.head, _draft_rows(params, target),
        batch.hidden.reshape(-1, batch.hidden.shape[-1]), label, asked, scale,
    )  # fmt: skip
    right = correct.astype(jnp.float32) / jnp.maximum(asked.sum(axis=1), 1).astype(jnp.float32)
    return total, Metrics(sums / jnp.maximum(counts, 1).astype(jnp.float32), right, counts)


def _shift(x: Array, by: int) -> Array:
    """Row i takes entry i + by; zeros come in behind."""
    return jnp.pad(x[:, by:], [(0, 0), (0, min(by, x.shape[1]))] + [(0, 0)] * (x.ndim - 2))


def _draft_rows(params: Eagle3Params, target: TargetParams) -> Float[Array, "Vd M"]:
    """The target's head restricted to the draft vocabulary."""
    if target.head is None:
        rows = target.embed
    else:
        rows = target.head.T if target.head.shape[0] != target.embed.shape[0] else target.head
    return jax.lax.stop_gradient(rows if params.draft_to_target is None else rows[params.draft_to_target])


def _to_draft(config: Eagle3Config, params: Eagle3Params) -> Int[Array, "V"] | None:
    """Draft ids by target id, -1 where there is none; None where both vocabularies are one."""
    if params.draft_to_target is None:
        return None
    ids = jnp.full(config.vocab_size, -1, jnp.int32)
    return ids.at[params.draft_to_target].set(jnp.arange(config.draft_vocab_size, dtype=jnp.int32))


def _attend(past: list[Projected], segments: Int[Array, "B S"], dtype) -> Float[Array, "B S HE"]:
    """Attention of the last step: causal over step 0, and the same row of every later step, its own too."""
    keys, values = past[0].key.astype(dtype), past[0].value.astype(dtype)
    own = [(step.key, step.value) for step in past[1:]]
    return attention.attend_heads(past[-1].query, keys, values, own, segments)


def _distil(
    outputs: Float[Array, "J n M"],
    head: Float[Array, "P Q"],
    teacher: Float[Array, "Vd Mt"],
    hidden: Float[Array, "n Mt"],
    labels: Int[Array, "J n"],
    wanted: Bool[Array, "J n"],
    scale: Float[Array, "J"],
) -> tuple[Float[Array, ""], Float[Array, "J"], Int[Array, "J"]]:
    """Cross-entropies of all steps against the target's distribution, some rows of logits at a time.

    Row i of step j is taught by row i + j + 1 of `hidden`.

    Args:
        labels: the target's choices as draft ids, -1 where it lies outside.
        wanted: rows that count, in the accuracy; in the loss those with a label.

    Returns:
        The sum over steps of `scale` times the step's sum; the sums; how many choices were right.
    """
    J, n, M = outputs.shape
    pad = -n % CHUNK
    outputs = jnp.pad(outputs, ((0, 0), (0, pad), (0, 0)))
    hidden = jnp.pad(hidden, ((0, pad + J), (0, 0)))
    labels = jnp.pad(labels, ((0, 0), (0, pad)))
    wanted = jnp.pad(wanted, ((0, 0), (0, pad)))
    return _fused(outputs, head, teacher, hidden, labels, wanted, scale)


@jax.custom_vjp
def _fused(outputs, head, teacher, hidden, labels, wanted, scale):
    return _scan(outputs, head, teacher, hidden, labels, wanted, scale, gradients=False)[0]


def _fused_forward(*args):
    # The gradient of a cross-entropy by its logits is known with the logits: made now, they need not be kept
    # nor made twice.
    return _scan(*args, gradients=True)


def _fused_backward(saved, cotangents):
    by_outputs, by_head = saved
    g = cotangents[0]  # the sums by step are metrics
    return (by_outputs.astype(jnp.float32) * g, (by_head * g).astype(by_head.dtype), None, None, None, None, None)


_fused.defvjp(_fused_forward, _fused_backward)


def _scan(outputs, head, teacher, hidden, labels, wanted, scale, gradients: bool):
    J, n, M = outputs.shape
    contracting = 0 if is_transposed(head.dtype) else 1

    def chunk(carry, inputs):
        start, x, label, asked = inputs
        taught = jax.lax.dynamic_slice_in_dim(hidden, start + 1, CHUNK + J - 1, axis=0)
        p, total, _ = softmax.parts(matmul(taught, teacher, 1))
        p = p / total
        p = jnp.stack([p[j : j + CHUNK] for j in range(J)])
        rows = x.reshape(J * CHUNK, M).astype(head.dtype)
        logits = matmul(rows, head, contracting).reshape(J, CHUNK, -1)
        known = asked & (label >= 0)
        exponentials, total, top = softmax.parts(logits)
        entropy = jnp.where(known, (jnp.log(total) + top)[..., 0] - (p * logits).sum(axis=-1), 0.0)
        picked = jnp.take_along_axis(logits, jnp.maximum(label, 0)[..., None], axis=-1)
        right = ((picked >= top)[..., 0] & known).sum(axis=1, dtype=jnp.int32)
        sums, correct, by_head = carry
        if not gradients:
            return (sums + entropy.sum(axis=1), correct + right, by_head), None
        weight = jnp.where(known, scale[:, None], 0.0)
        by_logits = (exponentials / total - p) * weight[..., None]
        by_logits = by_logits.reshape(J * CHUNK, -1).astype(head.dtype)
        by_rows = input_gradient(by_logits, head, contracting).reshape(x.shape).astype(head.dtype)
        by_head += weight_gradient(rows, by_logits, contracting)
        return (sums + entropy.sum(axis=1), correct + right, by_head), by_rows

    def split(x: Array) -> Array:
        """The rows in chunks, chunk first."""
        return jnp.moveaxis(x.reshape(J, n // CHUNK, CHUNK, *x.shape[2:]), 1, 0)

    zero = (jnp.zeros(J), jnp.zeros(J, jnp.int32), jnp.zeros(head.shape if gradients else ()))
    inputs = (jnp.arange(n // CHUNK) * CHUNK, split(outputs), split(labels), split(wanted))
    (sums, correct, by_head), by_rows = jax.lax.scan(chunk, zero, inputs)
    result = ((scale * sums).sum(), sums, correct)
    if by_rows is None:
        return result, None
    return result, (jnp.moveaxis(by_rows, 0, 1).reshape(outputs.shape), by_head.astype(head.dtype))
