"""Settings of a training run, from a YAML file."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from graft_jax.training.recipes import Recipe, read_recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run. Paths may use ~ and variables of the environment.

    Attributes:
        name: of the run.
        model: the target: a packaged name, a GGUF file, a Hugging Face folder or a hub id.
        data: a folder that `graft-jax prepare` wrote.
        drafter: what is trained, and its own settings.
        out: folder of checkpoints, log and drafter; in the user's data folder if None.
        features: "cached" keeps the target's features on disk after the first epoch, "online" makes them anew
            in every step.
        features_folder: where cached features lie; `out`/features if None.
        dtype: of the target and of products; weights in training are float32 in any case.
        seed: of the start, the order and all drawing.
        batch_rows: packed rows a step.
        epochs: passes over the data.
        steps: optimizer steps in place of `epochs`.
        minutes: of training at most, before the last evaluation. The rate of steps is measured and as many are
            planned as fit, at most `epochs` or `steps`; the plan stays when the run goes on after a kill. If the time
            is up before the plan's end, the drafter is written as it is.
        peak, warmup, clip, decay: see `step.make_optimizer`.
        log_every, checkpoint_every, evaluate_every: steps between; 0 only at the end.
        evaluate_prompts, evaluate_tokens, evaluate_nodes: held-out prompts, new tokens each, tree size.
    """

    name: str
    model: str
    data: str
    drafter: Recipe
    out: str | None = None
    features: str = "cached"
    features_folder: str | None = None
    dtype: str = "bfloat16"
    seed: int = 0
    batch_rows: int = 8
    epochs: float = 1.0
    steps: int | None = None
    minutes: float | None = None
    peak: float = 1e-4
    warmup: float = 0.05
    clip: float = 0.5
    decay: float = 0.0
    log_every: int = 10
    checkpoint_every: int = 200
    evaluate_every: int = 500
    evaluate_prompts: int = 8
    evaluate_tokens: int = 64
    evaluate_nodes: int = 7

    def __post_init__(self):
        if self.features not in ("cached", "online"):
            raise ValueError(f"features={self.features!r} must be 'cached' or 'online'")
        for name in ("batch_rows", "log_every", "evaluate_tokens", "evaluate_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("checkpoint_every", "evaluate_every", "evaluate_prompts", "seed", "decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        for name in ("epochs", "peak", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup={self.warmup} must be at least 0 and below 1")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes={self.minutes} must be above 0")

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        if self.out is not None:
            return _path(self.out)
        home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
        return home / "graft_jax" / "runs" / self.name

    @property
    def data_folder(self) -> Path:
        return _path(self.data)

    @property
    def cache_folder(self) -> Path | None:
        """Where features are kept; None if they are not."""
        if self.features == "online":
            return None
        return _path(self.features_folder) if self.features_folder else self.folder / "features"

    def num_steps(self, rows: int) -> int:
        return self.steps or max(1, round(self.epochs * rows / self.batch_rows))

    def determining(self, rows: int) -> dict[str, Any]:
        """What the weights depend on: settings whose change makes another run."""
        names = ("model", "dtype", "seed", "batch_rows", "peak", "warmup", "clip", "decay")
        drafter = {"kind": self.drafter.method, **dataclasses.asdict(self.drafter)}  # type: ignore[call-overload]
        return {**{name: getattr(self, name) for name in names}, "steps": self.num_steps(rows), "drafter": drafter}


def read_run(path: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Reads a run's YAML file.

    Args:
        overrides: values that replace the file's; `drafter.x` reaches into the drafter's settings.

    Raises:
        ValueError: the file or a key is wrong; names it.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"run={str(path)!r}: no such file")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict) or not isinstance(settings.get("drafter"), dict):
        raise ValueError(f"{path}: needs settings, `drafter` among them")
    settings = {"name": path.stem, **settings}
    for name, value in (overrides or {}).items():
        place = settings["drafter"] if name.startswith("drafter.") else settings
        place[name.removeprefix("drafter.")] = value
    fields = {field.name: field for field in dataclasses.fields(RunConfig)}
    unknown = sorted(set(settings) - set(fields))
    if unknown:
        raise ValueError(f"{path}: {', '.join(unknown)} not known; known are {', '.join(fields)}")
    missing = [name for name in ("model", "data") if name not in settings]
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} missing")
    try:
        drafter = read_recipe(settings["drafter"])
        return RunConfig(**{**_typed(settings), "drafter": drafter})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _typed(settings: dict[str, Any]) -> dict[str, Any]:
    """Numbers where numbers belong: YAML reads 1e-4 as a text."""
    out = dict(settings)
    for field in dataclasses.fields(RunConfig):
        value = settings.get(field.name)
        if value is None:
            continue
        if field.type in (float, float | None):
            out[field.name] = float(value)
        elif field.type in (int, int | None):
            if isinstance(value, bool) or int(value) != float(value):
                raise ValueError(f"{field.name}={value!r} must be a whole number")
            out[field.name] = int(value)
        elif field.type in (str, str | None) and not isinstance(value, str):
            raise ValueError(f"{field.name}={value!r} must be a text")
    return out


def _path(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()
