"""Whole checkpoints: layouts found in the wild (cases 7 and 9 of the shared list), GGUF, round trips."""

import json
import os

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tiny_checkpoints import (
    NUM_TOKENS,
    SMALL,
    TINY_L,
    TINY_Q,
    named_tensors,
    random_params,
    write_folder,
    write_gguf,
    write_tokenizer,
)

from graft_jax.config import ModelConfig
from graft_jax.io import checkpoint, weights
from graft_jax.io.checkpoint import load_target, open_checkpoint, save_hf
from graft_jax.models import cache, transformer

CONFIGS = {
    "qwen3 tied": TINY_Q,
    "qwen3 untied": TINY_Q | {"tie_word_embeddings": False},
    "llama": TINY_L,
    "llama biased": TINY_L | {"attention_bias": True, "mlp_bias": True},
    "qwen2": SMALL,
    "qwen2 tied": SMALL | {"tie_word_embeddings": True},
}


def equal(first, second) -> None:
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for (path, a), b in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(second)):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8), str(path))


def logits(config: ModelConfig, params, tokens=(5, 6, 7, 8)) -> np.ndarray:
    """[T, V] logits of a prompt of four tokens."""
    T = len(tokens)
    out = transformer.forward(
        config, params, jnp.array([tokens]), jnp.arange(T)[None], jnp.tril(jnp.ones((T, T), bool))[None],
        cache.init(config, 1, 8, params.dtype), jnp.zeros(1, jnp.int32),
    )  # fmt: skip
    return np.asarray(transformer.logits(config, params, out.hidden)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("base", CONFIGS.values(), ids=CONFIGS)
def test_round_trip_bit_for_bit(tmp_path, base, dtype):
    config = ModelConfig.from_hf(base)
    params = random_params(config, dtype)
    save_hf(tmp_path / "a", config, params)
    config_again, again, tokenizer = load_target(tmp_path / "a", dtype=dtype, strict_config=True)
    assert config_again == config and tokenizer is None
    equal(again, params)
    save_hf(tmp_path / "b", config_again, again, shard_bytes=2000)
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    equal(load_target(str(tmp_path / "b"), dtype=dtype)[1], params)
    # The file of one dtype loads as the other one, by rounding or exactly.
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    equal(load_target(tmp_path / "a", dtype=other)[1], convert(config, params, other))


def convert(config, params, dtype):
    """Another dtype and its layout, the plain way."""
    tensors = {name: jnp.asarray(array).astype(dtype) for name, array in named_tensors(config, params).items()}
    arrays = {}
    for slot in weights.slots(config, "hf"):
        arrays[slot.path] = tensors[slot.source].T if slot.linear and dtype == "float32" else tensors[slot.source]
    return weights.assemble(config, arrays)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_stored_in_half_precision(tmp_path, stored):
    config = ModelConfig.from_hf(SMALL)
    tensors = {name: array.astype(stored) for name, array in named_tensors(config, random_params(config)).items()}
    write_folder(tmp_path, SMALL, tensors)
    params = load_target(tmp_path, dtype="float32")[1]
    for name, array in named_tensors(config, params).items():
        np.testing.assert_array_equal(array, tensors[name].astype(np.float32))


@pytest.fixture(scope="module")
def tied():
    config = ModelConfig.from_hf(TINY_Q)
    return config, random_params(config)


@pytest.fixture(scope="module")
def untied():
    config = ModelConfig.from_hf(TINY_Q | {"tie_word_embeddings": False})
    return config, random_params(config)


class TestLayoutsInTheWild:
    """Case 7. That the logits are transformers' own is for the parity tests; here they must agree."""

    def test_one_file_no_index_tied_no_head(self, tmp_path, tied):
        config, params = tied
        found, loaded, _ = load_target(write_folder(tmp_path, TINY_Q, named_tensors(*tied)), dtype="float32")
        assert found == config and loaded.head is None
        equal(loaded, params)

    def test_three_shards_untied(self, tmp_path, untied):
        base = TINY_Q | {"tie_word_embeddings": False}
        found, loaded, _ = load_target(write_folder(tmp_path, base, named_tensors(*untied), 3), dtype="float32")
        assert found == untied[0]
        equal(loaded, untied[1])

    def test_redundant_equal_head(self, tmp_path, tied):
        tensors = named_tensors(*tied)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        found, loaded, _ = load_target(write_folder(tmp_path, TINY_Q, tensors), dtype="float32")
        assert found.tie_embeddings
        equal(loaded, tied[1])

    def test_different_head_is_used_with_a_warning(self, tmp_path, tied, untied):
        tensors = named_tensors(*tied) | {"lm_head.weight": named_tensors(*untied)["lm_head.weight"]}
        with pytest.warns(UserWarning, match="tie_word_embeddings, but lm_head.weight differs"):
            found, loaded, _ = load_target(write_folder(tmp_path, TINY_Q, tensors), dtype="float32")
        assert not found.tie_embeddings
        equal(loaded, tied[1].replace(head=untied[1].head))

    def test_missing_head(self, tmp_path, tied):
        base = TINY_Q | {"tie_word_embeddings": False}
        write_folder(tmp_path, base, named_tensors(*tied))
        with pytest.raises(ValueError, match="lm_head.weight; it is needed unless tie_word_embeddings"):
            load_target(tmp_path, dtype="float32")

    def test_head_dim_deleted(self, tmp_path, tied):
        base = {key: value for key, value in TINY_Q.items() if key != "head_dim"}
        write_folder(tmp_path, base, named_tensors(*tied))
        with pytest.raises(ValueError, match=r"q_proj.weight has shape \[128, 64\].*needs \[512, 64\].*head_dim 128"):
            load_target(tmp_path, dtype="float32")

    def test_no_tokenizer(self, tmp_path, tied):
        config, params, tokenizer = load_target(write_folder(tmp_path, TINY_Q, named_tensors(*tied)), dtype="float32")
        assert tokenizer is None and config.num_tokens == 320
        equal(params, tied[1])

    def test_old_rotary_buffers_are_passed_over(self, tmp_path, tied):
        tensors = named_tensors(*tied)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
        equal(load_target(write_folder(tmp_path, TINY_Q, tensors), dtype="float32")[1], tied[1])

    def test_leftovers_are_listed(self, tmp_path, tied):
        tensors = named_tensors(*tied) | {"model.layers.0.self_attn.q_proj.bias": np.ones(128, np.float32),
                                          "zap": np.ones(1, np.float32)}  # fmt: skip
        write_folder(tmp_path, TINY_Q, tensors)
        with pytest.raises(ValueError, match="no place for: model.layers.0.self_attn.q_proj.bias, zap$"):
            load_target(tmp_path, dtype="float32")

    def test_stop_ids_of_generation_config(self, tmp_path, tied):
        write_folder(tmp_path, TINY_Q, named_tensors(*tied))
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9], "temperature": 0.6}')
        assert open_checkpoint(tmp_path).config.eos_token_ids == (1, 2, 9)


