"""The target writes its own data: resumable, filtered, and shaped as training wants it."""

import json

import pytest

from graft_jax import cli
from graft_jax.engine import SpeculativeDecoder
from graft_jax.training import self_write, shards

pytestmark = pytest.mark.heavy
SETTINGS = self_write.Settings(batch=4, turn_tokens=24, answer_tokens=16, temperatures=(0.0, 0.7), seed=3)
TOPICS = ["Write a Python function that", "What is 15% of"]


@pytest.fixture(scope="module")
def decoder():
    return SpeculativeDecoder.from_pretrained(method="ar", max_length=144)


def test_it_writes_turns_on_the_topics_and_answers_them(decoder):
    batches = list(self_write.self_instruct(decoder, 8, TOPICS, SETTINGS))
    assert len(batches) == 2
    items = batches[0] + batches[1]
    assert items and {item["temperature"] for item in items} <= {0.0, 0.7}
    tokenizer = decoder.tokenizer
    for item in items:
        text = tokenizer.decode(item["prompt_ids"], skip_special_tokens=False)
        assert any(f"<|im_start|>user\n{topic}" in text for topic in TOPICS) and text.endswith("assistant\n")
        assert 1 < len(item["response_ids"]) <= 16
    greedy = batches[0][0]
    again = decoder.generate(greedy["prompt_ids"], max_new_tokens=16)
    assert again.token_ids[:4] == greedy["response_ids"][:4]  # bfloat16 batches may part later


def test_a_stopped_writer_goes_on_with_the_same_texts(decoder, tmp_path):
    def run(path, stop_after=None):
        def batches(start):
            for i, batch in enumerate(self_write.self_instruct(decoder, 8, TOPICS, SETTINGS, start)):
                if stop_after == i:
                    raise KeyboardInterrupt
                yield batch

        self_write.write_all(path, batches, lambda batches, tokens: None)

    run(tmp_path / "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts.jsonl", stop_after=1)
    with open(tmp_path / "parts.jsonl", "a") as file:
        file.write('{"prompt_ids": [1')  # a batch that was cut off
    run(tmp_path / "parts.jsonl")
    assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes() != b""


def test_no_batch_is_begun_that_would_end_too_late(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(self_write.time, "perf_counter", lambda: now)

    def batches(start):
        nonlocal now
        for i in range(start, 50):
            now += 10.0
            yield [{"prompt_ids": [1], "response_ids": [i]}]

    done = []
    self_write.write_all(tmp_path / "a.jsonl", batches, lambda n, tokens: done.append(n), until=135.0)
    assert done == [1, 2, 3]  # at 130 the fourth would end at 140
    self_write.write_all(tmp_path / "a.jsonl", batches, lambda n, tokens: done.append(n), until=0.0)
    assert done == [1, 2, 3, 4] and len((tmp_path / "a.jsonl").read_text().splitlines()) == 4


def test_prepare_self_instructs_and_regenerates(tmp_path):
    (tmp_path / "topics.txt").write_text("# a comment\nTell me about\n")
    command = ["prepare", "--length", "96", "--held-out", "0", "--batch", "4", "--answer-tokens", "16", "--keep-loops"]
    assert cli.main([*command, "--self-instruct", "4", "--topics", str(tmp_path / "topics.txt"),
                     "--out", str(tmp_path / "own")]) == 0  # fmt: skip
    assert shards.read(tmp_path / "own", "train").mask.any()
    talk = {"messages": [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Old answer."}]}
    (tmp_path / "talks.jsonl").write_text(json.dumps(talk) + "\n")
    assert cli.main([*command, str(tmp_path / "talks.jsonl"), "--regenerate", "--out", str(tmp_path / "new")]) == 0
    (item,) = map(json.loads, (tmp_path / "new.answers.jsonl").read_text().splitlines())
    tokenizer = SpeculativeDecoder.from_pretrained(method="ar").tokenizer
    assert "Hi there" in tokenizer.decode(item["prompt_ids"]) and "Old" not in tokenizer.decode(item["response_ids"])
