"""Loss, accuracy and acceptance of runs against the tokens they were trained on."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graft_jax.training.log import read_log


def plot(folders: Sequence[str | Path], out: str | Path) -> None:
    """Draws the logs of runs into one picture.

    Raises:
        ValueError: a folder has no log, or matplotlib is not installed.
    """
    logs = {}
    for folder in folders:
        path = Path(folder) / "log.jsonl"
        if not path.is_file():
            raise ValueError(f"{folder}: has no log.jsonl")
        logs[Path(folder).name] = read_log(path)
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise ValueError("plotting needs matplotlib: pip install 'graft_jax[plot]'") from None
    figure, (loss, acceptance) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    first = acceptance.twinx()
    for name, entries in logs.items():
        steps = [entry for entry in entries if entry["kind"] == "train"]
        tried = [entry for entry in entries if entry["kind"] == "evaluation"]
        (line,) = loss.plot([e["tokens"] for e in steps], [e["loss"] for e in steps], linewidth=0.8, label=name)
        color = line.get_color()
        for axis, key, style in ((loss, "held_out_loss", "o--"), (acceptance, "acceptance_length", "o-"),
                                 (first, "first_slot_acceptance", "x:")):  # fmt: skip
            found = [entry for entry in tried if key in entry]
            axis.plot([e["tokens"] for e in found], [e[key] for e in found], style, color=color)
    loss.set(xlabel="tokens", ylabel="loss (line), held out (dots)")
    acceptance.set(xlabel="tokens", ylabel="acceptance length (solid)")
    first.set(ylabel="acceptance of the first slot (dotted)")
    loss.legend()
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
