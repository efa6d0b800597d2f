"""Text to ids and back, streaming, chat templates; without torch and transformers."""

import datetime
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import NUM_TOKENS, byte_tokenizer, write_tokenizer

from graft_jax.chat import ChatTemplate
from graft_jax.io import gguf, hub, tokenizer_build
from graft_jax.tokenizer import Tokenizer

TEXTS = [
    "Hello world", " leading", "trailing ", "  two  spaces\n\n\n x", "def f(x):\n\treturn x**2  # 1234567",
    "Ünïcödé e\u0301", "日本語のテキスト、中文字符。", "한국어", "مرحبا بالعالم", "שלום",
    "😀👩\u200d👩\u200d👧\u200d👦🇩🇪 ok", "it's I'M we'LL",
    "\r\n\r\n a\r b", "12 345 6789 ½ ²", "a\u200bb\ufeffc\x00d", "\ufffd", "https://x.y/z?q=1&r=%20", "",
]  # fmt: skip


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    path = hub.resolve("smollm2-135m")
    return Tokenizer.from_gguf(gguf.open_file(path).metadata, str(path))


def bytes_of(size: int = NUM_TOKENS, template: str | None = None) -> Tokenizer:
    return Tokenizer(byte_tokenizer(size), {"eos_token": "<|im_end|>"}, template, "here")


# SentencePiece: pieces with scores; a longer piece is not always better.
PIECES = ["▁", *"abcdeth", "ab", "▁a", "▁ab", "bc", "abc", "th", "▁th", "the", "▁the", "de", "cde", "▁▁", "é"]
SP_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *PIECES]
SP_TYPES = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
SP_SCORES = [0.0] * 259 + [-float((7 * i) % len(PIECES)) for i in range(len(PIECES))]


def sp_metadata(**changes):
    keys = {"model": "llama", "tokens": SP_TOKENS, "scores": SP_SCORES, "token_type": SP_TYPES}
    keys |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items()}


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf(sp_metadata(), "x.gguf")


