"""Where a new draft head starts: at the target's own weights as far as shapes allow."""

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.config import ModelConfig
from graft_jax.models import eagle3
from graft_jax.models.eagle3 import Eagle3Params
from graft_jax.models.eagle3_config import Eagle3Config
from graft_jax.models.layers import is_transposed
from graft_jax.models.transformer import TargetParams


def draft_vocabulary(tokens: np.ndarray, size: int, vocab_size: int) -> np.ndarray:
    """The `size` most frequent ids of `tokens`, rising; ties go to the lower id."""
    counts = np.bincount(tokens.ravel(), minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def eagle3_from_target(
    config: Eagle3Config, key: jax.Array, target_config: ModelConfig, target: TargetParams, ids: np.ndarray | None
) -> Eagle3Params:
    """A new head, float32.

    The fused feature starts as the last tap; the layer's halves that read it as the target's last layer, those that
    read the embedding as its first; norm and rows of the head as the target's. What has another shape starts
    at random.

    Args:
        ids: the draft vocabulary; None if it is the target's.
    """
    params = eagle3.init_params(config, key, jnp.float32, std=0.02)
    first, last = target.layers[0], target.layers[-1]

    def matrix(weight) -> jax.Array:
        return (weight if is_transposed(weight.dtype) else weight.T).astype(jnp.float32)

    M, Mt = config.hidden_size, target_config.hidden_size
    starts = {
        name: matrix(getattr(last, name)) for name in ("o", "gate", "up", "down")
    } | {
        name: jnp.concatenate([matrix(getattr(first, name)), matrix(getattr(last, name))]) for name in ("q", "k", "v")
    } | {
        "embed_norm": first.attn_norm, "hidden_norm": last.attn_norm, "mlp_norm": last.mlp_norm, "norm": target.norm,
    }  # fmt: skip
    if M == Mt:
        starts["fc"] = params.fc.at[-M:].add(jnp.eye(M))
    rows = target.embed if target.head is None else matrix(target.head).T
    starts["head"] = (rows if ids is None else rows[ids]).astype(jnp.float32).T
    if ids is not None:
        params = params.replace(draft_to_target=jnp.asarray(ids))
    fitting = {
        name: jnp.array(value, jnp.float32)
        for name, value in starts.items()
        if value.shape == getattr(params, name).shape
    }
    return params.replace(**fitting)
