"""The README's table of checkpoints is what loading them here shows (`UPDATE_README=1` rewrites it)."""

import os
from pathlib import Path

import pytest
from tiny_checkpoints import SMALL, named_tensors, random_params, write_folder, write_gguf

from graft_jax.config import FAMILIES, ROPE_KINDS, ModelConfig
from graft_jax.io.checkpoint import load_target

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- checkpoints: written by tests/test_readme_table.py -->", "<!-- end of checkpoints -->"
MODELS = {"llama": "Llama 2 and 3.x, Vicuna, SmolLM2", "qwen2": "Qwen2, Qwen2.5", "qwen3": "Qwen3, dense"}
ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip


def loads(path) -> bool:
    try:
        load_target(path, dtype="float32")
    except ValueError:
        return False
    return True


def row(family: str, folder: Path) -> str:
    base = {key: value for key, value in SMALL.items() if key != "model_type"} | {"model_type": family, "head_dim": 8}
    ropes = []
    for kind, scaling in ROPES.items():
        ModelConfig.from_hf(base | {"rope_scaling": scaling})
        ropes.append(kind)
    heads = []
    for tied in (True, False):
        config = ModelConfig.from_hf(base | {"tie_word_embeddings": tied})
        tensors = named_tensors(config, random_params(config))
        if loads(write_folder(folder / f"{family}-{tied}", config.to_hf(), tensors)):
            heads.append("tied" if tied else "untied")
    formats = []
    config = ModelConfig.from_hf(base)
    tensors = named_tensors(config, random_params(config))
    for name, path in {
        "safetensors": write_folder(folder / f"{family}-one", config.to_hf(), tensors),
        "shards": write_folder(folder / f"{family}-shards", config.to_hf(), tensors, shards=3),
    }.items():
        if loads(path):
            formats.append(name)
    path = folder / f"{family}.gguf"
    write_gguf(path, config, random_params(config))
    if loads(path):
        formats.append("GGUF")
    return f"| `{family}` | {MODELS[family]} | {', '.join(formats)} | {', '.join(ropes)} | {', '.join(heads)} |"


def test_table(tmp_path):
    assert set(ROPES) == set(ROPE_KINDS) and set(MODELS) == set(FAMILIES)
    lines = ["| `model_type` | models | formats | rope | head |", "|---|---|---|---|---|"]
    table = "\n".join(lines + [row(family, tmp_path) for family in FAMILIES])
    text = README.read_text()
    before, rest = text.split(START)
    old, after = rest.split(END)
    if os.environ.get("UPDATE_README"):
        README.write_text(f"{before}{START}\n{table}\n{END}{after}")
    elif old.strip() != table:
        pytest.fail(f"the README's table is not what loads here:\n{table}")
