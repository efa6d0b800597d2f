"""Configurations: read, refused, written back; rope frequencies (case 6 of the shared list)."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import SMALL, TINY_L, TINY_Q

from graft_jax.config import FAMILIES, ModelConfig, RopeConfig
from graft_jax.models import rope
from graft_jax.models.transformer import abstract_params

CONFIGS = Path(__file__).parent.parent / "configs"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def read(base=TINY_Q, **changes) -> ModelConfig:
    """`base` with changed keys; ... takes a key out."""
    return ModelConfig.from_hf({key: value for key, value in (base | changes).items() if value is not ...})


def frequencies(**changes) -> tuple[np.ndarray, float]:
    config = read(**changes)
    return rope.inverse_frequencies(config.rope, config.head_dim)


class TestRope:
    """The numbers come from the formulas and were checked against transformers."""

    expected = {0: 1, 4: 0.0316227766, 8: 5.5e-4, 12: 7.90569415e-6, 15: 5.92843426e-7}

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_scaling": YARN},
            {"rope_scaling": {("type" if key == "rope_type" else key): v for key, v in YARN.items()}},
            {"rope_theta": ..., "rope_parameters": YARN | {"rope_theta": 1e6}},
            {"rope_parameters": YARN},
            {"rope_scaling": None, "rope_parameters": YARN},
        ],
        ids=["rope_scaling", "type", "rope_parameters", "theta outside", "null scaling"],
    )
    def test_yarn(self, changes):
        found, scale = frequencies(**changes)
        assert scale == pytest.approx(1.1386294361, rel=1e-9)
        np.testing.assert_allclose(found[list(self.expected)], list(self.expected.values()), rtol=1e-6)

    def test_yarn_with_attention_factor(self):
        found, scale = frequencies(rope_scaling=YARN | {"attention_factor": 1.0})
        assert scale == 1.0
        np.testing.assert_allclose(found[list(self.expected)], list(self.expected.values()), rtol=1e-6)

    def test_llama3(self):
        config = ModelConfig.from_hf(TINY_L)
        assert config.head_dim == 16
        found, scale = rope.inverse_frequencies(config.rope, config.head_dim)
        expected = [
            1,
            0.244384599,
            0.013042256,
            0.00395284708,
            0.00125,
            3.95284708e-4,
            1.25e-4,
            3.95284708e-5,
        ]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert scale == 1.0

    def test_linear(self):
        found, scale = frequencies(rope_scaling={"type": "linear", "factor": 2.0})
        plain, _ = frequencies()
        np.testing.assert_allclose(found, plain / 2, rtol=1e-6)
        assert scale == 1.0

    @pytest.mark.parametrize(
        "scaling, words",
        [
            ({"rope_type": "foo", "factor": 2.0}, ["rope_scaling", "rope_type", "'foo'"]),
            ({"type": "dynamic", "factor": 2.0}, ["'dynamic'"]),
            ({"rope_type": "longrope", "factor": 2.0}, ["'longrope'"]),
            ({"rope_type": "linear"}, ["'linear'", "factor"]),
            ({"rope_type": "linear", "factor": 0}, ["factor=0.0"]),
            ({"rope_type": "linear", "factor": "2"}, ["factor='2'"]),
            ({"rope_type": "linear", "factor": 10**400}, ["factor", "finite"]),
            ({"rope_type": "linear", "factor": 2.0, "magic": 3}, ["magic"]),
            ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1}, ["'llama3'", "high_freq_factor"]),
            ({**TINY_L["rope_scaling"], "high_freq_factor": 1.0}, ["high_freq_factor", "low_freq_factor"]),
            (YARN | {"beta_slow": 0}, ["beta_slow"]),
            (YARN | {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
            ({"mrope_section": [1, 2]}, ["mrope_section"]),
            ([], ["rope_scaling=[]"]),
            (YARN | {"rope_theta": 5e5}, ["rope_theta", "500000.0", "1000000.0"]),
        ],
        ids=lambda value: str(value)[:50],
    )
    def test_refused(self, scaling, words):
        with pytest.raises(ValueError) as error:
            read(rope_scaling=scaling)
        for word in ["config.json", *words]:
            assert word in str(error.value)

    def test_two_places_that_differ(self):
        with pytest.raises(ValueError, match="rope_scaling=.*rope_parameters=.*differ"):
            read(rope_scaling=YARN, rope_parameters=YARN | {"factor": 2.0})


REFUSED = [
    ({"model_type": "gemma"}, "model_type 'gemma'"),
    ({"model_type": ...}, "'model_type' is missing"),
    ({"hidden_size": ...}, "'hidden_size' is missing"),
    ({"vocab_size": None}, "vocab_size=None"),
    ({"vocab_size": "320"}, "vocab_size='320'"),
    ({"vocab_size": True}, "vocab_size=True"),
    ({"vocab_size": 0}, "vocab_size=0"),
    ({"hidden_size": 64.0}, "hidden_size=64.0"),
    ({"num_hidden_layers": -1}, "num_layers=-1"),
    ({"num_attention_heads": 0}, "num_heads=0"),
    ({"num_key_value_heads": 3}, "num_heads=4 must be divisible by num_kv_heads=3"),
    ({"head_dim": 15}, "head_dim=15 must be even"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"use_sliding_window": True, "sliding_window": 128}, "sliding_window=128"),
    ({"model_type": "llama", "sliding_window": 4096}, "sliding_window=4096"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ({"pretraining_tp": 2}, "pretraining_tp=2"),
    ({"num_experts": 8}, "num_experts=8"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rms_norm_eps": -1}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ({"rope_theta": 0}, "rope_theta=0"),
    ({"rope_theta": 1e400}, "rope_theta=inf"),
    ({"eos_token_id": 320}, "eos_token_id 320"),
    ({"eos_token_id": [1, -1]}, "eos_token_id -1"),
    ({"eos_token_id": [1, "2"]}, "eos_token_id"),
    ({"eos_token_id": "2"}, "eos_token_id='2'"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[str(change) for change, _ in REFUSED])
def test_refused(changes, message):
    with pytest.raises(ValueError) as error:
        read(**changes)
    assert message in str(error.value) and "config.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_keys_warn_or_are_refused():
    with pytest.warns(UserWarning, match="config.json: unknown keys \\['flux', 'zap'\\]"):
        read(zap=1, flux=2)
    with pytest.raises(ValueError, match="unknown keys \\['zap'\\]"):
        ModelConfig.from_hf(TINY_Q | {"zap": 1}, strict=True)


def test_inert_keys_pass():
    ModelConfig.from_hf(
        TINY_Q
        | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
            "torch_dtype": "bfloat16",
           "transformers_version": "4.51.0", "initializer_range": 0.02, "attention_dropout": 0.0,
           "layer_types": ["full_attention"] * 8},
        strict=True,
    )  # fmt: skip


def test_defaults_by_family():
    assert read(head_dim=...).head_dim == 128  # qwen3's own default, whatever width / heads says
    assert read(TINY_L).head_dim == 16
    assert read(TINY_L, num_key_value_heads=...).num_kv_heads == 4
    qwen2 = read(SMALL)
    assert qwen2.qkv_bias and not qwen2.o_bias and not qwen2.qk_norm and not qwen2.mlp_bias
    biased = read(TINY_L, attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias and biased.o_bias and biased.mlp_bias
    assert read().qk_norm and read().eos_token_ids == (1, 2) and read().num_tokens == 320
    assert read(eos_token_id=7).eos_token_ids == (7,) and read(eos_token_id=None).eos_token_ids == ()


@st.composite
def model_configs(draw) -> ModelConfig:
    family = draw(st.sampled_from(FAMILIES))
    kv_heads = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    scaling = {} if kind == "default" else {"factor": draw(st.sampled_from([2.0, 8.0, 32.5]))}
    if kind in ("llama3", "yarn"):
        scaling["original_max_position"] = draw(st.integers(1, 10**6))
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.5, "high_freq_factor": draw(st.sampled_from([2.0, 4.0]))}
    if kind == "yarn":
        scaling |= draw(st.sampled_from([{}, {"attention_factor": 1.25}, {"mscale": 1.0, "mscale_all_dim": 0.5}]))
        scaling["truncate"] = draw(st.booleans())
    bias = family == "qwen2" or draw(st.booleans())
    return ModelConfig(
        model_type=family, vocab_size=draw(st.integers(10, 200_000)), hidden_size=draw(st.integers(1, 9000)),
        intermediate_size=draw(st.integers(1, 30_000)), num_layers=draw(st.integers(1, 99)),
        num_heads=kv_heads * draw(st.integers(1, 8)), num_kv_heads=kv_heads,
            head_dim=2 * draw(st.integers(1, 128)),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])), max_position=draw(st.integers(1, 10**6)),
        rope=RopeConfig(kind=kind, theta=draw(st.sampled_from([1e4, 5e5, 1e6])), **scaling),
        tie_embeddings=draw(st.booleans()), qk_norm=family == "qwen3", qkv_bias=bias,
        o_bias=bias and family != "qwen2", mlp_bias=family == "llama" and draw(st.booleans()),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 9), unique=True, max_size=3))),
    )  # fmt: skip


@given(model_configs())
@settings(max_examples=100, deadline=None)
def test_round_trip(config):
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written, strict=True) == config


MODELS = sorted((CONFIGS / "models").glob("*.json"))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_published_models(path):
    """Every listed model is read strictly, and its parameters can be laid out without weights."""
    config = ModelConfig.from_hf(json.loads(path.read_text()), strict=True, where=path.name)
    billions = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config, "bfloat16"))) / 1e9
    # The size stands in the name; Qwen3-1.7B counts no embedding twice, hence the tolerance.
    named = float(path.stem.rpartition("-")[2].removesuffix("b"))
    assert billions == pytest.approx(named, rel=0.08)


def test_all_models_are_there():
    names = {path.stem for path in MODELS}
    assert names == {"vicuna-13b", "llama-3.1-8b", "llama-3.3-70b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b",
                     "qwen3-14b", "qwen3-32b"}  # fmt: skip


DRAFTERS = sorted((CONFIGS / "drafters").glob("*.json"))


@pytest.mark.parametrize("path", DRAFTERS, ids=lambda path: path.stem)
def test_published_drafters(path):
    """A drafter shares width and vocabulary with the target that its file is named after."""
    kind, _, target = path.stem.partition("-")
    config, target = (
        json.loads(path.read_text()),
        json.loads((CONFIGS / "models" / f"{target}.json").read_text()),
    )
    for key in ("hidden_size", "vocab_size", "intermediate_size"):
        assert config[key] == target[key]
    if kind == "eagle3":
        assert config["num_hidden_layers"] == 1 and config["draft_vocab_size"] == 32000
    else:
        assert config["num_target_layers"] == target["num_hidden_layers"] and config["block_size"] == 16
        taps = config["dflash_config"]["target_layer_ids"]
        assert len(taps) == config["num_hidden_layers"] and max(taps) < target["num_hidden_layers"]
        assert ("gru_hidden_dim" in config["dflash_config"]) == (kind == "domino")


def test_all_drafters_are_there():
    names = {path.stem for path in DRAFTERS}
    assert names == {f"eagle3-{path.stem}" for path in MODELS} | {
        f"{kind}-qwen3-{size}" for kind in ("dflash", "domino") for size in ("4b", "8b")
    }
