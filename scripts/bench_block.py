"""What building a best-first tree costs: its share of a round, and its growth beside a host heap's.

    python scripts/bench_block.py --out block.json

The target is a loaded model (SmolLM2-135M by default, bfloat16), the drafter has its width, the papers' block
of 16 and random weights; what a slot says is drawn so that its best token has a given probability, for how
deep a tree goes depends on that alone. Times are medians of calls in turn, in one process. Tables go to stderr,
one JSON document to stdout (and to --out).
"""

import argparse
import dataclasses
import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
from bench_core import console, finish, header, show

from graft_jax import decode
from graft_jax.bench import stages
from graft_jax.bench.timing import interleaved
from graft_jax.drafters.base import Params
from graft_jax.drafters.dflash import Chain, DFlash, Marginal, Slots
from graft_jax.drafters.domino import Corrected
from graft_jax.engine import SpeculativeDecoder
from graft_jax.models import dflash, domino
from graft_jax.models.dflash_config import DFlashConfig, DominoConfig

HEADS = {"small": DominoConfig(gru_size=256, rank=64, prefix=1, shift=True),
         "papers'": DominoConfig(gru_size=1024, rank=256, prefix=1, shift=True)}  # fmt: skip
CERTAINTIES = (0.3, 0.7, 0.9)  # probability of a slot's best token
REPEATED = 8  # builds or rounds a timed call


@functools.cache
def world(model: str, dtype: str, head: str):
    plain = SpeculativeDecoder.from_pretrained(model, method="ar", dtype=dtype, max_length=512)
    config = DFlashConfig.for_target(plain.config, num_layers=2, block_size=16, mask_token_id=0, domino=HEADS[head])
    weights = dflash.init_params(config, jax.random.key(0), jnp.dtype(dtype))
    return plain, config, Params(plain.params.target, weights, jnp.zeros(1))


def slots(config, certainty: float) -> Slots:
    """Slots whose best token has that probability; the others fall off as a power of their rank."""
    D, V, M = config.num_drafted, config.model.vocab_size, config.model.hidden_size
    rng = np.random.default_rng(0)
    rest = np.arange(2, V + 1, dtype=np.float64) ** -1.5
    p = np.concatenate([[certainty], (1 - certainty) * rest / rest.sum()])
    logits = np.stack([np.log(p)[rng.permutation(V)] for _ in range(D)])
    hidden = rng.normal(size=(1, D, M))
    return Slots(jnp.asarray(hidden, jnp.float32), jnp.asarray(logits[None], jnp.float32))


def builder(config, policy):
    """A jitted loop of builds, each depending on the one before."""

    @jax.jit
    def run(params, said):
        def step(i, carry):
            root, forwards = carry
            # What the slots say depends on the carry, so that their candidates are not made once for all.
            now = said.replace(logits=said.logits + jnp.minimum(root, 0).astype(jnp.float32)[:, None, None])
            draft = policy(config, params, now, root, jnp.ones(1, bool))
            return draft.tree.tokens[:, 1], forwards + draft.forwards

        return jax.lax.fori_loop(0, REPEATED, step, (jnp.array([7]), jnp.zeros(1, jnp.int32)))

    return run


def share(model: str, dtype: str) -> list[dict]:
    """Building a tree of 16 nodes against a whole round of 17 rows, whose draft is a plain chain."""
    rows = []
    for head in HEADS:
        plain, config, params = world(model, dtype, head)
        spec = dataclasses.replace(
            plain.spec, drafter=DFlash(config, plain.config, Chain(16), "keep", plain.spec.attention_block,
                                       plain.spec.cache_dtype), row_buckets=()
        )  # fmt: skip
        state = stages.start(spec, params)
        rounds = jax.jit(lambda params, state, spec=spec: decode.run(spec, params, state, jnp.int32(REPEATED)).tokens)
        policies = {
            "marginal": Marginal(16), "greedy-path": Corrected(16, "greedy-path"), "path": Corrected(16),
            "path, full normaliser": Corrected(16, normaliser="full"), "chain of 16": Corrected(16, "chain", 64),
            "chain of 16, all candidates": Corrected(16, "chain", 0),
        }  # fmt: skip
        builders = {name: builder(config, policy) for name, policy in policies.items()}
        for certainty in CERTAINTIES:
            said = slots(config, certainty)
            calls = {name: functools.partial(run, params, said) for name, run in builders.items()}
            times = interleaved({"round": lambda: rounds(params, state), **calls})  # noqa: B023
            for name, run in builders.items():
                build, round_ = times[name] / REPEATED, times["round"] / REPEATED
                rows.append({
                    "head": head, "certainty": certainty, "tree": name,
                    "passes": int(run(params, said)[1][0]) / REPEATED, "build_ms": build * 1e3,
                    "round_ms": (round_ + build) * 1e3, "share": build / (round_ + build),
                })  # fmt: skip
    return rows


