"""A toy head from prepared data to its exported folder: resume, refusals, evaluation, export."""

import functools
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from rich.console import Console
from test_train_data import MODEL, write_lines

from graft_jax import cli
from graft_jax.engine import SpeculativeDecoder
from graft_jax.io.block_drafter import load_block_drafter
from graft_jax.io.checkpoint import load_target
from graft_jax.io.drafter import load_eagle3
from graft_jax.models import eagle3
from graft_jax.training import feature_cache, loop, plot, shards
from graft_jax.training.log import read_log
from graft_jax.training.run import read_run

# On one worker: the run that all compare with is made once.
pytestmark = pytest.mark.xdist_group("train_loop")
STEPS = 40
RUNS = Path(__file__).parent.parent / "configs" / "runs"
QUIET = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    texts = write_lines(folder / "lines.jsonl", 400)
    arguments = ["prepare", str(texts), "--model", MODEL, "--length", "64", "--held-out", "0.1", "--keep-loops"]
    assert cli.main([*arguments, "--out", str(folder / "toy")]) == 0
    return folder


def settings(prepared: Path, out: Path, kind: str = "eagle3", **more):
    places = {"model": MODEL, "data": str(prepared / "toy"), "out": str(out)}
    return read_run(RUNS / f"toy-{kind}.yaml", {**places, **more})


def command(prepared: Path, out: Path, *more: str) -> list[str]:
    """Arguments of the command line for the same run."""
    changes = [f"model={MODEL}", f"data={prepared / 'toy'}", f"out={out}", *more]
    return ["train", str(RUNS / "toy-eagle3.yaml"), *(part for change in changes for part in ("--set", change))]


@pytest.fixture(scope="module")
def undisturbed(prepared, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run")
    loop.train(settings(prepared, out), QUIET)
    return out


def weights(out: Path) -> bytes:
    return (out / "drafter" / "model.safetensors").read_bytes()


def lines(out: Path) -> list[dict]:
    return [{k: v for k, v in entry.items() if k != "tokens_per_second"} for entry in read_log(out / "log.jsonl")]


def test_it_learns_and_first_slot_acceptance_is_the_accuracy(undisturbed):
    entries = lines(undisturbed)
    assert [entry["step"] for entry in entries if entry["kind"] == "train"] == list(range(1, STEPS + 1))
    assert entries[STEPS - 1]["loss"] < 0.75 * entries[0]["loss"]
    last = entries[-1]
    assert last["kind"] == "evaluation" and last["acceptance_length"] > 1.3
    assert abs(last["first_slot_acceptance"] - last["held_out_accuracy"][0]) < 0.12  # of 144 tokens
    assert last["acceptance_length"] > 1 + last["first_slot_acceptance"]
    history = json.loads((undisturbed / "drafter" / "training.json").read_text())
    assert history["evaluations"] == [entry for entry in entries if entry["kind"] == "evaluation"]
    assert history["settings"]["steps"] == STEPS and history["data"]["trained_tokens"] > 1000


def test_same_seed_same_losses_online_or_cached_another_seed_others(prepared, undisturbed, tmp_path):
    loop.train(settings(prepared, tmp_path / "online", features="online"), QUIET)
    assert lines(tmp_path / "online") == lines(undisturbed) and weights(tmp_path / "online") == weights(undisturbed)
    assert not (tmp_path / "online" / "features").exists()
    loop.train(settings(prepared, tmp_path / "other", seed=1, steps=2, evaluate_prompts=0), QUIET)
    assert lines(tmp_path / "other")[0]["loss"] != lines(undisturbed)[0]["loss"]


class Crash(BaseException):
    """Not caught by anything, as a kill is not."""


def test_crashes_anywhere_end_in_the_same_weights(prepared, undisturbed, tmp_path, monkeypatch):
    run = settings(prepared, tmp_path)
    whole = feature_cache.FeatureSource.batch
    calls = 0

    def batch(self, indices):
        nonlocal calls
        calls += 1
        if calls in crashes and self.folder is not None:
            raise Crash
        return whole(self, indices)

    crashes = {3, 15, 16, 40}
    monkeypatch.setattr(feature_cache.FeatureSource, "batch", batch)
    for _ in crashes:
        with pytest.raises(Crash):
            loop.train(run, QUIET)
    loop.train(run, QUIET)
    assert weights(tmp_path) == weights(undisturbed) and lines(tmp_path) == lines(undisturbed)


@pytest.mark.slow
def test_ten_kills_end_in_the_same_weights(prepared, undisturbed, tmp_path):
    started = [sys.executable, "-m", "graft_jax.cli", *command(prepared, tmp_path, "checkpoint_every=2")]
    rng, kills = np.random.default_rng(0), 0
    while kills < 10:
        process = subprocess.Popen(started, stderr=subprocess.DEVNULL)
        wanted = rng.integers(1, 4)
        log = tmp_path / "log.jsonl"
        seen = len(log.read_text().splitlines()) if log.exists() else 0
        while process.poll() is None:  # some steps after it began to work, at any moment within one
            now = len(log.read_text().splitlines()) if log.exists() else 0
            if now != seen and now >= wanted + max(0, seen - 2):
                break
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.2))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills == 10
    assert subprocess.run(started, stderr=subprocess.DEVNULL).returncode == 0
    assert weights(tmp_path) == weights(undisturbed)


