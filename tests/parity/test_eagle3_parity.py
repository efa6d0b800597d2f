"""EAGLE-3 heads against vllm-project/speculators, and the features they read against transformers.

Compared with speculators: its model with random weights, saved by its own `save_pretrained`, read by
`load_eagle3`; the logits of three training-time-test steps at every position (step j's row attends to the
first step's rows up to its own and to its own earlier steps: what a chain of j drafts sees), float32, for
both residual conventions, all norm variants, and llama and qwen3 layers. Its positions start at 1, ours at 0.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from graft_jax.io.drafter import load_eagle3
from graft_jax.models import cache as kv
from graft_jax.models import eagle3, transformer
from graft_jax.models.layers import attend

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import safetensors.torch  # noqa: E402  (needs torch)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    reference = pytest.importorskip("speculators.models.eagle3")
    import speculators

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")]
T, STEPS, DRAFT_VOCAB = 12, 3, 200
VARIANTS = {
    "eagle3": {},
    "normed residual": dict(norm_before_residual=True),
    "norm before fc": dict(norm_before_fc=True, norm_before_residual=True),
    "eagle 3.1": dict(fc_norm=True, norm_output=True),
    "eagle 3.1, normed residual": dict(fc_norm=True, norm_output=True, norm_before_residual=True),
}


def theirs(layer, variant):
    """A speculators model for the toy target's width and vocabulary, with random weights."""
    kind = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[layer]
    inner = kind(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=24, vocab_size=320, max_position_embeddings=512, rms_norm_eps=1e-6,
    )  # fmt: skip
    inner._attn_implementation = "eager"
    config = reference.Eagle3SpeculatorConfig(
        transformer_layer_config=inner, draft_vocab_size=DRAFT_VOCAB, target_hidden_size=64,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3], **VARIANTS[variant],
        speculators_config=speculators.SpeculatorsConfig(
            algorithm="eagle3", default_proposal_method="greedy",
            proposal_methods=[speculators.proposals.greedy.GreedyTokenProposalConfig(speculative_tokens=3)],
            verifier=speculators.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )  # fmt: skip
    model = reference.Eagle3DraftModel(config).float().eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") or "fc_norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.15 * torch.randn_like(parameter))
        ids = torch.randperm(320)[:DRAFT_VOCAB].sort().values
        model.d2t.copy_(ids - torch.arange(DRAFT_VOCAB))
        model.t2d.zero_()[ids] = True
    return model, ids.numpy()


def their_logits(model, features, tokens):
    """[STEPS, T, Vd]: what the model's own head gives in each step."""
    found = []
    hook = model.lm_head.register_forward_hook(lambda module, args, out: found.append(out[0].detach().numpy()))
    with torch.inference_mode():
        model(
            hidden_states=torch.tensor(features)[None], input_ids=torch.tensor(tokens)[None],
            document_ids=torch.zeros(1, T, dtype=torch.long), ttt_steps=STEPS,
        )  # fmt: skip
    hook.remove()
    return np.stack(found)


def our_logits(config, params, embed, features, tokens):
    """The same through the functions that draft."""
    hidden = eagle3.fuse(config, params, tuple(jnp.split(jnp.asarray(features)[None], 3, axis=-1)))
    empty = (
        jnp.zeros((1, config.num_kv_heads, config.head_dim, 1)),
        jnp.zeros((1, config.num_kv_heads, 1, config.head_dim)),
    )
    keys, values, masks, found = [], [], [], []
    for step in range(STEPS):
        shifted = np.concatenate([tokens[step:], np.zeros(step, tokens.dtype)])
        positions = jnp.arange(T)[None] + step
        made = eagle3.project(config, params, embed, jnp.asarray(shifted)[None], hidden, positions)
        keys.append(made.key)
        values.append(made.value)
        masks.append(jnp.tri(T, dtype=bool) if step == 0 else jnp.eye(T, dtype=bool))
        attended = attend(
            made.query, *empty, jnp.zeros(1, jnp.int32), jnp.concatenate(keys, axis=1),
            jnp.concatenate(values, axis=1), jnp.concatenate(masks, axis=1)[None],
        )  # fmt: skip
        hidden = eagle3.finish(config, params, made.residual, attended)
        found.append(np.asarray(eagle3.logits(config, params, hidden))[0])
    return np.stack(found)


@pytest.mark.parametrize("layer", ["llama", "qwen3"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_head_equals_speculators(layer, variant, tmp_path):
    model, ids = theirs(layer, variant)
    model.save_pretrained(tmp_path / "head")
    target, target_params = toy.load("llama")
    embed = jnp.asarray(model.embed_tokens.weight.detach().numpy())
    config, params = load_eagle3(tmp_path / "head", target, dtype="float32", target_embed=target_params.embed)
    assert config.layout == "speculators"
    assert (params.q_norm is not None) == (layer == "qwen3")
    np.testing.assert_array_equal(params.draft_to_target, ids)
    rng = np.random.default_rng(0)
    features = rng.normal(size=(T, 3 * 64)).astype(np.float32)
    tokens = rng.integers(0, 320, T)
    np.testing.assert_allclose(
        our_logits(config, params, embed, features, tokens), their_logits(model, features, tokens), atol=1e-4, rtol=1e-4
    )


def test_a_head_in_a_torch_file(tmp_path):
    """`pytorch_model.bin`, as the first public heads were released."""
    source, folder = toy.FOLDER / "llama-eagle3", tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    torch.save(safetensors.torch.load_file(source / "model.safetensors"), folder / "pytorch_model.bin")
    target = toy.load("llama")[0]
    there, here = load_eagle3(source, target, dtype="float32"), load_eagle3(folder, target, dtype="float32")
    assert there[0] == here[0]
    jax.tree.map(np.testing.assert_array_equal, there[1], here[1])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_features_are_transformers_hidden_states(name):
    """Tap i, the residual stream before layer i, is `hidden_states[i]`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(toy.FOLDER / name, dtype=torch.float32).eval()
    config, params = toy.load(name)
    tokens = np.array(toy.safe_prompts(name, 1)[0][:10], np.int32)
    with torch.inference_mode():
        states = model(torch.tensor(tokens, dtype=torch.long)[None], output_hidden_states=True).hidden_states
    taps = (0, 1, 2, 3)
    n = len(tokens)
    out = transformer.forward(
        config, params, jnp.asarray(tokens)[None], jnp.arange(n)[None], jnp.tri(n, dtype=bool)[None],
        kv.init(config, 1, 16, jnp.float32), jnp.zeros(1, jnp.int32), taps,
    )  # fmt: skip
    for tap, found in zip(taps, out.taps):
        np.testing.assert_allclose(found[0], states[tap][0].numpy(), atol=1e-4, rtol=1e-4)