def growth(model: str, dtype: str, certainty: float = 0.7) -> list[dict]:
    """Milliseconds a tree by number of nodes: on the device level by level, and with a heap on the host."""
    rows = []
    for head in HEADS:
        _, config, params = world(model, dtype, head)
        said = slots(config, certainty)
        for N in (16, 32, 64, 128):
            run = builder(config, Corrected(N))
            heap = HostHeap(config, params, said)
            times = interleaved({
                "device": lambda: run(params, said),  # noqa: B023
                "heap": lambda: heap.build(N),  # noqa: B023
            })  # fmt: skip
            rows.append({
                "head": head, "nodes": N, "device_ms": times["device"] / REPEATED * 1e3, "heap_ms": times["heap"] * 1e3,
                "equal": heap.build(N) == best_tokens(config, params, said, N),
            })  # fmt: skip
    return rows


def best_tokens(config, params, said, N: int) -> list[int]:
    tree = Corrected(N)(config, params, said, jnp.array([7]), jnp.ones(1, bool)).tree
    return np.asarray(tree.tokens[0, 1:]).tolist()


class HostHeap:
    """DominoTree's reference scheme: a heap in Python pops one node at a time, the device scores its children."""

    def __init__(self, config, params, said, candidates: int = 64, children: int = 8):
        self.params, self.depth = params, config.num_drafted
        policy = Corrected(1, candidates=candidates)
        head, embed = params.drafter.domino, params.target.embed

        @jax.jit
        def prepare(params, said, root):
            state = domino.advance(head, embed, jnp.zeros((1, 1, config.domino.gru_size), jnp.float32), root[:, None])
            return policy._slate(head, said), state

        @jax.jit
        def expand(params, slate, slot, state):
            """The best children of a node, and their states."""
            head, embed = params.drafter.domino, params.target.embed
            tokens, values = policy._best(config.domino.prefix, head, slate, slot, state, children)
            tokens, values = tokens[:, 0], values[:, 0]
            states = jnp.broadcast_to(state, (1, children, state.shape[2]))
            return tokens[0], values[0], domino.advance(head, embed, states, tokens)

        self.prepare, self.expand, self.said = prepare, expand, said

    def build(self, N: int) -> list[int]:
        """The tokens of the nodes in order."""
        slate, state = self.prepare(self.params, self.said, jnp.array([7]))
        queue, out, count = [], [], 0

        def push(path, score, state):
            nonlocal count
            tokens, values, states = self.expand(self.params, slate, jnp.int32(len(path)), state)
            for i, (token, value) in enumerate(zip(np.asarray(tokens).tolist(), np.asarray(values).tolist())):
                heapq.heappush(queue, (-(score + value), len(path) + 1, (*path, token), count, states, i))
                count += 1

        push((), 0.0, state)
        while queue and len(out) < N:
            falling, _, path, _, states, i = heapq.heappop(queue)
            out.append(path[-1])
            if len(path) < self.depth and len(out) < N:
                push(path, -falling, states[:, i : i + 1])
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parts", nargs="*", choices=("share", "growth"), default=["share", "growth"])
    parser.add_argument("--out")
    args = parser.parse_args()
    report = header(model=args.model, dtype=args.dtype)
    for part, measure in {"share": share, "growth": growth}.items():
        if part in args.parts:
            report[part] = measure(args.model, args.dtype)
            show(part, report[part])
    console.print(f"{args.model}, {args.dtype}, {report['commit']}")
    finish(report, args.out)


if __name__ == "__main__":
    main()
