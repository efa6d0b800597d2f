"""Broken checkpoints: a mutation of a good one ends in one line that names the file and the tensor or key.

A mutation takes the folder, breaks one thing, and lists words that the message must hold.
"""

import json
import re
import shutil
import struct
import warnings

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import (
    SMALL,
    byte_tokenizer,
    named_tensors,
    random_params,
    write_folder,
    write_gguf,
    write_tokenizer,
)

from graft_jax.config import ModelConfig
from graft_jax.io.checkpoint import load_target

CONFIG = ModelConfig.from_hf(SMALL)
TENSORS = named_tensors(CONFIG, random_params(CONFIG))
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def failure(path) -> str:
    """The message of the ValueError that loading ends in; anything else fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError) as error:
            load_target(path, dtype="float32")
    message = str(error.value)
    assert "\n" not in message and len(message) < 2000, message
    return message


# Changes of config.json: (key, value or ... to delete it, further words of the message).
NUMBERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "num_key_value_heads",
)  # fmt: skip
CONFIG_CHANGES = [
    *((key, bad) for key in NUMBERS for bad in ("16", 16.0, True, -1, [16], {})),
    *((key, ...) for key in ("model_type", *NUMBERS[:5])),
    ("model_type", "mamba"), ("model_type", 3), ("hidden_act", "relu"), ("tie_word_embeddings", "yes"),
    ("head_dim", "8"), ("head_dim", 7), ("head_dim", -8),
    ("rms_norm_eps", "small"), ("rms_norm_eps", -1e-6), ("rms_norm_eps", 10**400),
    ("rope_theta", "1e4"), ("rope_theta", -1.0), ("rope_scaling", 2), ("rope_scaling", "yarn"),
    ("rope_scaling", {"rope_type": "foo"}), ("rope_scaling", {"rope_type": "dynamic", "factor": 2}),
    ("rope_scaling", {"type": "linear"}), ("rope_scaling", {"type": "yarn", "factor": "4"}),
    ("rope_parameters", {"rope_type": "su", "factor": 2}),
    ("eos_token_id", "</s>"), ("eos_token_id", 48), ("eos_token_id", [2, None]),
    ("sliding_window", "wide"), ("layer_types", ["linear_attention"]), ("quantization_config", {"bits": 4}),
]  # fmt: skip


@pytest.mark.parametrize("key, value", CONFIG_CHANGES, ids=str)
def test_config(tmp_path, key, value):
    write_folder(tmp_path, {k: v for k, v in (SMALL | {key: value}).items() if v is not ...}, TENSORS)
    message = failure(tmp_path)
    assert "config.json" in message
    ours = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
            "num_key_value_heads": "num_kv_heads", "max_position_embeddings": "max_position",
            "layer_types": "sliding_window"}  # fmt: skip
    assert key in message or ours.get(key, key) in message, message


# Sizes that are well-formed but not those of the weights: the tensor is named, nothing is reshaped.
SIZES = [
    ("vocab_size", 49, "model.embed_tokens.weight"), ("hidden_size", 20, "model.embed_tokens.weight"),
    ("intermediate_size", 25, "mlp.gate_proj.weight"), ("num_attention_heads", 4, "k_proj.weight"),
    ("num_key_value_heads", 2, "k_proj.weight"), ("head_dim", 4, "q_proj.weight"),
    ("num_hidden_layers", 2, "model.layers.1."), ("num_hidden_layers", 10**9, "layers"),
    ("tie_word_embeddings", True, None), ("model_type", "llama", "q_proj.bias"),
    ("model_type", "qwen3", "q_norm.weight"),
]  # fmt: skip


@pytest.mark.parametrize("key, value, tensor", SIZES, ids=str)
def test_sizes(tmp_path, key, value, tensor):
    write_folder(tmp_path, SMALL | {key: value} | ({"head_dim": 8} if key == "model_type" else {}), TENSORS)
    if tensor is None:  # a head that differs from the embedding is taken, with a warning
        with pytest.warns(UserWarning, match="lm_head.weight differs"):
            load_target(tmp_path, dtype="float32")
        return
    assert tensor in failure(tmp_path)


def off_by_one(array: np.ndarray) -> np.ndarray:
    return np.zeros((array.shape[0] + 1, *array.shape[1:]), array.dtype)


def flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(1, -1)


def spoiled(value: float):
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.flat[array.size // 2] = value
        return array

    return change


CHANGES = {
    "off by one": off_by_one, "flat": flat, "nan": spoiled(np.nan), "infinity": spoiled(-np.inf),
    "int32": lambda x: x.astype(np.int32), "float64": lambda x: x.astype(np.float64), "gone": None,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", TENSORS)
def test_tensor(tmp_path, name, change):
    tensors = dict(TENSORS)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    write_folder(tmp_path, SMALL, tensors)
    message = failure(tmp_path)
    assert name in message and str(tmp_path) in message, message


@pytest.mark.parametrize("name", list(TENSORS)[:6])
def test_renamed_tensor(tmp_path, name):
    tensors = {(key + "_old" if key == name else key): array for key, array in TENSORS.items()}
    write_folder(tmp_path, SMALL, tensors)
    assert name in failure(tmp_path)


def header_of(path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path, header: dict | bytes, rest: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + rest)


HEADERS = {
    "length 0": lambda path, header, rest: write_header(path, header, rest, 0),
    "length one less": lambda path, header, rest: write_header(path, header, rest, len(json.dumps(header)) - 1),
    "length huge": lambda path, header, rest: write_header(path, header, rest, 2**63),
    "length beyond": lambda path, header, rest: write_header(path, header, rest, 10**6),
    "no json": lambda path, header, rest: write_header(path, b"pickle!", rest),
    "not utf-8": lambda path, header, rest: write_header(path, b"\xff\xfe{}", rest),
    "deep": lambda path, header, rest: write_header(path, b"[" * 100_000, rest),
    "list": lambda path, header, rest: write_header(path, b"[1, 2]", rest),
    "empty": lambda path, header, rest: path.write_bytes(b""),
    "html": lambda path, header, rest: path.write_bytes(b"<!DOCTYPE html><html>not found</html>"),
    "lfs pointer": lambda path, header, rest: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_safetensors_header(tmp_path, change):
    path = write_folder(tmp_path, SMALL, TENSORS) / FILE
    change(path, *header_of(path))
    assert str(path) in failure(tmp_path)


ENTRIES = [
    3, [], {"dtype": "F32"}, {"dtype": "F8_E4M3"}, {"dtype": None}, {"shape": "48x16"}, {"shape": [48, -16]},
    {"shape": [48, 16.0]}, {"shape": [48, 17]}, {"shape": [True, 768]}, {"data_offsets": [0]},
    {"data_offsets": [0, -4]}, {"data_offsets": ["0", "4"]}, {"data_offsets": [10**12, 10**12 + 3072]},
    {"data_offsets": [4, 0]}, {"dtype": "BF16"},
]  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_safetensors_entry(tmp_path, entry):
    path, name = write_folder(tmp_path, SMALL, TENSORS) / FILE, "model.embed_tokens.weight"
    header, rest = header_of(path)
    if entry == {"dtype": "F32"}:
        entry = {"dtype": "F32", "shape": None}
    header[name] = header[name] | entry if isinstance(entry, dict) else entry
    write_header(path, header, rest)
    message = failure(tmp_path)
    assert name in message and str(path) in message, message


def test_safetensors_overlap(tmp_path):
    path = write_folder(tmp_path, SMALL, TENSORS) / FILE
    header, rest = header_of(path)
    header["lm_head.weight"]["data_offsets"] = header["model.embed_tokens.weight"]["data_offsets"]
    write_header(path, header, rest)
    assert "lm_head.weight" in (message := failure(tmp_path)) and "overlap" in message


@pytest.mark.parametrize("part", range(20))
def test_safetensors_cut_off(tmp_path, part):
    path = write_folder(tmp_path, SMALL, TENSORS) / FILE
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * part // 20])
    assert str(path) in failure(tmp_path)


def change_index(change):
    def apply(folder):
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return apply


def place(tensor: str, file):
    return change_index(lambda index: index["weight_map"].update({tensor: file}))


SHARD = "model-0000{}-of-00003.safetensors"


INDICES = {
    "missing shard": (lambda folder: (folder / SHARD.format(2)).unlink(), [INDEX, SHARD.format(2)]),
    "names a missing file": (
        place("lm_head.weight", "x.safetensors"),
        [INDEX, "x.safetensors", "lm_head.weight"],
    ),
    "wrong shard": (place("lm_head.weight", SHARD.format(2)), [SHARD.format(2), "lm_head.weight"]),
    "not listed": (change_index(lambda i: i["weight_map"].pop("lm_head.weight")), [INDEX, "lm_head.weight"]),
    "extra tensor": (place("zap", SHARD.format(1)), ["zap", SHARD.format(1)]),
    "no map": (change_index(lambda i: i.pop("weight_map")), [INDEX, "weight_map"]),
    "map is a list": (change_index(lambda i: i.update(weight_map=[])), [INDEX, "weight_map"]),
    "file is a number": (place("lm_head.weight", 3), [INDEX, "lm_head.weight", "3"]),
    "outside the folder": (place("lm_head.weight", "../x.safetensors"), [INDEX, "lm_head.weight", "../x"]),
    "no json": (lambda folder: (folder / INDEX).write_text("{"), [INDEX, "JSON"]),
    "a shard cut off": (
        lambda folder: (folder / SHARD.format(1)).write_bytes(b"12345678"),
        [SHARD.format(1)],
    ),
    "no weights": (lambda folder: (folder / INDEX).unlink(), ["model.safetensors"]),
}


@pytest.mark.parametrize("change, words", INDICES.values(), ids=INDICES)
def test_index(tmp_path, change, words):
    change(write_folder(tmp_path, SMALL, TENSORS, shards=3))
    message = failure(tmp_path)
    assert all(word in message for word in words), message


TEXTS = {
    "config.json": ["", "{", "[]", "null", '{"model_type": "qwen2",}', "\udcff"],
    "generation_config.json": [
        "",
        "[]",
        '{"eos_token_id": "x"}',
        '{"eos_token_id": [true]}',
        '{"eos_token_id": -2}',
    ],
    "tokenizer.json": [
        "",
        "{}",
        "[]",
        '{"model": {"type": "BPE"}}',
        '{"version": "1.0", "model": {"type": "Zap"}}',
    ],
    "tokenizer_config.json": ["", "[]", "{,}", '{"chat_template": 3}', '{"chat_template": {"default": "x"}}'],
    "chat_template.jinja": ["\udcff"],
}


@pytest.mark.parametrize("file, text", [(file, text) for file, texts in TEXTS.items() for text in texts], ids=repr)
def test_json_files(tmp_path, file, text):
    write_folder(tmp_path, SMALL, TENSORS)
    byte_tokenizer(300).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_bytes(text.encode(errors="surrogateescape"))
    message = failure(tmp_path)
    assert file in message or (file, text) == ("generation_config.json", '{"eos_token_id": -2}'), message


def test_empty_folder_and_other_files(tmp_path):
    assert "config.json" in failure(tmp_path)
    (tmp_path / "x.txt").write_text("")
    assert "x.txt" in failure(tmp_path / "x.txt")
    (tmp_path / "config.json").mkdir()
    assert "config.json" in failure(tmp_path)
    (tmp_path / "some.gguf").write_text("")
    assert "to load some.gguf, pass the file itself" in failure(tmp_path)


def test_a_part_of_a_split_gguf_file(tmp_path):
    write_gguf(tmp_path / "x.gguf", CONFIG, random_params(CONFIG), metadata={"split.count": 3})
    assert "x.gguf: is one of 3 parts" in failure(tmp_path / "x.gguf")


# GGUF


@pytest.fixture(scope="module")
def good_gguf(tmp_path_factory):
    """A small file with a byte tokenizer of 48 tokens."""
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    write_gguf(path, CONFIG, random_params(CONFIG), metadata=GGUF_TOKENIZER)
    load_target(path, dtype="float32")
    return path


GGUF_TOKENIZER = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["<|end|>", "th", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRST"],
    "tokenizer.ggml.token_type": [3, *[1] * 47], "tokenizer.ggml.merges": ["t h"],
    "tokenizer.ggml.eos_token_id": 0,
}  # fmt: skip
GGUF_CHANGES = [
    ("general.architecture", "mamba"), ("general.alignment", "32"),
    ("qwen2.block_count", None), ("qwen2.block_count", 2), ("qwen2.block_count", 2**31),
    ("qwen2.block_count", "1"), ("qwen2.embedding_length", None), ("qwen2.embedding_length", 32),
    ("qwen2.feed_forward_length", 23), ("qwen2.attention.head_count", 0),
    ("qwen2.attention.head_count", None),
    ("qwen2.attention.head_count_kv", 3), ("qwen2.attention.key_length", 6), ("qwen2.rope.freq_base", -1.0),
    ("qwen2.rope.freq_base", float("nan")), ("qwen2.rope.freq_base", 10000),
    ("qwen2.attention.layer_norm_rms_epsilon", None), ("qwen2.context_length", None),
    ("qwen2.context_length", 0), ("tokenizer.ggml.model", "bert"), ("tokenizer.ggml.model", 3),
    ("tokenizer.ggml.pre", "mpt"), ("tokenizer.ggml.pre", 3), ("tokenizer.ggml.tokens", None),
    ("tokenizer.ggml.tokens", ["a"]), ("tokenizer.ggml.tokens", [1, 2]), ("tokenizer.ggml.token_type", None),
    ("tokenizer.ggml.token_type", [1]), ("tokenizer.ggml.merges", None), ("tokenizer.ggml.merges", ["th"]),
    ("tokenizer.ggml.merges", ["t é"]), ("tokenizer.ggml.eos_token_id", 48),
    ("tokenizer.ggml.eos_token_id", "0"), ("tokenizer.ggml.add_bos_token", 1), ("tokenizer.chat_template", 3),
]  # fmt: skip


@pytest.mark.parametrize("key, value", GGUF_CHANGES, ids=str)
def test_gguf_metadata(tmp_path, key, value):
    path = tmp_path / "x.gguf"
    write_gguf(path, CONFIG, random_params(CONFIG), metadata=GGUF_TOKENIZER | {key: value})
    message = failure(path)
    assert str(path) in message
    last = key.rpartition(".")[2]
    sizes = (
        "block_count", "embedding_length", "feed_forward_length", "head_count", "head_count_kv", "key_length",
        "context_length", "freq_base",
    )  # fmt: skip
    # A wrong size may show first at a tensor, at another key, or under the name that Hugging Face uses.
    assert last in message or (last in sizes and re.search("tensor|heads|layers|rope_theta|max_position", message))


@pytest.mark.parametrize("part", range(30))
def test_gguf_cut_off(tmp_path, good_gguf, part):
    data = good_gguf.read_bytes()
    path = tmp_path / "x.gguf"
    path.write_bytes(data[: len(data) * part // 30])
    assert str(path) in failure(path)


HEADER_CHANGES = [(0, b"GGML"), (4, b"\1\0\0\0"), (4, b"\0\0\0\3"), (8, b"\xff" * 8), (16, b"\xff" * 8)]


@pytest.mark.parametrize("offset, value", HEADER_CHANGES, ids=str)
def test_gguf_header(tmp_path, good_gguf, offset, value):
    data = bytearray(good_gguf.read_bytes())
    data[offset : offset + len(value)] = value
    (tmp_path / "x.gguf").write_bytes(data)
    assert "x.gguf" in failure(tmp_path / "x.gguf")


def test_gguf_tensors(tmp_path):
    for change, word in ((spoiled(np.nan), "blk.0.ffn_up.weight"), (spoiled(np.inf), "NaN or infinity")):
        params = random_params(CONFIG)
        layer = params.layers[0].replace(up=change(np.asarray(params.layers[0].up)))
        write_gguf(tmp_path / "x.gguf", CONFIG, params.replace(layers=(layer,)))
        assert word in failure(tmp_path / "x.gguf")


def test_gguf_integer_tensor(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen2")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "token_embd.weight" in (message := failure(tmp_path / "x.gguf")) and "I32" in message


def loads_or_is_refused(path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load_target(path, dtype="float32")
        except ValueError as error:
            assert "\n" not in str(error)


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(data=st.data())
@FUZZ
def test_flipped_bytes_in_a_gguf_file(tmp_path, good_gguf, data):
    """Any byte of the metadata may be anything: the file loads or is refused."""
    content = bytearray(good_gguf.read_bytes())
    end = content.index(b"blk.0.attn_norm.weight") + 1500
    for position in data.draw(st.lists(st.integers(0, end), min_size=1, max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    (tmp_path / "x.gguf").write_bytes(content)
    loads_or_is_refused(tmp_path / "x.gguf")


@given(data=st.data())
@FUZZ
def test_flipped_bytes_in_a_folder(tmp_path, data):
    folder = tmp_path / "x"
    shutil.rmtree(folder, ignore_errors=True)
    write_folder(folder, SMALL, TENSORS)
    write_tokenizer(folder)
    file = folder / data.draw(st.sampled_from(["config.json", FILE, "tokenizer.json", "tokenizer_config.json"]))
    content = bytearray(file.read_bytes())
    for position in data.draw(st.lists(st.integers(0, min(len(content), 3000) - 1), min_size=1, max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    loads_or_is_refused(folder)
