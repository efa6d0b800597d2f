"""What an EAGLE-3 round spends outside its models: growing the tree, grafting, the table; and a draft step.

    python scripts/bench_eagle3.py --out eagle3.json

The target is a loaded model (SmolLM2-135M by default, bfloat16), the head has its width, a draft vocabulary of
8,192 and random weights: a round costs the same whatever is accepted. Every stage runs alone inside a loop on
the device; times are medians of calls in turn, in one process. Tables go to stderr, one JSON document to stdout
(and to --out).
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from bench_core import finish, header, show

from graft_jax import engine
from graft_jax.bench import stages
from graft_jax.bench.timing import interleaved, looped
from graft_jax.methods import Options
from graft_jax.models import eagle3
from graft_jax.models.eagle3_config import Eagle3Config
from graft_jax.models.layers import attend, linear
from graft_jax.tree import beam as beams
from graft_jax.tree.gates import OPEN

DRAFT_VOCAB, DEPTH = 8192, 5
SIZES = ((7, 4), (15, 4), (60, 10))  # nodes and beam
CALLS = 8  # of a stage in a timed loop


def decoders(model: str, dtype: str):
    plain = engine.SpeculativeDecoder.from_pretrained(model, method="ar", dtype=dtype, max_length=512)
    config = Eagle3Config.for_target(plain.config, draft_vocab_size=DRAFT_VOCAB)
    head = config, eagle3.init_params(config, jax.random.key(0), jnp.dtype(dtype))
    for budget, top_k in SIZES:
        options = Options(
            budget=budget, draft_depth=DEPTH, draft_top_k=top_k, template="narrow" if budget <= 15 else "graft"
        )
        target = plain.params.target
        made = engine._build("graft", options, plain.config, target, None, 512, "bench", head)
        made.set_thresholds((OPEN,) * made.params.thresholds.shape[0])
        yield made


def growing(drafter, root, active):
    """The tree's own work: every level's children are given, no head runs."""
    beam = drafter.beam
    W = beam.top_k
    tokens = jnp.arange(W * W, dtype=jnp.int32).reshape(1, W, W)
    log_probs = jnp.log(jnp.linspace(0.5, 0.1, W))[None, None, :] * jnp.ones((1, W, W))

    def run(root):
        thresholds = jnp.full(len(drafter.gates.depths), OPEN)
        return beams.grow(
            beam, drafter.gates, thresholds, root, tokens[:, 0], log_probs[:, 0],
            lambda carry, depth, lanes: (tokens + lanes.tokens[:, :, None] % 7, log_probs, carry), (), active,
        ).tree  # fmt: skip

    return run


def overhead(made, repeats: int) -> dict:
    """Growing, grafting and table update as shares of the fused round."""
    spec, params = made.spec, made.params
    drafter, state = spec.drafter, stages.start(spec, params)
    fused = stages.fused(spec, params, state, 8, repeats)
    parts = stages.by_stage(spec, params, state, CALLS, repeats)
    root = state.tokens[jnp.arange(1), state.length]
    grow, top = looped(growing(drafter.base, root, state.active), CALLS), looped(drafter.table.choose, CALLS)
    shape = (1, drafter.capacity + 1, spec.model.vocab_size)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    alone = interleaved({"grow": lambda: grow(root), "top": lambda: top(logits)}, repeats)
    own = {
        "grow": alone["grow"] / CALLS,
        "graft": parts["build"],
        "table": max(parts["update"] - alone["top"] / CALLS, 0.0),
    }
    return {
        "rows": drafter.capacity + 1, "round_ms": 1e3 * fused,
        **{f"{name}_ms": 1e3 * seconds for name, seconds in own.items()},
        "share": sum(own.values()) / fused, "sum_of_stages": sum(parts.values()) / fused,
    }  # fmt: skip


def draft_step(made, repeats: int) -> dict:
    """One expansion of the beam against its bare matrix products."""
    drafter, params = made.spec.drafter.base, made.params
    config, W = drafter.config, drafter.beam.top_k
    state = stages.start(made.spec, params).draft.base
    tokens = jnp.arange(W, dtype=jnp.int32)[None]
    hidden = jax.random.normal(jax.random.key(1), (1, W, config.hidden_size))
    lanes = jnp.zeros((1, DEPTH * W, config.num_kv_heads, config.head_dim))
    mask = jnp.ones((1, W, DEPTH * W), bool)

    def step(hidden, params, state, lanes, mask, tokens):
        positions = state.length[:, None] + jnp.zeros_like(tokens)
        made = eagle3.project(config, params.drafter, params.target.embed, tokens, hidden, positions)
        attended = attend(
            made.query, state.keys, state.values, state.length, lanes, lanes, mask, drafter.attention_block
        )
        return drafter._best(params, eagle3.finish(config, params.drafter, made.residual, attended))

    def products(hidden, weights):
        wide = jnp.concatenate([hidden, hidden], axis=-1)
        q, k, v = linear(wide, weights.q), linear(wide, weights.k), linear(wide, weights.v)
        out = linear(q, weights.o)
        down = linear(linear(out, weights.gate) + linear(out, weights.up), weights.down)
        return linear(down, weights.head), k, v

    whole, bare = looped(step, CALLS), looped(products, CALLS)
    times = interleaved(
        {
            "step": lambda: whole(hidden, params, state, lanes, mask, tokens),
            "products": lambda: bare(hidden, params.drafter),
        },
        repeats,
    )
    return {
        "beam": W, "step_ms": 1e3 * times["step"] / CALLS, "products_ms": 1e3 * times["products"] / CALLS,
        "ratio": times["step"] / times["products"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", help="file for the JSON document")
    args = parser.parse_args()
    made = list(decoders(args.model, args.dtype))
    report = header(model=args.model, dtype=args.dtype) | {
        "overhead": [overhead(decoder, args.repeats) for decoder in made],
        "draft_step": [draft_step(decoder, args.repeats) for decoder in (made[0], made[-1])],
    }
    for name in ("overhead", "draft_step"):
        show(name, report[name])
    finish(report, args.out)


if __name__ == "__main__":
    main()
