"""What `train_gpu.sh` needs to know before it starts.

python scripts/train_gpu_setup.py batch MODEL LENGTH   # conversations that are written at a time, by memory
python scripts/train_gpu_setup.py toy FOLDER           # the tests' target with a chat template; prints topics
"""

import json
import shutil
import sys
from pathlib import Path

TOY = Path(__file__).parent.parent / "tests" / "toy" / "llama"
# Turns as they are, each with a sentence's end behind it; the toy language knows no roles.
TOY_TEMPLATE = "{% for m in messages %}{{ m['content'] }} t35 {% endfor %}{% if add_generation_prompt %}t27 {% endif %}"
LARGEST = 2048  # more rows do not fill the device better, and their host work takes as long
SHARE = 0.4  # of the device's memory for keys and values: rounds hold some copies of logits beside, programs theirs


def batch(model: str, length: int) -> int:
    """The largest power of two that fits, at most `LARGEST`."""
    import jax

    from graft_jax.io.checkpoint import open_checkpoint

    if jax.default_backend() == "cpu":
        raise SystemExit("JAX finds no GPU here; --dry-run goes through the stages with a toy target")
    config = open_checkpoint(model).config
    memory = (jax.devices()[0].memory_stats() or {})["bytes_limit"]
    cached = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * length
    weights = 2 * config.hidden_size * (2 * config.vocab_size + 4 * config.num_layers * config.intermediate_size)
    a_row = cached + 8 * 4 * config.vocab_size
    rows = int((memory - weights) * SHARE / a_row)
    if rows < 1:
        raise SystemExit(f"{model} leaves no room on this device: {memory / 1e9:.0f} GB")
    return min(LARGEST, 2 ** (rows.bit_length() - 1))


def toy(folder: Path) -> None:
    shutil.copytree(TOY, folder, dirs_exist_ok=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TOY_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
    for topic in range(3, 11):  # the beginning of a document: its topic, and names to come
        print(f"t0 t{topic} t37 t{topic + 50}")


def main() -> None:
    what, *rest = sys.argv[1:] or ["help"]
    if what == "batch" and len(rest) == 2:
        print(batch(rest[0], int(rest[1])))
    elif what == "toy" and len(rest) == 1:
        toy(Path(rest[0]))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
