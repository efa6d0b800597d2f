"""EAGLE-3's training-time test as a loss (`cnets.py` and `traineagle3` of the reference)."""

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.models import eagle3
from graft_jax.models.eagle3 import Eagle3Params, Projected
from graft_jax.models.eagle3_config import Eagle3Config
from graft_jax.models.layers import linear
from graft_jax.models.transformer import TargetParams
from graft_jax.training.features import CHUNK, Features
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
    token; also the target's own choice must lie in the draft vocabulary. The loss of a label is the
    cross-entropy between the target's softmax, restricted to the draft vocabulary and renormalised, and
    the head's; a step's loss is the mean over its labels (the reference divides by all rows instead), 0
    where there are none; the total is the sum of `DECAY`^j times step j's.

    Args:
        target: for the embedding and the head; its weights are constants.
        steps: 7 in the reference, 4 in SpecPV's long-context recipe.
    """
    B, S = batch.tokens.shape
    embed = jax.lax.stop_gradient(target.embed)
    head = _draft_rows(params, target)
    hidden = eagle3.fuse(config, params, batch.taps)
    past: list[Projected] = []
    losses, accuracies, labels = [], [], []
    for j in range(steps):
        tokens = _shift(batch.tokens, j + 1)
        positions = jnp.broadcast_to(jnp.arange(S)[None, :] + j, (B, S))
        past.append(eagle3.project(config, params, embed, tokens, hidden, positions))
        hidden = eagle3.finish(config, params, past[-1].residual, _attend(past))
        wanted = _shift(batch.mask, j + 2)
        loss, correct, count = _step_loss(
            config, params, head, hidden, _shift(batch.hidden, j + 1), _shift(batch.best, j + 1), wanted
        )
        losses.append(loss / jnp.maximum(count[0], 1).astype(jnp.float32))
        accuracies.append(correct.astype(jnp.float32) / jnp.maximum(count[1], 1).astype(jnp.float32))
        labels.append(count[0])
    total = (DECAY ** jnp.arange(steps, dtype=jnp.float32) * jnp.stack(losses)).sum()
    return total, Metrics(jnp.stack(losses), jnp.stack(accuracies), jnp.stack(labels))


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


def _attend(past: list[Projected]) -> Float[Array, "B S HE"]:
    """Attention of the last step: causal over step 0, and the same row of every later step, its own too."""
    last = past[-1]
    B, S, H, E = last.query.shape
    K = last.key.shape[2]
    q = (last.query * E**-0.5).reshape(B, S, K, H // K, E)
    # Scores of the same row in later steps: one number a step.
    diagonal = [jnp.einsum("bskge,bske->bkgs", q, step.key)[..., None] for step in past[1:]]
    size = min(CHUNK, S)

    @jax.checkpoint
    def rows(start: Int[Array, ""], q: Array, *own: Array) -> Float[Array, "B c HE"]:
        scores = jnp.einsum("bskge,btke->bkgst", q, past[0].key)
        seen = start + jnp.arange(size)[:, None] >= jnp.arange(S)[None, :]
        scores = jnp.where(seen[None, None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([scores, *own[: len(diagonal)]], axis=-1), axis=-1)
        out = jnp.einsum("bkgst,btke->bskge", weights[..., :S], past[0].value)
        for i, value in enumerate(own[len(diagonal) :]):
            out += jnp.einsum("bkgs,bske->bskge", weights[..., S + i], value)
        return out.reshape(B, size, H * E)

    pad = -S % size
    chunks = (S + pad) // size

    def split(x: Array, axis: int) -> Array:
        """The rows in chunks, chunk first."""
        x = jnp.pad(x, [(0, pad if i == axis else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], chunks, size, *x.shape[axis + 1 :]), axis, 0)

    inputs = (split(q, 1), *(split(d, 3) for d in diagonal), *(split(step.value, 1) for step in past[1:]))
    out = jax.lax.map(lambda args: rows(*args), (jnp.arange(chunks) * size, *inputs))
    return jnp.moveaxis(out, 0, 1).reshape(B, S + pad, H * E)[:, :S]


def _step_loss(config, params, head, outputs, hidden, best: Int[Array, "B S"], wanted: Bool[Array, "B S"]):
    """Sums over a step's labels, a chunk of rows at a time: loss, correct choices, and both counts.

    The second count has the labels outside the draft vocabulary too: no draft can be right there.
    """
    n = best.size
    pad = -n % CHUNK

    def chunked(x: Array) -> Array:
        flat = x.reshape(n, *x.shape[2:])
        return jnp.pad(flat, [(0, pad)] + [(0, 0)] * (flat.ndim - 1)).reshape(-1, CHUNK, *flat.shape[1:])

    @jax.checkpoint
    def chunk(carry, x):
        output, hidden, best, wanted = x
        teacher = linear(hidden[None], head if head.dtype == jnp.bfloat16 else head.T)[0]
        logits = eagle3.logits(config, params, output[None])[0]
        choice = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if params.draft_to_target is None:
            known = jnp.ones(best.shape, bool)
        else:
            choice = params.draft_to_target[choice]
            known = (params.draft_to_target[jnp.argmax(teacher, axis=-1)] == best) & wanted
        known &= wanted
        entropy = -(jax.nn.softmax(teacher, axis=-1) * jax.nn.log_softmax(logits, axis=-1)).sum(axis=-1)
        found = (
            jnp.where(known, entropy, 0.0).sum(),
            ((choice == best) & wanted).sum(dtype=jnp.int32),
            jnp.stack([known.sum(dtype=jnp.int32), wanted.sum(dtype=jnp.int32)]),
        )
        return jax.tree.map(jnp.add, carry, found), None

    zero = (jnp.float32(0), jnp.int32(0), jnp.zeros(2, jnp.int32))
    return jax.lax.scan(chunk, zero, tuple(map(chunked, (outputs, hidden, best, wanted))))[0]
