"""The decoder that people use: prompts in, text and statistics out."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax import methods, sampling
from graft_jax.config import ModelConfig
from graft_jax.decode import MAX_STOP_TOKENS, DecodeSpec, DecodeState
from graft_jax.drafters.base import Drafter, Params
from graft_jax.io.checkpoint import load_target
from graft_jax.models.transformer import TargetParams
from graft_jax.programs import Programs, chunk_plan
from graft_jax.prompts import Prompt, encode_prompt, split_prompts
from graft_jax.results import Chunk, Generation, row_stats
from graft_jax.text import RowText
from graft_jax.tokenizer import Tokenizer
from graft_jax.tree.templates import Template
from graft_jax.types import StopReason

ROUNDS_A_SLICE = 32  # between two looks at Ctrl-C and at the clock
ROUNDS_A_CHUNK = 4  # the same while streaming
CPU_ATTENTION_BLOCK = 256  # cache entries (see `layers.attend`)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Settings of one call, checked. Fields as in `SpeculativeDecoder.generate`."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | Sequence[int] = 0
    ignore_eos: bool = False
    budget: int | None = None
    stop: str | Sequence[str] = ()

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget={self.budget} must be at least 1 node")

    @property
    def stop_strings(self) -> list[str]:
        strings = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        if not all(isinstance(string, str) and string for string in strings):
            raise ValueError(f"stop={self.stop!r} must be a text or a list of texts, none of them empty")
        return strings

    def seeds(self, batch: int) -> list[int]:
        if isinstance(self.seed, int):
            return [self.seed + i for i in range(batch)]
        if len(self.seed) != batch:
            raise ValueError(f"seed has {len(self.seed)} entries for {batch} prompts")
        return list(self.seed)

    def sampling(self, batch: int) -> sampling.Sampling:
        return sampling.make(self.seeds(batch), self.temperature, self.top_k, self.top_p, self.min_p)


class SpeculativeDecoder:
    """Generates text from a target with one drafting method.

    The drafter's memory (the retrieval table) lives on from call to call; see `reset_memory`,
    `save_memory` and `load_memory`. Calls on one decoder must not overlap.

    Args:
        config, params: the target.
        tokenizer: None works with token ids alone.
        drafter: proposes trees; `methods` builds the named ones.
        max_length: most tokens of a row, prompt and new ones together.
        method: the name that results carry.
        row_buckets: see `DecodeSpec`; only those below the drafter's capacity matter.
        name: what the model is called in results.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: TargetParams,
        tokenizer: Tokenizer | None,
        drafter: Drafter,
        *,
        max_length: int = 2048,
        method: str = "custom",
        row_buckets: tuple[int, ...] = (),
        name: str = "custom",
    ):
        self.config, self.tokenizer = config, tokenizer
        self.params = Params(target=params)
        self.method, self.name = method, name
        on_cpu = jax.default_backend() == "cpu"
        self.spec = DecodeSpec(
            config,
            drafter,
            max_length,
            row_buckets,
            attention_block=CPU_ATTENTION_BLOCK if on_cpu else 0,
            cache_dtype="float32" if on_cpu else self.dtype,
        )
        self.programs = Programs(self.spec)
        self.memory: Any = None  # what the drafter learned; donated by every call, and set again after it

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "smollm2-135m",
        *,
        method: str = "recycling",
        dtype: str = "bfloat16",
        max_length: int = 2048,
        strict_config: bool = False,
        **options: Any,
    ) -> "SpeculativeDecoder":
        """Loads a target.

        Args:
            model: a packaged name, a GGUF file, a Hugging Face folder or a hub id.
            method: a name from `methods.METHODS`.
            dtype: "bfloat16" or "float32".
            max_length: most tokens of a row, prompt and new ones together.
            strict_config: unknown keys of the model's config are errors.
            options: fields of `methods.Options`, e.g. `budget=7`.

        Raises:
            ValueError: an argument or a file is wrong; names it.
        """
        chosen = methods.get(method)
        unknown = set(options) - {field.name for field in dataclasses.fields(methods.Options)}
        if unknown:
            raise ValueError(f"unknown options {sorted(unknown)}")
        settings = methods.Options(**options)
        if max_length < 2:
            raise ValueError(f"max_length={max_length} must be at least 2 tokens")
        config, params, tokenizer = load_target(model, dtype=dtype, strict_config=strict_config)
        return cls(
            config, params, tokenizer, chosen.build(config, settings),
            max_length=max_length, method=method, row_buckets=chosen.row_buckets, name=str(model),
        )  # fmt: skip

    def with_method(self, method: str, **options: Any) -> "SpeculativeDecoder":
        """A decoder over the same weights with another method, e.g. "ar" as the baseline."""
        chosen = methods.get(method)
        return SpeculativeDecoder(
            self.config, self.params.target, self.tokenizer,
            chosen.build(self.config, methods.Options(**options)), max_length=self.spec.max_length,
            method=method, row_buckets=chosen.row_buckets, name=self.name,
        )  # fmt: skip

    @property
    def dtype(self) -> str:
        return jnp.dtype(self.params.target.dtype).name

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        system: str | None = None,
        raw: bool = False,
        template_args: Mapping[str, Any] | None = None,
        on_progress: Callable[[int], None] | None = None,
        **settings: Any,
    ) -> Any:
        """Continues one prompt or a list of them.

        Args:
            prompts: a text, a list of token ids, or a list of messages is one prompt; a list of such is
                several, decoded as one batch.
            system: a system message before text prompts.
            raw: texts are encoded as they are, without the chat template.
            template_args: variables of the chat template, e.g. `{"enable_thinking": False}`.
            on_progress: is called with the number of new tokens of the batch so far.
            settings: `max_new_tokens` (128), `temperature` (0: greedy), `top_k`, `top_p`, `min_p`, `seed`
                (an int: row i uses seed + i; or one a prompt), `ignore_eos`, `budget` (tree nodes a round
                may verify, at most the decoder's), `stop` (texts that end the answer, and are not part of it;
                they may span tokens).

        Returns:
            A `Generation` for one prompt, a list of them for several. After Ctrl-C the partial text, with
            finish_reason "interrupted".

        Raises:
            ValueError: an argument is wrong; names it.
        """
        request = Request(**settings)
        single, several = split_prompts(prompts)
        encoding: Any = {"system": system, "raw": raw, "template_args": template_args}
        ids = [encode_prompt(prompt, self.tokenizer, self.config, **encoding) for prompt in several]
        session = _Session(self, ids, request)
        with _interruptible() as interrupted:
            for _ in session.slices(ROUNDS_A_SLICE):
                if on_progress is not None:
                    on_progress(int((session.lengths - session.prompt_lengths).sum()))
                if interrupted():
                    break
        results = session.results()
        return results[0] if single else results

    def stream(
        self,
        prompt: Prompt,
        *,
        system: str | None = None,
        raw: bool = False,
        template_args: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Iterator[Chunk]:
        """Continues one prompt and yields the text as it comes; the last chunk carries the result.

        Arguments as for `generate`. The chunks' texts, put together, are the result's text.
        """
        request = Request(**settings)
        single, several = split_prompts(prompt)
        if not single:
            raise ValueError("stream takes one prompt; got a list of prompts")
        ids = encode_prompt(
            several[0], self.tokenizer, self.config, system=system, raw=raw, template_args=template_args
        )
        return self._stream(_Session(self, [ids], request))

    def _stream(self, session: "_Session") -> Iterator[Chunk]:
        with _interruptible() as interrupted:
            for _ in session.slices(ROUNDS_A_CHUNK):
                if session.running and not interrupted():
                    yield Chunk(text=session.new_text[0], token_ids=session.new_ids[0])
                    continue
                tail = session.new_text[0] + session.flush()[0]
                yield Chunk(text=tail, token_ids=session.new_ids[0], result=session.results()[0])
                return

    def margin(
        self, tokens: Sequence[int], first: int, second: int, request: Request, row: int = 0, batch: int = 1
    ) -> float:
        """How far plain decoding preferred `first` to `second` after `tokens`, noise included."""
        plain = self if self.method == "ar" else self.with_method("ar")
        request = dataclasses.replace(request, seed=[request.seeds(batch)[row]], budget=None)
        session = _Session(plain, [list(tokens)], request)
        session.prefill()
        scores = plain.programs.next_scores(plain.params, session.state)
        return float(scores[0, first] - scores[0, second])

    @property
    def policy(self) -> dict[str, Any]:
        """What results say of how tokens were drafted."""
        spec = self.spec
        return {
            "method": self.method,
            "budget": spec.drafter.capacity,
            "row_buckets": list(spec.buckets),
            "settings": _plain(spec.drafter),
        }

    def reset_memory(self) -> None:
        """Forgets what the drafter learned from earlier prompts."""
        self.memory = None

    def save_memory(self, path: str | Path) -> None:
        """Writes the drafter's memory to a .npz file."""
        leaves = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(self.memory))}
        with open(path, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **leaves)

    def load_memory(self, path: str | Path) -> None:
        """Reads what `save_memory` wrote with the same method and options.

        Raises:
            ValueError: the file fits another vocabulary or other options.
        """
        fresh = jax.eval_shape(
            lambda params: self.spec.drafter.memory(self.spec.drafter.init(params, 1, self.spec.max_length, None)),
            self.params,
        )
        wanted, tree = jax.tree.flatten(fresh)
        with np.load(path) as file:
            found = [file[name] for name in sorted(file.files, key=lambda name: int(name.split("_")[1]))]
        shapes = [(leaf.shape, leaf.dtype) for leaf in wanted]
        if [(leaf.shape, leaf.dtype) for leaf in found] != shapes:
            raise ValueError(
                f"{path}: holds arrays of shapes {[leaf.shape for leaf in found]}; "
                f"method {self.method!r} with these options needs {[shape for shape, _ in shapes]}"
            )
        self.memory = jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in found])