def sentencepiece_oracle(text: str) -> list[int]:
    """Merge the neighbours whose union scores best, leftmost first; bytes for what is in no piece."""
    ids = {token: i for i, token in enumerate(SP_TOKENS)}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        unions = [(SP_SCORES[ids[a + b]], -i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ids]
        if not unions:
            break
        at = -max(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [j for part in parts for j in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]


class TestEncoding:
    @pytest.mark.parametrize("text", TEXTS)
    def test_there_and_back(self, smollm2, text):
        assert smollm2.decode(smollm2.encode(text)) == text
        assert bytes_of().decode(bytes_of().encode(text)) == text

    @given(st.text())
    @settings(deadline=None)
    def test_any_text_there_and_back(self, text):
        tokenizer = bytes_of()  # SmolLM2 has no token for some bytes of rare characters
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_smollm2(self, smollm2):
        # Digits stand alone, the text's special tokens are recognised, no first token is added.
        assert smollm2.encode("Why is it? 12<|im_end|>") == [4898, 314, 357, 47, 216, 33, 34, 2]
        assert smollm2.num_tokens == 49152
        assert smollm2.stop_ids == (2, 0)  # <|im_end|> and <|endoftext|>
        assert smollm2.decode([2, 4898, 2]) == "Why" and smollm2.decode([2, 4898], False) == "<|im_end|>Why"

    @given(st.text(alphabet="abcdeth é🙂", max_size=12))
    @settings(deadline=None, max_examples=300)
    def test_sentencepiece(self, sentencepiece, text):
        assert sentencepiece.encode(text, add_special_tokens=False) == sentencepiece_oracle(text)
        assert sentencepiece.encode(text) == [1, *sentencepiece_oracle(text)]
        assert sentencepiece.decode(sentencepiece.encode(text)) == text

    def test_a_space_goes_before_each_piece_of_text(self, sentencepiece):
        the = SP_TOKENS.index("▁the")
        assert sentencepiece.encode("<s>the</s>the", add_special_tokens=False) == [1, the, 2, the]

    @pytest.mark.parametrize("text, at", [("a\ud800", 1), ("\udfffb", 0)])
    def test_lone_surrogates(self, text, at):
        with pytest.raises(ValueError, match=f"lone surrogate .* at position {at}"):
            bytes_of().encode(text)

    @pytest.mark.parametrize("text", [b"x", None, 3, ["x"]])
    def test_only_text(self, text):
        with pytest.raises(ValueError, match="must be a str"):
            bytes_of().encode(text)

    def test_padding_and_truncation_of_the_file_are_off(self):
        backend = byte_tokenizer()
        backend.enable_truncation(3)
        backend.enable_padding(length=50)
        assert len(Tokenizer(backend, {}, None, "here").encode("a long text")) == 11


class TestFromGGUF:
    @staticmethod
    def pieces(pre: str, text: str) -> list[str]:
        metadata = {
            "model": "gpt2",
            "pre": pre,
            "tokens": ["a", "aa"],
            "token_type": [1, 1],
            "merges": ["a a"],
        }
        backend = tokenizer_build.from_gguf({f"tokenizer.ggml.{k}": v for k, v in metadata.items()}, "x")[0]
        return [piece.replace("Ġ", "_") for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]

    @pytest.mark.parametrize(
        "pre, expected",
        [
            ("gpt-2", "It 's _1234 _x (); _"),
            ("smollm", "It 's _ 1 2 3 4 _x (); _"),
            ("llama-bpe", "It 's _ 123 4 _x (); _"),
            ("qwen2", "It 's _ 1 2 3 4 _x (); _"),
        ],
    )
    def test_how_text_is_cut(self, pre, expected):
        assert self.pieces(pre, "It's 1234 x(); ") == expected.split(" ")

    def test_unused_entries_are_no_tokens(self):
        metadata = sp_metadata()
        metadata["tokenizer.ggml.tokens"] = [*SP_TOKENS, "[PAD1]", "[PAD2]"]
        metadata["tokenizer.ggml.token_type"] = [*SP_TYPES, 5, 5]
        metadata["tokenizer.ggml.scores"] = [*SP_SCORES, 0.0, 0.0]
        assert Tokenizer.from_gguf(metadata, "x").num_tokens == len(SP_TOKENS)

    @pytest.mark.parametrize(
        "flags, expected",
        [
            ({}, (True, False)),
            ({"add_bos_token": False}, (False, False)),
            ({"add_eos_token": True}, (True, True)),
        ],
    )
    def test_first_and_last_token(self, flags, expected):
        ids = Tokenizer.from_gguf(sp_metadata(**flags), "x").encode("ab")
        assert (ids[0] == 1, ids[-1] == 2) == expected

    def test_none_without_a_tokenizer(self):
        assert Tokenizer.from_gguf({"general.architecture": "llama"}, "x") is None


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def field(number: int, value: bytes | int | float) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sp_model(model_type: int = 2, extra_whitespace: int = 0) -> bytes:
    pieces = b"".join(
        field(1, field(1, token.encode()) + field(2, score) + (b"" if kind == 1 else field(3, kind)))
        for token, score, kind in zip(SP_TOKENS, SP_SCORES, SP_TYPES)
    )
    return pieces + field(2, field(3, model_type)) + field(3, field(1, b"identity") + field(4, extra_whitespace))


class TestFromFolder:
    def test_tokenizer_json(self, tmp_path):
        write_tokenizer(tmp_path, bos_token={"content": "<|im_start|>"}, chat_template="{{ bos_token }}")
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert tokenizer.num_tokens == NUM_TOKENS
        assert tokenizer.stop_ids == (tokenizer.encode("<|im_end|>")[0],)
        assert tokenizer.apply_chat_template([{"role": "user", "content": ""}]) == tokenizer.encode("<|im_start|>")

    def test_nothing_there(self, tmp_path):
        assert Tokenizer.from_folder(tmp_path) is None

    def test_sentencepiece_model(self, tmp_path, sentencepiece):
        (tmp_path / "tokenizer.model").write_bytes(sp_model())
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert tokenizer.stop_ids == (2,) and tokenizer.num_tokens == len(SP_TOKENS)
        for text in ("the abc", "  thé 🙂", ""):
            assert tokenizer.encode(text) == sentencepiece.encode(text)
        (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "add_eos_token": true}')
        assert Tokenizer.from_folder(tmp_path).encode("a") == [*sentencepiece.encode("a")[1:], 2]

    def test_sentencepiece_without_legacy(self, tmp_path):
        (tmp_path / "tokenizer.model").write_bytes(sp_model())
        (tmp_path / "tokenizer_config.json").write_text('{"legacy": false}')
        found = Tokenizer.from_folder(tmp_path).encode("the</s>the", add_special_tokens=False)
        assert found == [SP_TOKENS.index(token) for token in ("▁the", "</s>", "the")]

    @pytest.mark.parametrize(
        "content, word",
        [
            (sp_model(model_type=1), "model_type 1"),
            (sp_model(extra_whitespace=1), "remove_extra_whitespaces"),
            (sp_model()[:-3], "no valid"),
            (b"", "no pieces"),
            (b"\xff" * 50, "no valid"),
            (b"\x0a\x7fabc", "cut off"),
        ],
        ids=["unigram", "whitespace", "cut", "empty", "garbage", "short"],
    )
    def test_other_models_are_refused(self, tmp_path, content, word):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ValueError, match="tokenizer.model.*" + word):
            Tokenizer.from_folder(tmp_path)

    @pytest.mark.parametrize(
        "config", [{"chat_template": "a"}, {"chat_template": [{"name": "default", "template": "a"}]}]
    )
    def test_where_the_template_stands(self, tmp_path, config):
        write_tokenizer(tmp_path, **config)
        assert Tokenizer.from_folder(tmp_path).render_chat([{"role": "user"}]) == "a"
        (tmp_path / "chat_template.jinja").write_text("b")
        assert Tokenizer.from_folder(tmp_path).render_chat([{"role": "user"}]) == "b"

    def test_save(self, tmp_path, sentencepiece):
        for i, tokenizer in enumerate(
            [bytes_of(template="{{ eos_token }}é"), sentencepiece, bytes_of(template="vicuna")]
        ):
            (tmp_path / str(i)).mkdir()
            tokenizer.save(tmp_path / str(i))
            again = Tokenizer.from_folder(tmp_path / str(i))
            assert again.special == tokenizer.special and again.stop_ids == tokenizer.stop_ids
            assert again.has_chat_template == tokenizer.has_chat_template
            assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


class TestStreaming:
    def check(self, tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> list[str]:
        stream, chunks, start = tokenizer.stream(skip), [], 0
        for cut in [*sorted(cuts), len(ids)]:
            chunks.append(stream.push(ids[start:cut]))
            start = cut
        assert not any("\ufffd" in chunk and chunk.endswith("\ufffd") for chunk in chunks)
        chunks.append(stream.flush())
        assert "".join(chunks) == tokenizer.decode(ids, skip)
        return chunks

    @given(st.data())
    @settings(deadline=None, max_examples=300)
    def test_chunks_make_up_the_text(self, smollm2, sentencepiece, data):
        """Any ids at all: broken UTF-8, special tokens, runs of byte tokens."""
        tokenizer = data.draw(st.sampled_from([smollm2, sentencepiece, bytes_of()]))
        token = st.one_of(st.integers(0, tokenizer.num_tokens - 1), st.integers(0, min(tokenizer.num_tokens - 1, 400)))
        ids = data.draw(st.lists(token, max_size=20))
        cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=20))
        self.check(tokenizer, ids, cuts, data.draw(st.booleans()))

    @pytest.mark.parametrize("text", TEXTS)
    def test_texts(self, smollm2, sentencepiece, text):
        for tokenizer in (smollm2, sentencepiece, bytes_of()):
            ids = tokenizer.encode(text)
            self.check(tokenizer, ids, list(range(len(ids))), True)

    def test_a_character_comes_whole_and_at_once(self):
        tokenizer = bytes_of()
        ids = tokenizer.encode("a🙂b")
        assert self.check(tokenizer, ids, [1, 2, 3, 4, 5], True) == ["a", "", "", "", "🙂", "b", ""]


