"""Calibration: warm-up records against decoding, AUC and thresholds against brute force, the file and the command."""

import functools
import itertools
import json

import numpy as np
import pytest
import toy

from graft_jax import cli, engine
from graft_jax.calibration import read_calibration
from graft_jax.gate_choice import auc, choose, ends
from graft_jax.io.drafter import load_eagle3
from graft_jax.methods import Options
from graft_jax.session import Request
from graft_jax.tree.gates import OPEN
from graft_jax.warmup import CLOSED, Record, record

DEPTHS = (0, 1, 2, 3, 4)


@functools.cache
def decoder(method="graft"):
    config, params = toy.load("llama")
    head = load_eagle3(toy.FOLDER / "llama-eagle3", config, dtype="float32")
    options = Options(gates=DEPTHS, thresholds=(OPEN,) * 5)
    return engine._build(method, options, config, params, None, 256, "toy", head)


def test_records_are_what_decoding_accepts():
    """The open tree's accepted nodes, round by round, are those of a run with open gates; forced ends are shorter."""
    made, prompt = decoder("eagle3"), [int(t) for t in toy.safe_prompts("llama", 1)[0]]
    found = record(made, DEPTHS, [prompt], Request(max_new_tokens=64, ignore_eos=True))
    stats = made.generate(prompt, max_new_tokens=64, ignore_eos=True).stats
    histogram = np.bincount(found.accepted[:, -1], minlength=len(stats.acceptance_histogram))
    left_out = np.array(stats.acceptance_histogram) - histogram
    assert (left_out >= 0).all() and left_out.sum() <= 7  # the rounds that the end of the text may have cut
    assert found.accepted[:, -1].mean() > 0.5
    assert (np.diff(found.accepted, axis=1) >= 0).all()  # eagle3: a later end has the earlier tree's best paths
    assert (found.accepted[:, :5] <= np.array(DEPTHS) + 1).all()
    assert np.isfinite(found.confidence).all() and (np.diff(found.confidence, axis=1) <= 0).all()


def test_auc_counts_pairs():
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores, labels = rng.integers(0, 6, 30) / 5, rng.random(30) < 0.4
        wins = [(a > b) + (a == b) / 2 for a in scores[labels] for b in scores[~labels]]
        assert auc(scores, labels) == pytest.approx(np.mean(wins))
    assert np.isnan(auc(np.ones(3), np.ones(3, bool)))


def test_the_choice_is_the_best_of_all_on_two_gates():
    """One gate: every threshold tried. Two gates: at least as good as each alone, and as recorded."""
    R, rng = 60, np.random.default_rng(1)
    accepted = np.sort(rng.integers(0, 6, (R, 3)), axis=1)
    confidence = np.clip(accepted[:, -1:] / 6 + rng.normal(0, 0.2, (R, 2)), 0, 1)
    seconds = np.array([1.0, 1.3, 2.0])

    def speed(gates, thresholds):
        end = ends(confidence, gates, np.array(thresholds))
        return (accepted[np.arange(R), end] + 1).sum() / seconds[end].sum()

    found = choose(Record(confidence, accepted), (0, 1), seconds, min_auc=0.5)
    assert found.speed == pytest.approx(speed(found.gates, found.thresholds))
    assert found.open_speed == pytest.approx(speed((), ()))
    values = [(OPEN, *confidence[:, i]) for i in range(2)]
    alone = [max(speed((i,), (value,)) for value in values[i]) for i in range(2)]
    assert found.speed >= max(alone) - 1e-12 > found.open_speed
    best = max(speed((0, 1), pair) for pair in itertools.product(*values))
    assert found.speed > 0.98 * best
    dropped = choose(Record(confidence, accepted), (0, 1), seconds, min_auc=1.0)
    assert dropped.gates == () and dropped.speed == dropped.open_speed


def test_a_round_ends_at_its_first_closed_gate():
    confidence = np.array([[0.1, 0.9], [0.5, 0.1], [0.5, 0.9]])
    assert ends(confidence, (0, 1), np.array([0.2, 0.3])).tolist() == [0, 1, 2]
    assert ends(confidence, (1,), np.array([CLOSED])).tolist() == [1, 1, 1]


@pytest.mark.parametrize("method", ["graft", "eagle3"])
def test_the_command_writes_what_generate_reads(capsys, tmp_path, method):
    prompts, out, memory = tmp_path / "prompts.jsonl", tmp_path / "calibration.json", tmp_path / "memory.npz"
    prompts.write_text(
        "".join(json.dumps({"prompt": [int(t) for t in p]}) + "\n" for p in toy.safe_prompts("llama", 3))
    )
    model = [
        "--model", str(toy.FOLDER / "llama"), "--drafter", str(toy.FOLDER / "llama-eagle3"), "--dtype", "float32",
        "--max-length", "256", "--method", method,
    ]  # fmt: skip
    status = cli.main(["calibrate", str(out), "--prompts", str(prompts), "--rounds", "3", "--max-new-tokens", "48",
                       *model, "--save-memory", str(memory), "--json"])  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert status == 0 and report["recorded_rounds"] > 10 and len(report["auc"]) == len(report["round_ms"]) - 1 == 5
    assert read_calibration(out, method)["gates"] == tuple(report["gates"])
    prompt = ",".join(str(int(t)) for t in toy.safe_prompts("llama", 1)[0])
    table = ["--memory", str(memory)] if method == "graft" else []
    status = cli.main(["generate", *model, "--prompt-ids", prompt, "--calibration", str(out), "--compare", "--json",
                       "--max-new-tokens", "48", *table])  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert status == 0 and found["compare"]["equal"]
    (result,) = found["results"]
    assert result["stats"]["mean_acceptance_length"] > 1.3
    assert result["stats"]["policy"]["thresholds"] == pytest.approx(report["thresholds"], abs=1e-5)
    other = {"graft": "eagle3", "eagle3": "graft"}[method]
    with pytest.raises(ValueError, match=f"was made for method '{method}'"):
        read_calibration(out, other)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rounds", "9"], "--rounds 9 must be between 1 and the 1 prompts"),
        (["--method", "recycling"], "--method recycling has no gates"),
        (["--no-prune"], "has no gates"),
        (["--thresholds", "0.1"], "--thresholds are what this command chooses"),
        (["--min-auc", "2"], "--min-auc 2.0"),
        (["--max-new-tokens", "3"], "nothing to calibrate on"),
    ],
)
def test_bad_input(capsys, tmp_path, args, message):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "calibration.json"
    prompts.write_text('{"prompt": [5, 6, 7]}\n')
    status = cli.main(
        ["calibrate", str(out), "--prompts", str(prompts), "--rounds", "1", "--model", str(toy.FOLDER / "llama"),
         "--drafter", str(toy.FOLDER / "llama-eagle3"), "--dtype", "float32", "--max-length", "64", *args]
    )  # fmt: skip
    assert status == 2 and message in capsys.readouterr().err.replace("\n", " ") and not out.exists()
