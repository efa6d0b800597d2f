"""Every kernel lowers for CUDA and TPU at its real shapes, and lowering chooses by the platform lowered for."""

import functools

import jax
import jax.numpy as jnp
import pytest

from graft_jax.bench import aot
from graft_jax.tree import templates
from pallas_kernels import dispatch, retrieval_lookup, topk_rows, topm_score
from pallas_kernels.retrieval_lookup import specs as lookup_specs
from pallas_kernels.topk_rows import specs as topk_specs
from pallas_kernels.topm_score import specs as topm_specs

TARGETS = {aot.GPU: "__gpu$xla.gpu.triton", aot.TPU_V5E: "tpu_custom_call"}


def _array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _topk(spec, dtype="float32"):
    return functools.partial(topk_rows, k=spec.k), (_array(spec.rows, spec.vocabulary, dtype=dtype),)


def _topm(spec, dtype="float32"):
    B, W, R, M, _ = spec
    arrays = (_array(B, R), _array(B, W, R), _array(B, M, R, dtype=dtype), _array(B, M), _array(B, M, dtype="int32"))
    return functools.partial(topm_score, children=spec.children), arrays


def _lookup(spec):
    template = (templates.GRAFT_FULL if spec.nodes > 31 else templates.NARROW).prefix(spec.nodes)
    rows = [2**spec.log2_rows] * (spec.order - 1)
    levels = tuple((_array(R, spec.width, dtype="int32"), _array(R, dtype="uint32")) for R in rows)
    levels = (*levels, (_array(spec.vocabulary, spec.width, dtype="int32"), None))
    function = functools.partial(retrieval_lookup, parents=template.parents, ranks=template.ranks)
    return function, (levels, _array(spec.points, spec.order, dtype="int32"))


CASES = {
    **{f"topk_rows {name}": ("topk_rows", *_topk(spec)) for name, spec in topk_specs.SPECS.items()},
    "topk_rows bfloat16": ("topk_rows", *_topk(topk_specs.SPECS["qwen3-4b table"], "bfloat16")),
    **{f"topm_score {name}": ("topm_score", *_topm(spec)) for name, spec in topm_specs.SPECS.items()},
    "topm_score bfloat16": ("topm_score", *_topm(topm_specs.SPECS["qwen3-4b"], "bfloat16")),
    **{f"retrieval_lookup {name}": ("retrieval_lookup", *_lookup(spec)) for name, spec in lookup_specs.SPECS.items()},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_kernels_lower(case, target):
    kernel, function, arrays = CASES[case]
    text = aot.lower(function, *arrays, target=target).as_text()
    assert f"@{TARGETS[target]}" in text and kernel in text


@pytest.mark.parametrize("case", ["topk_rows qwen3-4b table", "topm_score qwen3-4b", "retrieval_lookup qwen3-8b"])
def test_the_platform_lowered_for_decides(case):
    """A CPU lowers XLA's version, and so does any platform that is told to; the record says which was chosen."""
    kernel, function, arrays = CASES[case]
    with dispatch.recording() as record:
        text = jax.jit(function).lower(*arrays).as_text()
    assert not any(target in text for target in TARGETS.values())
    assert record == {kernel: {"default": "xla", "cuda": "pallas-triton", "tpu": "pallas-tpu"}}
    with dispatch.recording() as record:
        text = aot.lower(functools.partial(function, implementation="xla"), *arrays, target=aot.GPU).as_text()
    assert TARGETS[aot.GPU] not in text and record == {kernel: {"default": "xla"}}


def test_what_a_platform_does_not_take_warns_and_is_recorded(monkeypatch):
    monkeypatch.setattr(dispatch, "platform_name", lambda: "tpu")
    with dispatch.recording() as record, pytest.warns(UserWarning, match="topk_rows: XLA instead of pallas-tpu, which"):
        jax.jit(functools.partial(topk_rows, k=200)).lower(_array(2, 700))
    assert record["topk_rows"]["tpu"] == "xla" and record["topk_rows"]["cuda"] == "pallas-triton"
