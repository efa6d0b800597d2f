"""Training data: masks, bad lines, filters, packing, shards."""

import gzip
import json

import numpy as np
import pytest
import toy

from graft_jax import cli
from graft_jax.io.checkpoint import open_checkpoint
from graft_jax.training import data, shards
from graft_jax.training.data import Document

TALK = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "That makes five.\n"},
]
MODEL = str(toy.FOLDER / "llama")


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint("smollm2-135m")


@pytest.mark.heavy
@pytest.mark.parametrize("template", [None, "vicuna"])
def test_the_mask_is_what_the_assistant_says_without_generation_marks(checkpoint, template):
    tokenizer = checkpoint.tokenizer if template is None else checkpoint.tokenizer.with_chat_template(template)
    document = data.from_messages(TALK, tokenizer)
    said = tokenizer.decode(document.ids[document.mask], skip_special_tokens=False)
    # The ends of the turns too: the model has to say them.
    assert said.split() == (
        "It is four.<|im_end|>That makes five. <|im_end|>" if template is None else
        "It is four.<|im_end|> That makes five. <|im_end|>"
    ).split()  # fmt: skip
    np.testing.assert_array_equal(document.ids, tokenizer.encode(tokenizer.render_chat(TALK, False), False))
    assert 0 < document.mask.sum() < len(document.mask)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "template, messages, message",
    [
        (None, TALK[:1], "no assistant's turn"),
        (None, [TALK[0], {"role": "assistant", "content": " "}], "turn is empty"),
        # It drops all but the last turn.
        ("{{ messages[-1]['content'] }}{% if add_generation_prompt %}A:{% endif %}", TALK, "rewrites earlier turns"),
    ],
)
def test_an_answer_that_cannot_be_told_is_an_error(checkpoint, template, messages, message):
    tokenizer = checkpoint.tokenizer if template is None else checkpoint.tokenizer.with_chat_template(template)
    with pytest.raises(ValueError, match=message):
        data.from_messages(messages, tokenizer)


@pytest.mark.heavy
def test_all_kinds_of_lines_and_their_errors(checkpoint, tmp_path):
    share_gpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    good = [
        {"messages": TALK},
        {"conversations": share_gpt},
        {"text": "Plain."},
        {"prompt_ids": [1], "response_ids": [5, 2]},
    ]
    bad = ["{", "[]", '{"messages": []}', '{"prompt_ids": [1], "response_ids": []}', '{"prompt_ids": [99999999]}', "{}"]
    path = tmp_path / "mixed.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("\n".join([*map(json.dumps, good), "", *bad]))
    messages = []
    read = list(
        data.read_documents(path, checkpoint.tokenizer, checkpoint.config, on_bad_line="skip", report=messages.append)
    )
    assert len(read) == 4 and read[3].ids.tolist() == [1, 5, 2] and read[3].mask.tolist() == [False, True, True]
    assert [int(m.split("jsonl.gz:")[1].split(":")[0]) for m in messages] == [6, 7, 8, 9, 10, 11]
    with pytest.raises(ValueError, match="jsonl.gz:6: "):
        list(data.read_documents(path, checkpoint.tokenizer, checkpoint.config))
    (tmp_path / "book.txt").write_text("Once upon a time.\nThe end.")
    (whole,) = data.read_documents(tmp_path / "book.txt", checkpoint.tokenizer, checkpoint.config)
    assert whole.mask.all() and len(whole.ids) > 6


def document(*ids: int) -> Document:
    return Document(np.array(ids, np.int32), np.arange(len(ids)) > 0)


def test_duplicates_and_loops_go():
    rng = np.random.default_rng(0)
    fine = [document(*rng.integers(0, 50, 20)) for _ in range(3)]
    looping = document(*([1, 2, 3] * 10))
    kept, counts = data.select(iter([*fine, fine[0], looping]))
    assert [d.digest for d in kept] == [d.digest for d in fine]
    assert counts == {"kept": 3, "duplicates": 1, "loops": 1}
    assert len(data.select(iter([looping]), keep_loops=True)[0]) == 1


def test_packing_keeps_every_text_whole_and_full_rows():
    rng = np.random.default_rng(1)
    documents = [document(*rng.integers(1, 300, rng.integers(5, 90))) for _ in range(200)]
    rows, cut = shards.pack(documents, 64, seed=3)
    assert cut == sum(max(0, len(d.ids) - 64) for d in documents)
    found = sorted(
        (row[segments == s].tolist(), mask[segments == s].tolist())
        for row, segments, mask in zip(rows.tokens, rows.segments, rows.mask)
        for s in range(1, segments.max() + 1)
    )
    assert found == sorted((d.ids[:64].tolist(), d.mask[:64].tolist()) for d in documents)
    assert (rows.segments > 0).mean() > 0.9
    again, _ = shards.pack(documents[::-1], 64, seed=3)  # the order of the input does not matter
    np.testing.assert_array_equal(rows.tokens, again.tokens)
    other, _ = shards.pack(documents, 64, seed=4)
    assert (rows.tokens != other.tokens).any()


def write_lines(path, count: int = 60, seed: int = 0):
    rng = np.random.default_rng(seed)
    rows = toy.Language(0).rows(rng, count, 40)[0]
    path.write_text(
        "".join(json.dumps({"prompt_ids": r[:8].tolist(), "response_ids": r[8:].tolist()}) + "\n" for r in rows)
    )
    return path


def test_prepare_writes_the_same_shards_and_refuses_what_is_empty_or_broken(tmp_path, capsys):
    lines = write_lines(tmp_path / "a.jsonl")
    command = ["prepare", str(lines), "--model", MODEL, "--length", "64", "--held-out", "0.2", "--keep-loops"]
    for name in ("one", "two"):
        assert cli.main([*command, "--out", str(tmp_path / name)]) == 0
    manifest = shards.read_manifest(tmp_path / "one")
    assert manifest == shards.read_manifest(tmp_path / "two")
    train, held = shards.read(tmp_path / "one", "train"), shards.read(tmp_path / "one", "held_out")
    assert manifest["splits"]["train"]["tokens"] == int((train.segments > 0).sum()) and len(held) > 0
    assert manifest["kept"] == 60

    def error(*arguments: str) -> str:
        capsys.readouterr()
        assert cli.main([*command, *arguments]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "exists already" in error("--out", str(tmp_path / "one"))
    (tmp_path / "empty.jsonl").write_text("\n")
    command[1] = str(tmp_path / "empty.jsonl")
    assert "no text is left" in error("--out", str(tmp_path / "three"))
    (tmp_path / "bad.jsonl").write_text('{"prompt_ids": [1], "response_ids": [2]}\n{"text": 3}\n')
    command[1] = str(tmp_path / "bad.jsonl")
    assert "bad.jsonl:2:" in error("--out", str(tmp_path / "three"))
    assert not (tmp_path / "three").exists()
    shard = tmp_path / "one" / manifest["splits"]["train"]["shards"][0]["file"]
    content = dict(np.load(shard))
    content["tokens"][0, 0] += 1
    np.savez_compressed(shard, **content)
    with pytest.raises(ValueError, match="differs from what manifest.json says"):
        shards.read(tmp_path / "one", "train")
