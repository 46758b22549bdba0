"""Binding the compiled call: the order is learnt from FlashInfer's own wrapper, and what is not understood is left."""

from types import SimpleNamespace

import pytest

from fastdeploy_fusion.backends.flashinfer import bound

ORDER = (*sorted(bound.NEEDED), *bound.UNUSED, "weight_bias")


def wrapper_around(body, parameters=ORDER):
    """A function of these parameters with `module` as its one free variable, as FlashInfer writes it."""
    source = f"""
def outer(module):
    def trtllm_allreduce_fusion({", ".join(parameters)}):
        {body}
    return trtllm_allreduce_fusion
"""
    space = {}
    exec(source, space)
    return space["outer"](SimpleNamespace(trtllm_allreduce_fusion="compiled"))


def inner_of(wrapper):
    return SimpleNamespace(get_trtllm_comm_module=lambda: SimpleNamespace(trtllm_allreduce_fusion=wrapper))


def test_the_order_is_the_one_in_which_the_wrapper_passes_on():
    turned = tuple(reversed(ORDER))
    binding = bound.bind(inner_of(wrapper_around(f"module.trtllm_allreduce_fusion({', '.join(turned)})")))
    assert binding.order == turned
    assert binding.function == "compiled"


@pytest.mark.parametrize(
    ("body", "parameters", "words"),
    [
        (f"module.trtllm_allreduce_fusion({', '.join(ORDER)}); module.other()", ORDER, "exactly one positional call"),
        (f"module.trtllm_allreduce_fusion({', '.join(ORDER[1:])})", ORDER, "missing"),
        (f"module.trtllm_allreduce_fusion({', '.join(ORDER)}, 1)", ORDER, "unknown"),
        (f"module.trtllm_allreduce_fusion({', '.join(ORDER)}, new)", (*ORDER, "new"), "unknown"),
        (f"module.trtllm_allreduce_fusion(1 + {', '.join(ORDER)})", ORDER, "does more"),
        ("module.trtllm_allreduce_fusion(**locals())", ORDER, "does not make exactly one positional call"),
    ],
)
def test_anything_else_is_not_bound(body, parameters, words):
    with pytest.raises(bound.NotUnderstood, match=words):
        bound.bind(inner_of(wrapper_around(body, parameters)))


def test_a_wrapper_that_is_no_plain_function_is_not_bound():
    with pytest.raises(bound.NotUnderstood, match="plain function"):
        bound.bind(inner_of(print))
