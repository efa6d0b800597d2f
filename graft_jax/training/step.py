"""One optimizer step, a pure function of arrays."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from graft_jax.types import Array, Float, Int


class TrainState(flax.struct.PyTreeNode):
    """What a step reads and writes. Integer leaves of `params` (vocabulary maps) are never trained."""

    params: Any
    optimizer: Any
    step: Int[Array, ""]


def make_optimizer(
    steps: int, *, peak: float, warmup: float = 0.05, clip: float = 0.5, decay: float = 0.0
) -> optax.GradientTransformation:
    """AdamW with a linear warm-up and a cosine to zero, as the public EAGLE-3 trainers use it.

    Args:
        steps: of the whole run.
        peak: learning rate after the warm-up.
        warmup: its share of the steps.
        clip: largest global norm of a gradient.
        decay: weight decay.
    """
    rising = max(1, round(warmup * steps))
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, rising, max(steps, rising + 1))
    return optax.chain(optax.clip_by_global_norm(clip), optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=decay))


def init(optimizer: optax.GradientTransformation, params: Any) -> TrainState:
    """The state before the first step."""
    return TrainState(params, optimizer.init(_split(params)[0]), jnp.int32(0))


def train_step(
    loss: Callable[[Any, Any, Int[Array, ""]], tuple[Float[Array, ""], Any]],
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Any,
) -> tuple[TrainState, Float[Array, ""], Float[Array, ""], Any]:
    """The state after the step; loss, gradient norm and metrics of the parameters as they were.

    Args:
        loss: (params, batch, step) -> (loss, metrics).
    """
    trained, fixed = _split(state.params)

    def of_trained(trained):
        return loss(_join(trained, fixed), batch, state.step)

    (value, metrics), gradients = jax.value_and_grad(of_trained, has_aux=True)(trained)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, trained)
    params = _join(optax.apply_updates(trained, updates), fixed)
    return TrainState(params, optimizer_state, state.step + 1), value, optax.tree.norm(gradients), metrics


def _split(params: Any) -> tuple[Any, Any]:
    """Floating and other leaves; None in the other's place."""
    trained = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, params)
    fixed = jax.tree.map(lambda x: None if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
    return trained, fixed


def _join(trained: Any, fixed: Any) -> Any:
    return jax.tree.map(lambda a, b: b if a is None else a, trained, fixed, is_leaf=lambda x: x is None)
