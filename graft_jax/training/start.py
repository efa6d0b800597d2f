"""Where a new drafter starts: at the target's own weights as far as shapes allow."""

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.config import ModelConfig
from graft_jax.models import dflash, eagle3
from graft_jax.models.dflash import DFlashParams
from graft_jax.models.dflash_config import DFlashConfig
from graft_jax.models.eagle3 import Eagle3Params
from graft_jax.models.eagle3_config import Eagle3Config
from graft_jax.models.layers import is_transposed
from graft_jax.models.transformer import TargetParams
from graft_jax.tokenizer import Tokenizer


def draft_vocabulary(tokens: np.ndarray, size: int, vocab_size: int) -> np.ndarray:
    """The `size` most frequent ids of `tokens`, rising; ties go to the lower id."""
    counts = np.bincount(tokens.ravel(), minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def mask_token(tokenizer: Tokenizer | None, config: ModelConfig) -> int:
    """A token for a block's empty slots: the first special one that nothing uses, else a padding row.

    Raises:
        ValueError: there is neither.
    """
    if config.num_tokens < config.vocab_size:
        spare = [config.num_tokens]
    elif tokenizer is None:
        spare = []
    else:
        used = {*tokenizer.stop_ids, *config.eos_token_ids}
        used |= {i for text in tokenizer.special.values() for i in tokenizer.encode(text, add_special_tokens=False)}
        if tokenizer.has_chat_template:
            used |= set(tokenizer.apply_chat_template([{"role": "user", "content": "x"}]))
        spare = sorted(tokenizer.special_ids - used)
    if not spare:
        raise ValueError("drafter.mask_token_id must be given: the tokenizer has no special token to spare")
    return spare[0]


def block_from_target(
    config: DFlashConfig, key: jax.Array, target_config: ModelConfig, target: TargetParams
) -> DFlashParams:
    """A new block drafter, float32.

    The fused feature starts as the last tap, layers and norms as the target's last; what has another shape, or
    no counterpart, starts at random, and a Domino head's correction at 0.
    """
    params = dflash.init_params(config, key, jnp.float32, std=0.02)

    layers = []
    for layer, source in zip(params.layers, target.layers[-len(params.layers) :]):
        found = {name: _matrix(getattr(source, name)) for name in ("q", "k", "v", "o", "gate", "up", "down")}
        found |= {name: getattr(source, name).astype(jnp.float32) for name in ("attn_norm", "mlp_norm")}
        layers.append(layer.replace(**_fitting(layer, found)))
    M = target_config.hidden_size
    fc = params.fc.at[-M:].add(jnp.eye(M))
    norms = {"hidden_norm": target.layers[-1].attn_norm, "norm": target.norm}
    head = params.domino and params.domino.replace(up=jnp.zeros_like(params.domino.up))
    return params.replace(layers=tuple(layers), fc=fc, domino=head, **_fitting(params, norms))


def _matrix(weight: jax.Array) -> jax.Array:
    """A linear weight in float32's layout."""
    return (weight if is_transposed(weight.dtype) else weight.T).astype(jnp.float32)


def _fitting(params, starts: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Those that have the parameter's shape, as copies of their own."""
    return {
        name: jnp.array(value, jnp.float32)
        for name, value in starts.items()
        if value.shape == getattr(params, name).shape
    }


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

    M, Mt = config.hidden_size, target_config.hidden_size
    starts = {
        name: _matrix(getattr(last, name)) for name in ("o", "gate", "up", "down")
    } | {
        name: jnp.concatenate([_matrix(getattr(first, name)), _matrix(getattr(last, name))]) for name in ("q", "k", "v")
    } | {
        "embed_norm": first.attn_norm, "hidden_norm": last.attn_norm, "mlp_norm": last.mlp_norm, "norm": target.norm,
    }  # fmt: skip
    if M == Mt:
        starts["fc"] = params.fc.at[-M:].add(jnp.eye(M))
    rows = target.embed if target.head is None else _matrix(target.head).T
    starts["head"] = (rows if ids is None else rows[ids]).astype(jnp.float32).T
    if ids is not None:
        params = params.replace(draft_to_target=jnp.asarray(ids))
    return params.replace(**_fitting(params, starts))