def test_other_settings_are_refused_by_name(prepared, undisturbed):
    for change, message in (
        ({"peak": 1e-3}, "peak: 0.004 there, 0.001 here"),
        ({"drafter.ttt_steps": 2}, "drafter: .*ttt_steps.*3.*there.*2.*here"),
        ({"steps": STEPS + 1}, f"steps: {STEPS} there"),
    ):
        with pytest.raises(ValueError, match=message):
            loop.train(settings(prepared, undisturbed, **change), QUIET)
    with pytest.raises(ValueError, match=r"taps: \[.*\] there, \[1, 2\] here"):
        loop.train(settings(prepared, undisturbed, **{"drafter.taps": [1, 2]}), QUIET)


def test_a_loss_that_is_not_finite_stops_and_names_step_and_batch(prepared, tmp_path):
    run = settings(prepared, tmp_path, peak=1e30, warmup=0.5, checkpoint_every=1, clip=1e30)
    with pytest.raises(FloatingPointError, match=r"step \d+: loss .* its batch is rows \[\d+.* of step [1-9]"):
        loop.train(run, QUIET)
    assert all(np.isfinite(entry["loss"]) for entry in lines(tmp_path))
    checkpoint = sorted((tmp_path / "checkpoints").iterdir(), key=lambda p: int(p.name))[-1]
    assert int(checkpoint.name) == len(lines(tmp_path))


def test_export_reads_back_to_the_same_logits(prepared, undisturbed):
    config, target, _ = load_target(MODEL, dtype="bfloat16")
    run = settings(prepared, undisturbed)
    head_config = run.drafter.config(config, None)
    kept = loop.restore(run)
    read_config, read = load_eagle3(undisturbed / "drafter", config, dtype="bfloat16")
    assert read_config == head_config
    mine = run.drafter.stored(kept.params)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(read), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    taps = tuple(jnp.ones((1, 5, config.hidden_size)) * i for i in (1.0, 2.0, 3.0))
    fused = functools.partial(eagle3.fuse, head_config)
    np.testing.assert_array_equal(fused(mine, taps), fused(read, taps))
    decoder = SpeculativeDecoder.from_pretrained(
        MODEL, method="eagle3", drafter=undisturbed / "drafter", dtype="float32", max_length=128
    )
    prompt = toy.Language(0).rows(np.random.default_rng(9), 1, 12)[0][0].tolist()
    out = decoder.generate(prompt, max_new_tokens=60, ignore_eos=True)
    plain = decoder.with_method("ar").generate(prompt, max_new_tokens=60, ignore_eos=True)
    assert out.token_ids == plain.token_ids and out.stats.mean_acceptance_length > 1.3


