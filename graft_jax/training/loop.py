"""The training loop: batches in a fixed order, steps, checkpoints, log, evaluation."""

import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from graft_jax.config import ModelConfig
from graft_jax.io.checkpoint import load_target
from graft_jax.models.transformer import TargetParams
from graft_jax.training import evaluate, feature_cache, shards, step
from graft_jax.training.checkpoints import Checkpoints
from graft_jax.training.log import RunLog, read_log
from graft_jax.training.run import RunConfig

MEASURED_STEPS = 8  # that tell how many fit into a run's time
_PLAN = "steps.json"  # in a timed run's folder


def batch_rows(rows: int, size: int, seed: int, step: int) -> list[int]:
    """Which rows make up the batch of a step: epochs in orders drawn from the seed, one after the other."""
    found = []
    for position in range(step * size, (step + 1) * size):
        epoch, place = divmod(position, rows)
        found.append(int(_order(rows, seed, epoch)[place]))
    return found


@functools.lru_cache(maxsize=4)
def _order(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def train(run: RunConfig, console: Console) -> dict[str, Any]:
    """Trains a drafter, or goes on where an interrupted run of the same settings stopped.

    Writes checkpoints, `log.jsonl` and, at the end, the drafter itself under `drafter` in the run's folder.

    Returns:
        The last evaluation.

    Raises:
        ValueError: settings or data are wrong, or do not fit what the folder holds.
        FloatingPointError: a loss or gradient was not finite; names step and batch. The last checkpoint is whole.
    """
    began = time.perf_counter()
    run = _planned(run)
    rows = shards.read(run.data_folder, "train")
    manifest = shards.read_manifest(run.data_folder)
    if not len(rows) or not rows.mask.any():
        raise ValueError(f"data={run.data!r}: holds nothing to train on")
    target_config, target, tokenizer = load_target(run.model, dtype=run.dtype)
    if int(rows.tokens.max()) >= target_config.vocab_size:
        raise ValueError(
            f"data={run.data!r}: has ids beyond the vocabulary of {run.model!r}; prepare it for that model"
        )
    facts = feature_cache.facts(target_config, target, manifest)
    config = run.drafter.config(target_config, tokenizer)
    source = feature_cache.FeatureSource(target_config, target, config.taps, rows, run.cache_folder, facts)
    run.folder.mkdir(parents=True, exist_ok=True)
    compiled = functools.partial(_compiled, config, target_config, target, rows)
    if run.minutes is not None and not (run.folder / _PLAN).is_file():
        run = _plan(run, *compiled(run), source, began)
    total = run.num_steps(len(rows))
    advance, state = compiled(run)
    checkpoints = Checkpoints(run.folder / "checkpoints", {**run.determining(len(rows)), **facts})
    if checkpoints.latest is not None:
        state = checkpoints.restore(state)
    log = RunLog(run.folder / "log.jsonl", int(state.step))
    trial = evaluate.Evaluation(run, config, target_config, target, tokenizer)

    def assess(state) -> dict[str, Any]:
        found = trial(state.params)
        log.write({"kind": "evaluation", "step": int(state.step), "tokens": tokens_at(int(state.step)), **found})
        return found

    tokens_a_row = float((rows.segments > 0).sum()) / len(rows)

    def tokens_at(done: int) -> int:
        return round(done * run.batch_rows * tokens_a_row)

    count = sum(x.size for x in jax.tree.leaves(state.params) if jnp.issubdtype(x.dtype, jnp.floating))
    console.print(
        f"{run.name}: {count / 1e6:.1f} M parameters, {total} steps of {run.batch_rows} x {rows.tokens.shape[1]} "
        f"tokens, {total * run.batch_rows / len(rows):.1f} epochs; step {int(state.step)} is next, in {run.folder}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeRemainingColumn())
    found: dict[str, Any] = {}
    i = int(state.step)

    def late() -> bool:
        return run.minutes is not None and time.perf_counter() - began > 60 * run.minutes

    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=total, completed=i)
            clock, since = time.perf_counter(), i
            while i < total and not late():
                indices = batch_rows(len(rows), run.batch_rows, run.seed, i)
                with jax.numpy_dtype_promotion("standard"):  # optax needs it
                    state, value, norm, metrics = advance(state, source.batch(indices))
                if not (math.isfinite(float(value)) and math.isfinite(float(norm))):
                    raise FloatingPointError(
                        f"step {i}: loss {float(value)}, gradient norm {float(norm)}; its batch is rows {indices} of "
                        f"{run.data}; the last whole checkpoint is of step {checkpoints.latest}"
                    )
                i += 1
                if i % run.log_every == 0 or i == total:
                    now = time.perf_counter()
                    speed = (tokens_at(i) - tokens_at(since)) / (now - clock)
                    clock, since = now, i
                    entry = {"kind": "train", "step": i, "tokens": tokens_at(i), "loss": round(float(value), 5),
                             "gradient_norm": round(float(norm), 5), **evaluate.summary(metrics),
                             "tokens_per_second": round(speed, 1)}  # fmt: skip
                    log.write(entry)
                    shown = " ".join(f"{x:.2f}" for x in entry.get("accuracy", []))
                    line = f"loss {entry['loss']:.3f} accuracy {shown} {speed:.0f} tokens/s"
                    progress.update(task, completed=i, description=line)
                if i < total and run.checkpoint_every and i % run.checkpoint_every == 0:
                    checkpoints.save(i, state)
                if i < total and run.evaluate_every and i % run.evaluate_every == 0:
                    found = assess(state)
                    clock, since = time.perf_counter(), i
        if i < total:
            console.print(f"the time is up at step {i} of {total}; the same command goes on from there")
        if checkpoints.latest != i:
            checkpoints.save(i, state)
        checkpoints.wait()
        found = assess(state)
        export(run, config, state.params)
    except KeyboardInterrupt:
        checkpoints.wait()
        if checkpoints.latest != i:
            checkpoints.save(i, state)
            checkpoints.wait()
        console.print(f"stopped at step {i}; the same command goes on from there")
        raise
    finally:
        log.close()
        checkpoints.close()
    return found


def restore(run: RunConfig) -> step.TrainState:
    """The newest state of a run, e.g. to export it again.

    Raises:
        ValueError: there is none, or it is of other settings.
    """
    run = _planned(run)
    rows = shards.read(run.data_folder, "train")
    target_config, target, tokenizer = load_target(run.model, dtype=run.dtype)
    facts = feature_cache.facts(target_config, target, shards.read_manifest(run.data_folder))
    state = _start(run, run.drafter.config(target_config, tokenizer), target_config, target, rows)[1]
    checkpoints = Checkpoints(run.folder / "checkpoints", {**run.determining(len(rows)), **facts})
    if checkpoints.latest is None:
        raise ValueError(f"{run.folder}: has no checkpoint")
    state = checkpoints.restore(state)
    checkpoints.close()
    return state


def _compiled(
    config: Any, target_config: ModelConfig, target: TargetParams, rows: shards.Rows, run: RunConfig
) -> tuple[Callable, step.TrainState]:
    """The step as a program, which uses up the state it is given, and the state before the first one."""
    optimizer, state = _start(run, config, target_config, target, rows)
    total = run.num_steps(len(rows))
    return functools.partial(stepper(run, config, target_config, optimizer, total), target), state


def stepper(run: RunConfig, config: Any, target_config: ModelConfig, optimizer: Any, total: int) -> Any:
    """`step.train_step` as a program of target, state and batch; uses up the state it is given.

    The target is an argument, for captured it would be a constant of the program: gigabytes of it, for large ones.
    """

    def advance(target, state, batch):
        loss = run.drafter.loss(config, target_config, target, run.seed, total)
        return step.train_step(loss, optimizer, state, batch)

    return jax.jit(advance, donate_argnums=1)


def _planned(run: RunConfig) -> RunConfig:
    """A timed run that has begun keeps its number of steps."""
    path = run.folder / _PLAN
    if run.minutes is None or not path.is_file():
        return run
    return dataclasses.replace(run, steps=json.loads(path.read_text())["steps"])


def _plan(
    run: RunConfig, advance: Callable, state: step.TrainState, source: feature_cache.FeatureSource, began: float
) -> RunConfig:
    """The run with as many steps as fit into its time, by the rate of steps whose results are thrown away.

    The first call compiles. The number of steps is part of the program, so the run will compile once more.
    """
    assert run.minutes is not None
    clocks = [time.perf_counter()]
    for i in range(1 + MEASURED_STEPS):
        batch = source.batch(batch_rows(len(source.rows), run.batch_rows, run.seed, i))
        with jax.numpy_dtype_promotion("standard"):  # optax needs it
            state, value, _, _ = advance(state, batch)
        float(value)
        clocks.append(time.perf_counter())
    compiling, a_step = clocks[1] - clocks[0], (clocks[-1] - clocks[1]) / MEASURED_STEPS
    left = 60 * run.minutes - (clocks[-1] - began) - compiling
    steps = max(1, min(run.num_steps(len(source.rows)), int(0.95 * left / a_step)))
    path = run.folder / _PLAN
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"steps": steps, "seconds_a_step": a_step, "minutes": run.minutes}) + "\n")
    os.replace(temporary, path)
    return _planned(run)


