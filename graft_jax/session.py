"""One batch of prompts on its way: prefill, slices of rounds, and what the host sees between two of them."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax import sampling
from graft_jax.decode import MAX_STOP_TOKENS, DecodeState
from graft_jax.programs import chunk_plan
from graft_jax.results import Generation, row_stats
from graft_jax.text import RowText
from graft_jax.types import StopReason

if TYPE_CHECKING:
    from graft_jax.engine import SpeculativeDecoder


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


class Session:
    """One batch of prompts on its way, between two host looks."""

    def __init__(self, decoder: "SpeculativeDecoder", prompts: list[list[int]], request: Request):
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
        # Text token by token costs the host as much as a large batch costs a device: it is made when it is asked for,
        # or where it may end a row.
        self._stops = bool(stops)
        self._unread: list[list[int]] = [[] for _ in prompts]
        self._new_text = [""] * batch

    @property
    def new_text(self) -> list[str]:
        """What became certain of the rows' texts."""
        if any(self._unread):
            self._read()
        return self._new_text

    def _read(self) -> None:
        """Makes text of the tokens of which none was made yet."""
        self._new_text = [text.push(ids) for text, ids in zip(self.texts, self._unread)] or self._new_text
        self._unread = [[] for _ in self._unread]

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
        plan = chunk_plan(int(self.prompt_lengths.max()) - 1)
        memory, decoder.memory = decoder.memory, None  # donated
        args = (
            decoder.params,
            jnp.asarray(self._padded),
            jnp.asarray(self.prompt_lengths, jnp.int32),
            jnp.asarray(limit, jnp.int32),
            jnp.full(batch, budget, jnp.int32),
            jnp.asarray(stops, jnp.int32),
            self.sampling,
            memory,
        )
        programs.prepare(args, [size for _, size in plan])
        self.state = programs.init(*args)
        for start, size in plan:
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
                    self.look()
                if not self.seconds["first_token_seconds"]:
                    passed = self.seconds["prefill_seconds"] + self.seconds["decode_seconds"]
                    self.seconds["first_token_seconds"] = passed
                yield
        finally:
            # Also after an error in between: what was learned so far stays.
            self.keep_memory()

    def keep_memory(self) -> None:
        """Hands what the drafter learned back to the decoder, which gave it away for this session."""
        if self.state is not None:
            self.decoder.memory = self.decoder.spec.drafter.memory(self.state.draft)

    def look(self) -> None:
        """Waits for the device and copies what the host needs to see."""
        assert self.state is not None
        before = self.lengths
        self.tokens, length, reasons = jax.device_get((self.state.tokens, self.state.length, self.state.reason))
        # The cached length leaves out the root, which is the last committed token.
        self.lengths, self.reasons = np.array(length) + 1, np.array(reasons)
        self.new_ids = [self.tokens[row, a:b].tolist() for row, (a, b) in enumerate(zip(before, self.lengths))]
        self._unread = [[*old, *new] for old, new in zip(self._unread, self.new_ids)]
        if self._stops:
            self._read()
        for row, text in enumerate(self.texts):
            if text.stopped and self.lengths[row] >= self.prompt_lengths[row] + text.count:
                excess = self.lengths[row] - self.prompt_lengths[row] - text.count
                self.new_ids[row] = self.new_ids[row][: len(self.new_ids[row]) - excess]
                self.lengths[row] -= excess
                self.reasons[row] = StopReason.STOP
        if (self.reasons != reasons).any():
            self.state = self.state.replace(reason=jnp.asarray(self.reasons))

    def flush(self) -> list[str]:
        """The texts that were held back, when nothing more will come."""
        return [text.flush() for text in self.texts] or [""] * len(self._new_text)

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
        read = any(text.count for text in self.texts)
        if read:
            self._read()
            self.flush()
        statistics = jax.device_get(self.state.statistics)
        results = []
        for row, (start, end) in enumerate(zip(self.prompt_lengths, self.lengths)):
            ids = self.tokens[row, start:end].tolist()
            reason = StopReason(int(self.reasons[row]))
            reason = StopReason.INTERRUPTED if reason == StopReason.RUNNING else reason
            stats = row_stats(statistics, row, new_tokens=len(ids), policy=decoder.policy, seconds=self.seconds)
            text = ""
            if self.texts:
                assert decoder.tokenizer is not None
                text = self.texts[row].text if read else decoder.tokenizer.decode(ids)
            results.append(
                Generation(prompt_tokens=int(start), token_ids=ids, text=text, finish_reason=reason.label, stats=stats)
            )
        return results


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
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
