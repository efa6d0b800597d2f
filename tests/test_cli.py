"""The command line: one JSON object on stdout, clear errors, exit statuses."""

import argparse
import json
import shutil
import subprocess
import sys

import pytest
import toy

from graft_jax import arguments, cli

MODEL = str(toy.FOLDER / "llama")
PROMPT = ",".join(map(str, toy.safe_prompts("llama", 1)[0]))


def run(capsys, *args):
    status = cli.main(list(args))
    out, err = capsys.readouterr()
    return status, out, err


def test_generate_json_with_comparison(capsys):
    status, out, err = run(
        capsys, "generate", "--model", MODEL, "--prompt-ids", PROMPT, "--dtype", "float32", "--method", "recycling",
        "--max-length", "256", "--max-new-tokens", "200", "--ignore-eos", "--compare", "--json",
    )  # fmt: skip
    assert status == 0
    report = json.loads(out)
    assert out.count("\n") == 1
    assert set(report) == {"results", "method", "model", "dtype", "device", "versions", "compare"}
    (result,) = report["results"]
    assert set(result) == {"prompt_tokens", "token_ids", "text", "finish_reason", "stats"}
    assert result["finish_reason"] == "length" and len(result["token_ids"]) == 200
    assert result["stats"]["mean_acceptance_length"] > 1.3
    assert report["compare"]["equal"] is True and report["compare"]["first_difference"] is None
    assert report["compare"]["speedup"] > 0


