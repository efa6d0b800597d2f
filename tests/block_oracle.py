"""The block drafters in NumPy, float64, one slot, head and node at a time. No cache: all features are given."""

import numpy as np


def _np(x, linear=False):
    """A parameter as float64; linear ones as (in, out)."""
    bfloat16 = x.dtype != np.float32
    x = np.asarray(x).astype(np.float64)
    return x.T if linear and bfloat16 else x


def _rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * _np(weight)


def _turn(x, position, theta):
    """Rotates one head's vector."""
    half = len(x) // 2
    angle = position / theta ** (np.arange(half) / half)
    return np.concatenate(
        [x[:half] * np.cos(angle) - x[half:] * np.sin(angle), x[half:] * np.cos(angle) + x[:half] * np.sin(angle)]
    )


def _silu(x):
    return x / (1 + np.exp(-x))


def _softmax(x):
    p = np.exp(x - x.max())
    return p / p.sum()


def hidden(config, params, embed, features, anchor, size=None):
    """Normed outputs [T, M] of the block after the given features [S, taps * M].

    The anchor stands at position S.
    """
    model, T, S = config.model, size or config.block_size, len(features)
    H, K, E, eps = model.num_heads, model.num_kv_heads, model.head_dim, model.rms_norm_eps
    fused = _rms(features @ _np(params.fc, True), params.hidden_norm, eps)
    x = np.stack([_np(embed)[t] for t in [anchor] + [config.mask_token_id] * (T - 1)])
    for i, layer in enumerate(params.layers):
        y = _rms(x, layer.attn_norm, eps)
        both = np.concatenate([fused, y])
        q = _rms((y @ _np(layer.q, True)).reshape(T, H, E), layer.q_norm, eps)
        k = _rms((both @ _np(layer.k, True)).reshape(S + T, K, E), layer.k_norm, eps)
        v = (both @ _np(layer.v, True)).reshape(S + T, K, E)
        out = np.zeros((T, H, E))
        for t in range(T):
            for h in range(H):
                group = h // (H // K)
                query = _turn(q[t, h], S + t, model.rope.theta)
                seen = range(S + T)
                if config.windows[i]:
                    seen = [j for j in seen if abs(S + t - j) < config.windows[i]]
                if config.causal[i]:
                    seen = [j for j in seen if j <= S + t]
                scores = [query @ _turn(k[j, group], j, model.rope.theta) / np.sqrt(E) for j in seen]
                out[t, h] = _softmax(np.array(scores)) @ np.stack([v[j, group] for j in seen])
        x = x + out.reshape(T, H * E) @ _np(layer.o, True)
        y = _rms(x, layer.mlp_norm, eps)
        x = x + (_silu(y @ _np(layer.gate, True)) * (y @ _np(layer.up, True))) @ _np(layer.down, True)
    return _rms(x, params.norm, eps)


def logits(target_config, target, outputs):
    """The target's head, padding rows masked."""
    head = _np(target.embed).T if target.head is None else _np(target.head, True)
    out = outputs @ head
    out[:, target_config.num_tokens :] = -np.inf
    return out


def gru(head, embed, tokens):
    """The state after some tokens."""
    w_in, w_state = _np(head.gru_input, True), _np(head.gru_state, True)
    state = np.zeros(w_state.shape[0])
    for token in tokens:
        r_in, z_in, n_in = np.split(_np(embed)[token] @ w_in, 3)
        r_state, z_state, n_state = np.split(state @ w_state, 3)
        r, z = 1 / (1 + np.exp(-r_in - r_state)), 1 / (1 + np.exp(-z_in - z_state))
        state = (1 - z) * np.tanh(n_in + r * n_state) + z * state
    return state


def distribution(config, params, embed, outputs, base, path, *, candidates=0, full=False):
    """{token: log-probability} of the successors of a path (the anchor first) of a Domino block."""
    slot, head = len(path) - 1, params.domino
    row = base[slot]
    mass = row.max() + np.log(np.exp(row - row.max()).sum())
    ids = sorted(range(len(row)), key=lambda token: (-row[token], token))[: candidates or len(row)]
    if slot < config.domino.prefix:
        return {token: row[token] - mass for token in ids}
    low = _silu(outputs[slot] @ _np(head.hidden_down, True) + gru(head, embed, path) @ _np(head.state_down, True))
    scores = {token: row[token] + low @ _np(head.up)[token] for token in ids}
    summed = list(scores.values())
    if full:
        summed += [row[token] for token in set(range(len(row))) - set(ids)]
    summed = np.array(summed)
    mass = summed.max() + np.log(np.exp(summed - summed.max()).sum())
    return {token: score - mass for token, score in scores.items()}