USER = [{"role": "user", "content": "Hi"}]


class TestChat:
    def render(self, source, messages=USER, **arguments):
        return ChatTemplate(source, "here").render(messages, **arguments)

    def test_smollm2(self, smollm2):
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        expected = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert smollm2.render_chat(USER) == expected
        ids = smollm2.apply_chat_template(USER)
        assert smollm2.decode(ids, False) == expected and ids[0] == 1
        assert smollm2.render_chat([{"role": "system", "content": "S"}, *USER], add_generation_prompt=False) == (
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        )

    def test_vicuna(self):
        tokenizer = Tokenizer(byte_tokenizer(), {"bos_token": "<s>", "eos_token": "</s>"}, None, "here")
        tokenizer = tokenizer.with_chat_template("vicuna")
        turns = [*USER, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "More"}]
        system = (
            "A chat between a curious user and an artificial intelligence assistant. "
            "The assistant gives helpful, detailed, and polite answers to the user's questions."
        )
        expected = f"<s>{system} USER: Hi ASSISTANT: Yo</s>USER: More ASSISTANT:"
        assert tokenizer.render_chat(turns) == expected
        own = [{"role": "system", "content": "Be brief."}, *USER]
        assert tokenizer.render_chat(own, add_generation_prompt=False) == "<s>Be brief. USER: Hi "
        with pytest.raises(ValueError, match="user and assistant must take turns"):
            tokenizer.render_chat([USER[0], USER[0]])

    def test_blocks_leave_no_lines(self):
        assert (
            self.render("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n")
            == "user\n"
        )

    def test_generation_marks_are_passed_over(self):
        assert self.render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHib"

    def test_tojson_escapes_nothing(self):
        assert self.render("{{ x | tojson }}", x={"a": "<é>"}) == json.dumps({"a": "<é>"}, ensure_ascii=False)
        assert self.render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"

    def test_helpers(self):
        assert self.render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
        assert self.render("{% for m in [1, 2] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
        assert self.render("{{ tools }} {{ documents }}") == "None None"
        assert self.render("{% if not enable_thinking %}no{% endif %}", enable_thinking=False) == "no"
        assert self.render("{{ messages[0]['content'].strip().split('i')[0] }}") == "H"

    @pytest.mark.parametrize(
        "source, message",
        [
            ("{{ raise_exception('only pairs') }}", "here: the chat template failed: only pairs"),
            ("{{ messages[0].zap.zup }}", "here: the chat template failed: .*zap"),
            ("{{ 1 / 0 }}", "here: the chat template failed: division by zero"),
            ("{{ messages[7]['content'] + 'x' }}", "here: the chat template failed"),
            ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "here: the chat template failed"),
            ("{{ messages.append(1) }}", "here: the chat template failed: .*unsafe"),
            ("{% if %}", "here: the chat template is broken"),
            ("{% generation %}", "here: the chat template is broken"),
        ],
    )
    def test_failures(self, source, message):
        with pytest.raises(ValueError, match=message):
            self.render(source)

    @pytest.mark.parametrize(
        "messages, word",
        [
            ([], "messages"),
            ("Hi", "messages"),
            (None, "messages"),
            ([{"content": "x"}], "messages\\[0\\]"),
            ([*USER, 3], "messages\\[1\\]"),
            ([{"role": 1}], "role"),
        ],
    )
    def test_malformed_messages(self, messages, word):
        with pytest.raises(ValueError, match=word):
            self.render("x", messages)

    def test_no_template(self):
        assert not bytes_of().has_chat_template
        with pytest.raises(ValueError, match="here: the checkpoint has no chat template.*vicuna"):
            bytes_of().apply_chat_template(USER)