def test_generate_for_people(capsys):
    status, out, err = run(
        capsys, "generate", "--model", MODEL, "--prompt-ids", PROMPT, "--dtype", "float32", "--method", "ar",
        "--max-length", "128", "--max-new-tokens", "5",
    )  # fmt: skip
    assert status == 0 and len(out.split()) == 5 and out.startswith("t")
    assert "mean acceptance length" in err and "1.00" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt-ids", "5,6", "--method", "recyclin"], "did you mean 'recycling'"),
        (["--prompt-ids", "5,x"], "--prompt-ids '5,x'"),
        (["--prompt-ids", "5,999"], "999"),
        (["--prompt-ids", "5", "--temperature", "-1"], "temperature=-1.0"),
        (["--prompt-ids", "5", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--prompt-ids", "5", "--dtype", "int8"], "int8"),
        (["--prompt-ids", "5", "--budget", "0"], "budget=0"),
        (["--prompt-ids", "5", "--template", "wide"], "template='wide'"),
        ([], "one of PROMPT"),
        (["text", "--prompt-ids", "5"], "one of PROMPT"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, args, message):
    status, out, err = run(capsys, "generate", "--model", MODEL, "--max-length", "64", *args)
    assert status == 2 and out == ""
    assert message in err and err.startswith("graft-jax: ") and err.count("\n") == 1


def test_without_a_tokenizer_there_are_ids_and_no_text(capsys, tmp_path):
    folder = tmp_path / "bare"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    args = ["generate", "--model", str(folder), "--dtype", "float32", "--method", "ar", "--max-new-tokens", "5"]
    status, out, err = run(capsys, *args, "--max-length", "64", "text")
    assert status == 2 and "no tokenizer" in err
    status, out, err = run(capsys, *args, "--max-length", "64", "--prompt-ids", PROMPT)
    assert status == 0 and out.strip() == ""


def test_unknown_model_names_the_nearest(capsys):
    status, out, err = run(capsys, "generate", "hi", "--model", "smollm2")
    assert status == 2 and "did you mean 'smollm2-135m'" in err


def test_bad_usage_is_status_2():
    done = subprocess.run(
        [sys.executable, "-m", "graft_jax.cli", "generate", "--max-new-tokens", "many", "hi"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == "" and "invalid int value" in done.stderr


def test_info(capsys):
    status, out, err = run(capsys, "info", "--json")
    report = json.loads(out)
    assert status == 0 and {"device", "versions", "compilation_cache", "models", "methods"} <= set(report)
    assert set(report["methods"]) >= {"ar", "recycling"}
    assert run(capsys, "info")[0] == 0


HEAD = [
    "--model", MODEL, "--drafter", f"{MODEL}-eagle3", "--dtype", "float32", "--max-length", "256",
    "--max-new-tokens", "60", "--prompt-ids", PROMPT, "--ignore-eos", "--compare", "--json",
]  # fmt: skip
ABLATIONS = {
    "eagle3": ["--method", "eagle3"],
    "ECHO": ["--method", "eagle3", "--gates", "0,1,3", "--thresholds", "0.3,0.2,0.1"],
    "graft": ["--method", "graft"],
    "one-token table, the paper's templates": [
        "--method", "graft", "--table-order", "1", "--template", "graft", "--budget", "20", "--draft-top-k", "6"
    ],
    "without retrieval": ["--method", "graft", "--no-retrieval"],
    "at the root": ["--method", "graft", "--no-prune"],
    "at the tail": ["--method", "graft", "--no-prune", "--attach", "tail"],
}  # fmt: skip


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_a_draft_head(capsys, ablation):
    status, out, _ = run(capsys, "generate", *HEAD, *ABLATIONS[ablation])
    report = json.loads(out)
    assert status == 0 and report["compare"]["equal"] is True
    assert report["results"][0]["stats"]["mean_acceptance_length"] > 1.3


@pytest.mark.heavy
def test_the_packaged_model(capsys):
    """The real model with its own head and table, float32: equal outputs, real acceptance, no special tokens."""
    prompt = "Count from one to twenty, then count from one to twenty again."
    args = ["generate", prompt, "--method", "graft", "--dtype", "float32", "--max-length", "512", "--max-new-tokens",
            "96", "--json"]  # fmt: skip
    status, out, err = run(capsys, *args, "--compare")
    report = json.loads(out)
    (result,) = report["results"]
    assert status == 0
    assert report["compare"]["equal"] or report["compare"]["margin"] < 1e-3
    assert result["stats"]["mean_acceptance_length"] > 1.3
    assert result["text"] and "<|im_" not in result["text"]
    # A stop text that spans tokens cuts the answer before its first occurrence.
    stop = result["text"][10:17]
    (cut,) = json.loads(run(capsys, *args, "--stop", stop)[1])["results"]
    assert cut["text"] == result["text"][: result["text"].find(stop)] and cut["finish_reason"] == "stop"
    assert cut["token_ids"] == result["token_ids"][: len(cut["token_ids"])]


FAST = ["--model", MODEL, "--dtype", "float32", "--max-length", "128", "--max-new-tokens", "6", "--method", "ar"]


def test_prompts_file_resumes_without_repeating_or_losing(capsys, tmp_path):
    source, out = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts = toy.safe_prompts("llama", 3)
    lines = [json.dumps({"prompt": prompt, "question_id": i}) for i, prompt in enumerate(prompts)]
    lines.insert(1, json.dumps({"prompt": [5] * 200}))
    source.write_text("\n".join(lines) + "\n")
    status, _, err = run(capsys, "generate", *FAST, "--prompts", str(source), "--out", str(out))
    assert status == 1 and "line 2" in err  # too long a prompt fails alone
    whole = [json.loads(line) for line in out.read_text().splitlines()]
    assert [item["line"] for item in whole] == [1, 2, 3, 4] and "error" in whole[1]
    assert [item.get("question_id") for item in whole] == [0, None, 1, 2]
    # A run that was killed while writing its third line goes on there.
    text = out.read_text().splitlines(keepends=True)
    out.write_text("".join(text[:2]) + text[2][:40])
    status, _, err = run(capsys, "generate", *FAST, "--prompts", str(source), "--out", str(out))
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert status == 0 and "2 of 4" in err

    def tokens(items):
        return [[r["token_ids"] for r in item.get("results", [])] for item in items]

    assert tokens(again) == tokens(whole)


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "prompts.jsonl:2: no JSON"), ("[1]", "prompts.jsonl:2: needs"), ('{"turns": []}', "prompts.jsonl:2: turns"),
     ('{"prompt": 3}', "prompts.jsonl:2: prompt"), ('{"messages": [{}]}', "prompts.jsonl:2: messages"),
     ('{"prompt": "a", "turns": ["b"]}', "prompts.jsonl:2: needs")],
)  # fmt: skip
def test_a_broken_line_is_named(capsys, tmp_path, line, message):
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": [5]}\n' + line + "\n")
    status, out, err = run(capsys, "generate", *FAST, "--prompts", str(source))
    assert status == 2 and out == "" and message in err


def test_template_args_are_parsed():
    def parse(pairs):
        return arguments.template(argparse.Namespace(system=None, raw=False, template_arg=pairs))["template_args"]

    assert parse(["enable_thinking=false", "name=Bo", "n=3"]) == {"enable_thinking": False, "name": "Bo", "n": 3}
    with pytest.raises(ValueError, match="NAME=VALUE"):
        parse(["thinking"])


def test_convert_round_trips(capsys, tmp_path):
    status, out, err = run(capsys, "convert", MODEL, "--dry-run")
    assert status == 0 and "model.embed_tokens.weight" in out and not list(tmp_path.iterdir())
    status, _, err = run(capsys, "convert", MODEL, str(tmp_path / "copy"), "--dtype", "bfloat16")
    assert status == 0
    import safetensors.numpy

    first = safetensors.numpy.load_file(toy.FOLDER / "llama" / "model.safetensors")
    second = safetensors.numpy.load_file(tmp_path / "copy" / "model.safetensors")
    assert first.keys() == second.keys()
    assert all((first[name].view("uint16") == second[name].view("uint16")).all() for name in first)
    status, _, err = run(capsys, "convert", MODEL, str(tmp_path / "copy"))
    assert status == 2 and "exists already" in err
    assert run(capsys, "convert", MODEL)[0] == 2