def test_features_of_another_target_are_refused(prepared, tmp_path):
    config, target, _ = load_target(MODEL, dtype="float32")
    rows = shards.read(prepared / "toy", "train")
    manifest = shards.read_manifest(prepared / "toy")
    make = functools.partial(feature_cache.FeatureSource, taps=(1, 2), rows=rows, folder=tmp_path / "f")
    facts = feature_cache.facts(config, target, manifest)
    source = make(config, target, facts=facts)
    first, again = source.batch([3, 5]), source.batch([3, 5])
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again)):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    changed = target.replace(norm=target.norm * 1.01)
    with pytest.raises(ValueError, match="was made by another run .target:"):
        make(config, changed, facts=feature_cache.facts(config, changed, manifest))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"featurs": "online"}, "featurs not known"),
        ({"drafter.kind": "egle"}, "drafter.kind='egle' must be one of"),
        ({"drafter.ttt": 3}, "drafter: ttt not known"),
        ({"batch_rows": 0}, "batch_rows=0"),
        ({"minutes": 0}, "minutes=0"),
        ({"steps": "many"}, "steps|many"),
        ({"drafter.taps": [99]}, "taps"),
    ],
)
def test_run_files_say_what_is_wrong(prepared, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run = settings(prepared, tmp_path, **change)
        loop.train(run, QUIET)


def test_the_command_line_trains_and_prints(prepared, tmp_path, capsys):
    arguments = command(prepared, tmp_path, "steps=2", "evaluate_prompts=0")
    assert cli.main([*arguments, "--print-config"]) == 0
    assert "ttt_steps=3" in capsys.readouterr().err
    assert cli.main(arguments) == 0
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["draft_vocab_size"] == 256


TIMED = {"minutes": 10, "steps": 12, "evaluate_prompts": 0, "peak": 4e-3}


def five_second_steps(patch) -> None:
    """A clock by which nothing takes time but a step's batch: five seconds."""
    now, whole = 0.0, feature_cache.FeatureSource.batch

    def batch(self, indices):
        nonlocal now
        now += 5.0 if self.folder is not None else 0.0
        return whole(self, indices)

    patch.setattr(feature_cache.FeatureSource, "batch", batch)
    patch.setattr(loop.time, "perf_counter", lambda: now)


def test_a_timed_run_plans_its_steps(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "MEASURED_STEPS", 3)
    five_second_steps(monkeypatch)
    loop.train(settings(prepared, tmp_path, **{**TIMED, "minutes": 2, "steps": 4000}), QUIET)
    planned = json.loads((tmp_path / "steps.json").read_text())
    assert planned["steps"] == int(0.95 * (120 - 20 - 5) / 5) == 18 and planned["seconds_a_step"] == 5.0
    assert [entry["step"] for entry in lines(tmp_path) if entry["kind"] == "train"] == list(range(1, 19))


@pytest.mark.slow
def test_a_timed_run_ends_in_time_and_in_the_same_weights(prepared, tmp_path, monkeypatch):
    loop.train(settings(prepared, tmp_path / "timed", **TIMED), QUIET)  # time enough: the plan is `steps`
    loop.train(settings(prepared, tmp_path / "fixed", steps=12, evaluate_prompts=0), QUIET)
    assert weights(tmp_path / "timed") == weights(tmp_path / "fixed")

    late = settings(prepared, tmp_path / "late", **{**TIMED, "minutes": 1})
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "steps.json").write_text('{"steps": 30}')  # planned too many
    with monkeypatch.context() as patch:
        five_second_steps(patch)
        loop.train(late, QUIET)
    assert [entry["step"] for entry in lines(tmp_path / "late") if entry["kind"] == "train"] == list(range(1, 14))
    assert len(weights(tmp_path / "late")) > 1000
    loop.train(late, QUIET)
    loop.train(settings(prepared, tmp_path / "whole", steps=30, evaluate_prompts=0), QUIET)
    assert weights(tmp_path / "late") == weights(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["dflash", "domino"])
def test_block_drafters_train_resume_and_export(prepared, tmp_path, kind):
    run = settings(prepared, tmp_path / "whole", kind)
    last = loop.train(run, QUIET)
    entries = [entry for entry in lines(tmp_path / "whole") if entry["kind"] == "train"]
    assert entries[-1]["losses"][0] < 0.85 * entries[0]["losses"][0]
    assert last["acceptance_length"] > 1.3 and last["acceptance_length"] > 1 + last["first_slot_acceptance"]
    assert abs(last["first_slot_acceptance"] - last["held_out_accuracy"][0]) < 0.15

    config, target, _ = load_target(MODEL, dtype="bfloat16")
    read_config, read = load_block_drafter(tmp_path / "whole" / "drafter", config, dtype="bfloat16")
    assert read_config == run.drafter.config(config, None)
    mine = run.drafter.stored(loop.restore(run).params)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(read), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))

    broken = settings(prepared, tmp_path / "parts", kind)
    stop = lambda entry: (_ for _ in ()).throw(Crash) if entry["step"] == 20 else None
    with pytest.raises(Crash), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.RunLog, "write", lambda self, entry: stop(entry))
        loop.train(broken, QUIET)
    loop.train(broken, QUIET)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_plot(undisturbed, tmp_path):
    pytest.importorskip("matplotlib")
    assert cli.main(["plot", str(undisturbed), "--out", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="has no log.jsonl"):
        plot.plot([tmp_path], tmp_path / "b.png")