def _start(run: RunConfig, config: Any, target_config: ModelConfig, target: TargetParams, rows: shards.Rows):
    """Optimizer and state of a run's beginning."""
    total = run.num_steps(len(rows))
    optimizer = step.make_optimizer(total, peak=run.peak, warmup=run.warmup, clip=run.clip, decay=run.decay)
    tokens = rows.tokens[rows.mask]
    params = run.drafter.init(config, jax.random.key(run.seed), target_config, target, tokens)
    return optimizer, step.init(optimizer, params)


def export(run: RunConfig, config: Any, params: Any) -> None:
    """Writes the drafter of a run into its folder, in place of an older one, and beside it how it was trained."""
    folder = run.folder / "drafter"
    if folder.exists():
        for file in folder.iterdir():
            file.unlink()
    run.drafter.save(folder, config, params)
    (folder / "training.json").write_text(json.dumps(history(run), indent=1) + "\n")


def history(run: RunConfig) -> dict[str, Any]:
    """Settings, data and evaluations of a run."""
    manifest = shards.read_manifest(run.data_folder)
    split = {key: value for key, value in manifest["splits"]["train"].items() if key != "shards"}
    return {
        "settings": run.determining(split["rows"]),
        "data": {"sources": manifest["sources"], **split},
        "evaluations": [entry for entry in read_log(run.folder / "log.jsonl") if entry["kind"] == "evaluation"],
    }