def test_padding_rows_are_never_emitted(tmp_path):
    """Case 9: rows 300..319 of the embedding belong to no token, and one of them would win."""
    base = TINY_Q | {"num_hidden_layers": 2}  # each layer costs compiling time
    config = ModelConfig.from_hf(base)
    tensors = named_tensors(config, random_params(config))
    tensors["model.embed_tokens.weight"][300:] *= 50
    write_folder(tmp_path, base, tensors)
    unlimited, params, _ = load_target(tmp_path, dtype="float32")
    assert (logits(unlimited, params).argmax(-1) >= NUM_TOKENS).any()
    write_tokenizer(tmp_path)
    known, params, tokenizer = load_target(tmp_path, dtype="float32")
    assert known.num_tokens == NUM_TOKENS == tokenizer.num_tokens
    masked = logits(known, params)
    assert (masked.argmax(-1) < NUM_TOKENS).all() and np.isneginf(masked[:, NUM_TOKENS:]).all()
    np.testing.assert_array_equal(masked[:, :NUM_TOKENS], logits(unlimited, params)[:, :NUM_TOKENS])
    # An id in the padding, as a MASK token may be, still has its embedding row.
    assert np.isfinite(logits(known, params, (5, 300, 319, 7))[:, :NUM_TOKENS]).all()


def test_tokenizer_with_more_ids_than_the_embedding_warns(tmp_path):
    config = ModelConfig.from_hf(TINY_Q)
    write_folder(tmp_path, TINY_Q, named_tensors(config, random_params(config)))
    write_tokenizer(tmp_path, size=330)
    with pytest.warns(UserWarning, match="ids up to 329, but the embedding only 320 rows"):
        assert open_checkpoint(tmp_path).config.num_tokens == 320


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("base", [TINY_L, TINY_L | {"attention_bias": True}, TINY_Q,
    SMALL | {"hidden_size": 32}],
                         ids=["llama", "llama biased", "qwen3 tied", "qwen2"])  # fmt: skip
