"""Computes the reference arrays of tests/test_target_golden.py with transformers on torch.

make test-parity                      # installs torch and transformers
.venv/bin/python scripts/make_golden.py
"""

import importlib
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "parity")]

import target_run  # noqa: E402  (found by the line above)
import tiny_checkpoints  # noqa: E402
import torch  # noqa: E402
import torch_run  # noqa: E402
import transformers  # noqa: E402

from graft_jax.config import ModelConfig  # noqa: E402
from graft_jax.io import hub  # noqa: E402
from graft_jax.io.checkpoint import load_target, save_hf  # noqa: E402


def tiny(settings: dict) -> tuple[np.ndarray, np.ndarray]:
    """Logits and taps of the golden rows of a model with `random_params`."""
    config = ModelConfig.from_hf(settings)
    with tempfile.TemporaryDirectory() as folder:
        save_hf(Path(folder) / "x", config, tiny_checkpoints.random_params(config))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder) / "x", attn_implementation="eager", dtype=torch.float32
        ).eval()
    logits, taps = torch_run.run(model, config, *target_run.sample_tokens(config.vocab_size))
    return logits[target_run.GOLDEN_ROWS], taps[:, target_run.GOLDEN_ROWS]


def smollm2() -> dict[str, np.ndarray]:
    """The four best tokens of each row of a chat prompt and a tree, from transformers' own GGUF loading."""
    path = hub.resolve("smollm2-135m")
    made = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    gguf = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    state = gguf.load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(state, strict=False)
    config, _, tokenizer = load_target("smollm2-135m", dtype="bfloat16")
    assert tokenizer is not None
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Name three colours of the rainbow, please."}])
    prompt, tree = np.array((ids * 2)[: target_run.PROMPT]), np.arange(target_run.NODES) * 1000
    logits, _ = torch_run.run(model, config, prompt, tree)
    best = np.argsort(-logits, axis=-1)[:, :4]
    return {
        "smollm2 prompt": prompt,
        "smollm2 tree": tree,
        "smollm2 best": best,
        "smollm2 logits": np.take_along_axis(logits, best, axis=-1),
    }


def main() -> None:
    arrays = smollm2()
    for name, settings in target_run.golden_configs().items():
        arrays[f"{name} logits"], arrays[f"{name} taps"] = tiny(settings)
    path = ROOT / "tests" / "golden" / "target.npz"
    small = {name: a.astype(np.int32) if a.dtype.kind == "i" else a for name, a in arrays.items()}
    np.savez_compressed(path, **small)
    print(f"{path}: {path.stat().st_size} bytes, {len(small)} arrays")


if __name__ == "__main__":
    main()
