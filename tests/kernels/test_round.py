"""The round with interpreted kernels says the same tokens as with XLA's versions and as plain decoding."""

import functools

import numpy as np
import pytest
import toy

from graft_jax import engine
from graft_jax.io.drafter import load_eagle3
from graft_jax.methods import Options

NEW = 24


@functools.cache
def _world():
    config, params = toy.load("llama")
    return config, params, load_eagle3(toy.FOLDER / "llama-eagle3", config, dtype="float32")


def _generate(method, prompts, **options):
    config, params, head = _world()
    head = head if method in ("eagle3", "graft") else None
    decoder = engine._build(method, Options(**options), config, params, None, 256, "llama", head)
    decoder.generate(prompts[:2], max_new_tokens=NEW, ignore_eos=True)  # fills the table
    return decoder.generate(prompts, max_new_tokens=NEW, ignore_eos=True)


# Each kernel's round once: the table's two kernels under either backend, the head's top-k beside them.
@pytest.mark.parametrize(
    "method, kernels", [("recycling", "pallas-triton"), ("recycling", "pallas-tpu"), ("graft", "pallas-triton")]
)
def test_kernels_change_no_token(method, kernels):
    prompts = toy.safe_prompts("llama", 4)
    config, params, _ = _world()
    wanted, _ = toy.greedy(config, params, prompts, NEW)
    plain = _generate(method, prompts, kernels="xla")
    made = _generate(method, prompts, kernels=f"{kernels}-interpret")
    for outs in (plain, made):
        assert [out.token_ids for out in outs] == wanted.tolist()
        assert np.mean([out.stats.mean_acceptance_length for out in outs]) > 1.3
    assert [out.stats.accepted for out in made] == [out.stats.accepted for out in plain]
    assert made[0].stats.policy["kernels"] == dict.fromkeys(("retrieval_lookup", "topk_rows"), f"{kernels}-interpret")


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="kernels='cuda' must be one of"):
        Options(kernels="cuda")