class _Session:
    """One batch of prompts on its way, between two host looks."""

    def __init__(self, decoder: SpeculativeDecoder, prompts: list[list[int]], request: Request):
        self.decoder, self.request = decoder, request
        spec = decoder.spec
        for ids in prompts:
            if len(ids) >= spec.max_length:
                raise ValueError(
                    f"the prompt has {len(ids)} tokens, which leaves no room for new ones: max_length={spec.max_length}"
                )
        batch = len(prompts)
        self.sampling = request.sampling(batch)
        self.prompt_lengths = np.array([len(ids) for ids in prompts])
        self._padded = np.zeros((batch, spec.cache_size), np.int32)
        for row, ids in zip(self._padded, prompts):
            row[: len(ids)] = ids
        self.stop_ids = self._stop_ids()
        names = ("prefill_seconds", "first_token_seconds", "decode_seconds", "compile_seconds")
        self.seconds: dict[str, float] = {name: 0.0 for name in names}
        self.state: DecodeState | None = None
        self.tokens = self._padded
        self.lengths = self.prompt_lengths.copy()
        self.reasons = np.full(batch, StopReason.RUNNING)
        stops, tokenizer = request.stop_strings, decoder.tokenizer
        if stops and tokenizer is None:
            raise ValueError("stop texts need a tokenizer, and the model has none")
        self.texts = [RowText(tokenizer, stops) for _ in prompts] if tokenizer else []
        self.new_ids: list[list[int]] = [[] for _ in prompts]
        self.new_text = [""] * batch

    @property
    def running(self) -> bool:
        return bool((self.reasons == StopReason.RUNNING).any())

    def _stop_ids(self) -> list[int]:
        if self.request.ignore_eos:
            return []
        tokenizer = self.decoder.tokenizer
        ids = dict.fromkeys((*self.decoder.config.eos_token_ids, *(tokenizer.stop_ids if tokenizer else ())))
        if len(ids) > MAX_STOP_TOKENS:
            raise ValueError(f"{len(ids)} stop tokens; at most {MAX_STOP_TOKENS} are supported")
        return list(ids)

    def prefill(self) -> None:
        """Fills the cache with the prompts but for their last tokens."""
        decoder, request = self.decoder, self.request
        spec, programs, batch = decoder.spec, decoder.programs, len(self.prompt_lengths)
        budget = spec.drafter.capacity if request.budget is None else request.budget
        if budget > max(spec.drafter.capacity, 1):
            raise ValueError(f"budget={budget} is above the decoder's {spec.drafter.capacity} nodes")
        stops = self.stop_ids + [-1] * (MAX_STOP_TOKENS - len(self.stop_ids))
        limit = np.minimum(self.prompt_lengths + request.max_new_tokens, spec.max_length)
        memory, decoder.memory = decoder.memory, None  # donated
        self.state = programs.init(
            decoder.params, jnp.asarray(self._padded), jnp.asarray(self.prompt_lengths, jnp.int32),
            jnp.asarray(limit, jnp.int32), jnp.full(batch, budget, jnp.int32),
            jnp.asarray(stops, jnp.int32), self.sampling, memory,
        )  # fmt: skip
        for start, size in chunk_plan(int(self.prompt_lengths.max()) - 1):
            self.state = programs.prefill(decoder.params, self.state, start, size)
        jax.block_until_ready(self.state)

    def slices(self, rounds: int) -> Iterator[None]:
        """Prefills, runs one round, then `rounds` rounds between two yields."""
        programs = self.decoder.programs
        try:
            with self._clock("prefill_seconds"):
                self.prefill()
            while self.running:
                with self._clock("decode_seconds"):
                    # The first round alone: its tokens are there as soon as they can be.
                    self.state = programs.run(
                        self.decoder.params, self.state, rounds if self.seconds["decode_seconds"] else 1
                    )
                    self._look()
                if not self.seconds["first_token_seconds"]:
                    passed = self.seconds["prefill_seconds"] + self.seconds["decode_seconds"]
                    self.seconds["first_token_seconds"] = passed
                yield
        finally:
            # Also after an error in between: what was learned so far stays.
            if self.state is not None:
                self.decoder.memory = self.decoder.spec.drafter.memory(self.state.draft)

    def _look(self) -> None:
        """Waits for the device and copies what the host needs to see."""
        assert self.state is not None
        before = self.lengths
        self.tokens, length, reasons = jax.device_get((self.state.tokens, self.state.length, self.state.reason))
        # The cached length leaves out the root, which is the last committed token.
        self.lengths, self.reasons = np.array(length) + 1, np.array(reasons)
        self.new_ids = [self.tokens[row, a:b].tolist() for row, (a, b) in enumerate(zip(before, self.lengths))]
        for row, text in enumerate(self.texts):
            self.new_text[row] = text.push(self.new_ids[row])
            if text.stopped and self.lengths[row] >= self.prompt_lengths[row] + text.count:
                excess = self.lengths[row] - self.prompt_lengths[row] - text.count
                self.new_ids[row] = self.new_ids[row][: len(self.new_ids[row]) - excess]
                self.lengths[row] -= excess
                self.reasons[row] = StopReason.STOP
        if (self.reasons != reasons).any():
            self.state = self.state.replace(reason=jnp.asarray(self.reasons))

    def flush(self) -> list[str]:
        """The texts that were held back, when nothing more will come."""
        return [text.flush() for text in self.texts] or [""] * len(self.new_text)

    @contextlib.contextmanager
    def _clock(self, name: str):
        programs = self.decoder.programs
        start, compiled = time.perf_counter(), programs.compile_seconds
        yield
        compiling = programs.compile_seconds - compiled
        self.seconds["compile_seconds"] += compiling
        self.seconds[name] += time.perf_counter() - start - compiling

    def results(self) -> list[Generation]:
        """The rows as they stand."""
        assert self.state is not None
        decoder = self.decoder
        self.flush()
        statistics = jax.device_get(self.state.statistics)
        results = []
        for row, (start, end) in enumerate(zip(self.prompt_lengths, self.lengths)):
            ids = self.tokens[row, start:end].tolist()
            reason = StopReason(int(self.reasons[row]))
            reason = StopReason.INTERRUPTED if reason == StopReason.RUNNING else reason
            stats = row_stats(statistics, row, new_tokens=len(ids), policy=decoder.policy, seconds=self.seconds)
            text = self.texts[row].text if self.texts else ""
            results.append(
                Generation(prompt_tokens=int(start), token_ids=ids, text=text, finish_reason=reason.label, stats=stats)
            )
        return results


def _plain(settings: Any) -> Any:
    """Settings as JSON: dataclasses by their class and fields, templates by their depth counts."""
    if isinstance(settings, Template):
        return list(settings.depth_counts)
    if dataclasses.is_dataclass(settings):
        fields = {f.name: _plain(getattr(settings, f.name)) for f in dataclasses.fields(settings)}
        return {"kind": type(settings).__name__, **fields}
    if isinstance(settings, tuple | list):
        return [_plain(item) for item in settings]
    return settings


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a flag, so that a slice can end; a second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = False
    previous = signal.getsignal(signal.SIGINT)

    def handler(signum, frame):
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)
