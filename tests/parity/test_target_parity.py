"""The target model against transformers on torch: tiny random models of every kind, and SmolLM2."""

import copy
import importlib
import itertools
import json

import jax
import numpy as np
import pytest
import target_run
from tiny_checkpoints import TINY_L, TINY_Q, named_tensors, random_params, write_folder

from graft_jax.config import ModelConfig
from graft_jax.io import hub
from graft_jax.io.checkpoint import load_target, save_hf
from graft_jax.models import rope

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import torch_run  # noqa: E402  (needs torch)

pytestmark = pytest.mark.parity
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}

# The prompt of 40 tokens runs over every original context.
ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn with factors": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                          "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2,
                          "truncate": False},
}  # fmt: skip
# tied, head_dim unlike width / heads, biases where the family leaves the choice
SHAPES = [(True, False, False), (False, True, True), (True, True, True), (False, False, False)]


def hf_config(family: str, kind: str, tied: bool, unequal: bool, biased: bool) -> dict:
    base = {
        "model_type": family, "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "head_dim": 20 if unequal else 12, "max_position_embeddings": 64, "tie_word_embeddings": tied,
        "rope_theta": 1e4, "rope_scaling": copy.copy(ROPES[kind]), "eos_token_id": 2, "bos_token_id": 1,
    }  # fmt: skip
    if family != "qwen2":
        base["attention_bias"] = biased
    if family == "llama":
        base["mlp_bias"] = biased
    return base


def build(config: dict):
    settings = {key: value for key, value in config.items() if key != "model_type" and value is not None}
    made = transformers.AutoConfig.for_model(config["model_type"], **settings)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    torch_run.randomize(model)
    return model


def compare(model, config: ModelConfig, params) -> None:
    prompt, tree = target_run.sample_tokens(config.vocab_size)
    expected, expected_taps = torch_run.run(model, config, prompt, tree)
    found, found_taps = target_run.run(config, params, prompt, tree)
    # The residual stream grows with depth: its numbers are compared relative to the largest of their tap.
    scale = np.maximum(1, np.abs(expected_taps).max(axis=(1, 2), keepdims=True))
    np.testing.assert_allclose(found_taps / scale, expected_taps / scale, **TOLERANCE)
    np.testing.assert_allclose(found, expected, **TOLERANCE)


CASES = list(itertools.product(("llama", "qwen2", "qwen3"), ROPES, SHAPES))


@pytest.mark.parametrize("family, kind, shape", CASES, ids=[f"{f}-{k}-{i % 4}" for i, (f, k, _) in enumerate(CASES)])
def test_tiny_models(tmp_path, family, kind, shape):
    """transformers writes, we load: logits and taps of prefill and tree pass agree."""
    model = build(hf_config(family, kind, *shape))
    model.save_pretrained(tmp_path)
    config, params, _ = load_target(tmp_path, dtype="float32")
    assert config.rope.kind == kind.split()[0] and config.tie_embeddings == shape[0]
    compare(model, config, params)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_we_write_transformers_reads(tmp_path, family):
    config = ModelConfig.from_hf(hf_config(family, "yarn", False, family != "qwen2", True))
    params = random_params(config)
    save_hf(tmp_path / "x", config, params, shard_bytes=20_000)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x", attn_implementation="eager").eval()
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), named_tensors(config, params)[name])
    compare(model, config, params)


def tiny(tied: bool) -> tuple[dict, dict[str, np.ndarray]]:
    config = TINY_Q | {"tie_word_embeddings": tied}
    parsed = ModelConfig.from_hf(config)
    return config, named_tensors(parsed, random_params(parsed))


def layouts():
    config, tensors = tiny(tied=True)
    yield "one file", config, tensors, 1
    redundant = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    yield "redundant head", config, redundant, 1
    _, untied = tiny(tied=False)
    yield "different head", config, tensors | {"lm_head.weight": untied["lm_head.weight"]}, 1
    config, tensors = tiny(tied=False)
    yield "three shards", config, tensors, 3
    parsed = ModelConfig.from_hf(TINY_L)
    yield "llama", TINY_L, named_tensors(parsed, random_params(parsed)), 1


@pytest.mark.filterwarnings("ignore:.*lm_head.weight differs")
@pytest.mark.parametrize(
    "config, tensors, shards", [case[1:] for case in layouts()], ids=[case[0] for case in layouts()]
)
def test_layouts(tmp_path, config, tensors, shards):
    """What transformers makes of a folder, we make of it too."""
    write_folder(tmp_path, config, tensors)
    for file in tmp_path.glob("*.safetensors"):  # transformers wants to know the framework
        import safetensors.numpy

        safetensors.numpy.save_file(safetensors.numpy.load_file(file), file, metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    parsed, params, _ = load_target(tmp_path, dtype="float32")
    compare(model, parsed, params)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_files(tmp_path, dtype, sharded):
    config = hf_config("llama", "default", False, False, False)
    model = build(config).to(getattr(torch, dtype))
    state = model.state_dict()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)  # as old checkpoints have it
    if sharded:
        names = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(state)}
        for file in set(names.values()):
            torch.save({name: state[name] for name in state if names[name] == file}, tmp_path / file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(config))
    parsed, params, _ = load_target(tmp_path, dtype=dtype)
    for name, array in named_tensors(parsed, params).items():
        np.testing.assert_array_equal(np.asarray(array, np.float32), state[name].float().numpy(), name)


def test_broken_torch_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config("llama", "default", False, False, False)))
    file = tmp_path / "pytorch_model.bin"

    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    broken = [b"", b"garbage", None, {"a": 3}, [1], {"a": torch.ones(2, dtype=torch.int64)}, Evil()]
    for content in broken:
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif content is None:
            torch.save({"a": torch.ones(1000)}, file)
            file.write_bytes(file.read_bytes()[:1500])
        else:
            torch.save(content, file)
        with pytest.raises(ValueError, match="pytorch_model.bin") as error:
            load_target(tmp_path, dtype="float32")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("head_dim, theta", [(64, 1e6), (128, 5e5), (32, 1e4)])
def test_rope_frequencies(kind, head_dim, theta):
    settings = hf_config("qwen3", kind, True, False, False) | {"head_dim": head_dim, "rope_theta": theta}
    made = transformers.AutoConfig.for_model(**{key: value for key, value in settings.items() if value is not None})
    model = transformers.AutoModelForCausalLM.from_config(made)
    frequencies, scale = rope.inverse_frequencies(ModelConfig.from_hf(settings).rope, head_dim)
    np.testing.assert_allclose(frequencies, model.model.rotary_emb.inv_freq.numpy(), rtol=1e-5)
    assert scale == pytest.approx(model.model.rotary_emb.attention_scaling, rel=1e-6)


def test_smollm2():
    """The GGUF file through transformers' own GGUF loader."""
    path = hub.resolve("smollm2-135m")
    config, params, tokenizer = load_target("smollm2-135m", dtype="float32")
    made = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    gguf = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    state = gguf.load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(state, strict=False)
    for name, array in named_tensors(config, params).items():
        np.testing.assert_array_equal(array, state[name].numpy(), name)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Name three colours of the rainbow, please."}])
    prompt, tree = np.array((ids * 2)[: target_run.PROMPT]), np.arange(target_run.NODES) * 1000
    expected, expected_taps = torch_run.run(model, config, prompt, tree)
    found, found_taps = target_run.run(config, params, prompt, tree)
    scale = np.abs(expected_taps).max(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(found_taps / scale, expected_taps / scale, atol=1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    assert (found.argmax(-1) == expected.argmax(-1)).all()
    jax.clear_caches()
