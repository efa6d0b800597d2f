"""Block drafters against z-lab's own package, and Domino's head against torch's GRU and linear layers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from graft_jax.io.block_drafter import load_block_drafter
from graft_jax.models import cache as kv
from graft_jax.models import dflash, domino
from graft_jax.models.dflash import DominoParams
from graft_jax.models.layers import is_transposed, linear

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
reference = pytest.importorskip("dflash.model")
import safetensors.torch  # noqa: E402  (needs torch)
import torch_run  # noqa: E402  (needs torch)

pytestmark = pytest.mark.parity
MASK, T = 310, 6
CONFIG = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 24, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 256, "block_size": T,
    "num_target_layers": 4, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2, 3]},
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5,
           "use_sliding_window": True}  # fmt: skip
# Largest and mean difference of outputs around 1. In bfloat16 torch rounds to 8 bits after every operation of
# three layers, and we only before products.
TOLERANCE = {"float32": (1e-4, 1e-5), "bfloat16": (0.12, 0.02)}


def made(tmp_path, config, dtype):
    """The package's model with random weights, and ours read from its files."""
    hf = reference.Qwen3Config(**config)
    hf._attn_implementation = "sdpa"
    model = reference.DFlashDraftModel(hf).eval()
    torch_run.randomize(model)
    model = model.to(getattr(torch, dtype))
    tensors = {name: x.contiguous() for name, x in model.state_dict().items() if "rotary" not in name}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    target, params = toy.load("llama", jnp.dtype(dtype))
    ours, weights = load_block_drafter(tmp_path, target, dtype=dtype)
    return model, ours, weights, params.embed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", [{}, SLIDING, SLIDING | {"is_causal": False}], ids=["full", "sliding", "both ways"])
def test_backbone(tmp_path, dtype, change):
    """Two rounds: features come in two parts, and the block's own keys do not stay."""
    model, config, params, embed = made(tmp_path, CONFIG | change, dtype)
    features = np.random.default_rng(1).normal(size=(1, 14, 3 * 64)).astype(np.float32)
    past = reference._make_cache(model.config)
    cache = kv.init(config.model, 1, 64, jnp.float32)
    ours = jax.jit(dflash.hidden, static_argnums=0)
    (largest, mean), start = TOLERANCE[dtype], 0
    for anchor, length in ((7, 9), (8, 14)):
        ids = torch.tensor([[anchor] + [MASK] * (T - 1)])
        weight = torch.tensor(np.asarray(embed.astype(jnp.float32)))
        with torch.no_grad():
            expected = model(
                target_hidden=torch.tensor(features[:, start:length]).to(model.dtype),
                noise_embedding=torch.nn.functional.embedding(ids, weight).to(model.dtype),
                position_ids=torch.arange(start, length + T)[None],
                past_key_values=past,
                use_cache=True,
            )
        reference._crop_to(past, length)
        new = jnp.asarray(features[:, start:length])
        column = jnp.arange(length - start)[None]
        made_of = dflash.context(config, params, tuple(jnp.split(new, 3, axis=2)), start + column)
        cache = kv.commit(cache, made_of, column, jnp.array([start]))
        found = ours(config, params, embed, jnp.array([anchor]), cache, jnp.array([length]))
        difference = np.abs(found - expected.float().numpy())
        assert difference.max() < largest and difference.mean() < mean
        start = length


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head(dtype):
    """A GRU without biases, and the correction of [hidden, state]."""
    M, G, R, V = 48, 32, 16, 320
    gru = torch.nn.GRU(M, G, bias=False, batch_first=True)
    project = torch.nn.Sequential(
        torch.nn.Linear(M + G, R, bias=False), torch.nn.SiLU(), torch.nn.Linear(R, V, bias=False)
    )
    for module in (gru, project):
        torch_run.randomize(module)
        module.to(getattr(torch, dtype))

    def ours(x, is_linear=True):
        x = jnp.asarray(x.detach().float().numpy(), dtype)
        return x.T if is_linear and is_transposed(dtype) else x

    first, second = project[0].weight, project[2].weight
    params = DominoParams(
        ours(gru.weight_ih_l0), ours(gru.weight_hh_l0), ours(first[:, :M]), ours(first[:, M:]), ours(second, False)
    )
    rng = np.random.default_rng(0)
    embed = jnp.asarray(rng.normal(size=(V, M)), dtype)
    tokens, hidden = rng.integers(0, V, (3, 5)), jnp.asarray(rng.normal(size=(3, 5, M)), dtype)
    inputs = torch.tensor(np.asarray(embed.astype(jnp.float32)))[tokens].to(getattr(torch, dtype))
    with torch.no_grad():
        states, _ = gru(inputs)
        z = torch.tensor(np.asarray(hidden.astype(jnp.float32))).to(states.dtype)
        expected = project(torch.cat([z, states], dim=-1)).float().numpy()
    state = jnp.zeros((3, 1, G))
    tolerance = {"float32": 1e-5, "bfloat16": 3e-2}[dtype]
    for i in range(5):
        state = domino.advance(params, embed, state, jnp.asarray(tokens[:, i : i + 1]))
        np.testing.assert_allclose(state[:, 0], states[:, i].float().numpy(), rtol=tolerance, atol=tolerance)
        low = domino.compress(params, linear(hidden[:, i : i + 1], params.hidden_down), state)
        found = domino.correction(params, low)
        np.testing.assert_allclose(found[:, 0], expected[:, i], rtol=tolerance, atol=4 * tolerance)