def test_gguf(tmp_path, base, kind):
    """Names, layout and, for llama, the order of query and key rows."""
    base = {key: value for key, value in base.items() if key != "rope_scaling"} | {
        "eos_token_id": 2,
        "intermediate_size": 64,
    }
    config = ModelConfig.from_hf(base)
    expected = write_gguf(tmp_path / "x.gguf", config, random_params(config), gguf.GGMLQuantizationType[kind])
    found, params, tokenizer = load_target(tmp_path / "x.gguf", dtype="float32")
    assert tokenizer is None and found.tie_embeddings == config.tie_embeddings
    loaded = named_tensors(found, params)
    assert set(loaded) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(loaded[name], array, name)


@pytest.mark.heavy
def test_gguf_to_safetensors_and_back(tmp_path):
    config, params, tokenizer = load_target("smollm2-135m", dtype="bfloat16")
    assert (config.model_type, config.num_layers, config.hidden_size) == ("llama", 30, 576)
    assert config.tie_embeddings and config.num_tokens == config.vocab_size == 49152 and 2 in config.eos_token_ids
    save_hf(tmp_path / "x", config, params, tokenizer)
    again = load_target(tmp_path / "x", dtype="bfloat16", strict_config=True)
    assert again[0] == config
    equal(again[1], params)
    text = "Why is the sky blue? 1234 🙂 \n\n  def f(x):"
    assert again[2].encode(text) == tokenizer.encode(text) and again[2].stop_ids == tokenizer.stop_ids
    messages = [{"role": "user", "content": text}]
    assert again[2].apply_chat_template(messages) == tokenizer.apply_chat_template(messages)


def test_ledger(tmp_path):
    config = ModelConfig.from_hf(SMALL)
    write_folder(tmp_path, SMALL, named_tensors(config, random_params(config)))
    rows = open_checkpoint(tmp_path).ledger()
    assert ("model.layers.0.mlp.up_proj.weight", "F32", (24, 16), "layers.0.up") in rows
    assert len(rows) == len({row[3] for row in rows}) == len(named_tensors(config, random_params(config)))


def test_sharding(tmp_path):
    config = ModelConfig.from_hf(SMALL)
    params = random_params(config)
    write_folder(tmp_path, SMALL, named_tensors(config, params))
    device = jax.devices()[-1]
    one = jax.sharding.SingleDeviceSharding(device)
    equal(load_target(tmp_path, dtype="float32", sharding=one)[1], params)
    loaded = load_target(tmp_path, dtype="float32", sharding=jax.tree.map(lambda _: one, params))[1]
    equal(loaded, params)
    assert all(leaf.sharding == one for leaf in jax.tree.leaves(loaded))


@pytest.mark.parametrize("dtype", ["float16", "int8", "float64", "nonsense", None])
def test_other_dtypes_are_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match="dtype=.*use 'float32' or 'bfloat16'"):
        load_target(tmp_path, dtype=dtype)


class TestSaving:
    config = ModelConfig.from_hf(SMALL)

    def test_nothing_half_written(self, tmp_path, monkeypatch):
        def broken(*args):
            raise OSError("disk full")

        monkeypatch.setattr(checkpoint.safetensors, "write_folder", broken)
        with pytest.raises(OSError, match="disk full"):
            save_hf(tmp_path / "x", self.config, random_params(self.config))
        assert os.listdir(tmp_path) == []

    def test_refuses_a_full_folder(self, tmp_path):
        (tmp_path / "kept").write_text("")
        with pytest.raises(ValueError, match="exists already and is not an empty folder"):
            save_hf(tmp_path, self.config, random_params(self.config))
        assert os.listdir(tmp_path) == ["kept"]

    def test_takes_an_empty_folder(self, tmp_path):
        save_hf(tmp_path, self.config, random_params(self.config))
        assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
        assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]

    def test_file_names_and_layout_are_those_of_hugging_face(self, tmp_path):
        params = random_params(self.config)
        save_hf(tmp_path / "x", self.config, params)
        found = safetensors.numpy.load_file(tmp_path / "x" / "model.safetensors")
        assert found["model.layers.0.self_attn.k_proj.weight"].shape == (8, 16)  # (out, in), as torch
        np.testing.assert_array_equal(found["model.layers.0.mlp.down_proj.weight"], np.asarray(params.layers[0].down).T)
        assert found["model.layers.0.self_attn.q_proj.bias"].shape == (16,)
