"""Wiring of a model built from FastDeploy's layers: which sums are left to which norms, and clean weight keys.

Layers are known by the names of their classes. The producer returns a ``PartialSum``; a norm that gets one reduces,
adds and normalises in one step, and a norm that gets a tensor does what it always did. So nobody has to guess whether a
tensor was reduced already, which is what FastDeploy's two independent prefix tests do.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..fusion import AllReduceFusion
from ..host_values import DTYPE_NAMES
from ..partial import PartialSum
from ..policy import Path
from ..sites import parse_site

_IN_LAYER = re.compile(r"^(?P<stack>.*\blayers)\.(?P<index>\d+)\.(?P<rest>.+)$")
_KEY_NAMES = re.compile(r"(^prefix$|_key$)")


@dataclass
class Adoption:
    """What ``apply`` did, by weight prefix.

    sums: layers that leave their sum, and the norm each leaves it to. skipped: row-parallel layers that go on reducing
    themselves, and why. renamed: weight keys, with the mark and without.
    """

    sums: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)


def adopt(model: Any, fusion: Callable[[], AllReduceFusion] | None, hidden_size: int, *, next_layer: bool) -> Adoption:
    """See ``integrations.fastdeploy.apply``. ``fusion``: gives the open one, at each call; None: nothing is fused."""
    linears, norms = _find(model, "RowParallelLinear"), _find(model, "RMSNorm")
    marked = {prefix for prefix, layer in linears.items() if parse_site(layer.prefix).marked}
    done = Adoption()
    for prefix, layer in linears.items():
        norm_prefix, refusal = consumer(prefix, norms, next_layer=next_layer)
        if fusion is None:
            refusal = "fusion is off, or there is one rank"
        elif not getattr(layer, "reduce_results", True):
            refusal = "its caller reduces, or nobody has to (reduce_results is False)"
        elif marked and prefix not in marked and not (next_layer and prefix.endswith(".mlp.down_proj")):
            refusal = "other layers are marked, and it is not"
        elif refusal is None and norms[norm_prefix].hidden_size != hidden_size:
            refusal = f"{norm_prefix} is over {norms[norm_prefix].hidden_size} and the model over {hidden_size}"
        if refusal is None:
            done.sums[prefix] = norm_prefix
        else:
            done.skipped[prefix] = refusal
    for layer in (*linears.values(), *norms.values()):
        # FastDeploy's flag leaves sums to norms that may not take them, and reduces what is complete; wiring decides.
        layer.enable_all_reduce_fusion = False
    if fusion is not None:
        for prefix in done.sums:
            _leave_sum(linears[prefix], prefix, fusion)
        for norm_prefix in set(done.sums.values()):
            _take_sum(norms[norm_prefix])
    done.renamed = repair_weight_keys(model)
    return done


def _find(model: Any, class_name: str) -> dict[str, Any]:
    """Weight prefix -> layer of that class (or of one derived from it)."""
    return {
        parse_site(layer.prefix).weight_prefix: layer
        for layer in model.sublayers()
        if any(kind.__name__ == class_name for kind in type(layer).__mro__) and bool(getattr(layer, "prefix", None))
    }


def consumer(prefix: str, norms: Any, *, next_layer: bool) -> tuple[str, str | None]:
    """``(weight prefix of the norm that the sum at prefix goes to, None)``, or ``("", why there is none)``. Pure."""
    place = _IN_LAYER.match(prefix)
    if place is None:
        return "", "it is not part of a decoder layer"
    stack, index, rest = place["stack"], int(place["index"]), place["rest"]
    if rest.split(".")[0] != "mlp":
        found = f"{stack}.{index}.post_attention_layernorm"
    elif rest != "mlp.down_proj":
        return "", "its result is added to others before a norm sees it"
    elif not next_layer:
        return "", "what a decoder layer returns may be read by others; next_layer=True leaves it to the next norm"
    else:
        following = f"{stack}.{index + 1}.input_layernorm"
        found = following if following in norms else f"{stack.rpartition('.')[0]}.norm".lstrip(".")
    return (found, None) if found in norms else ("", f"there is no norm at {found}")


def _leave_sum(layer: Any, prefix: str, fusion: Callable[[], AllReduceFusion]) -> None:
    multiply = layer.forward

    def forward(*args: Any, **kwargs: Any) -> PartialSum:
        return fusion().partial(multiply(*args, **kwargs), prefix)

    # Every version of FastDeploy's layer obeys this one; its own fusion flag depends on the number of tokens in some.
    layer.reduce_results = False
    layer.forward = forward


def _take_sum(norm: Any) -> None:
    engine_forward = norm.forward
    known: dict[Any, bool] = {}
    decided_by: AllReduceFusion | None = None

    def fuses(x: PartialSum, residual: Any, proxy: Any) -> bool:
        if proxy is not None or residual is None or residual.dtype != x.dtype:
            return False
        nonlocal decided_by
        if x.fusion is not decided_by:  # opened anew, perhaps with other limits
            decided_by = x.fusion
            known.clear()
        key = (tuple(x.shape), x.dtype)
        if key not in known:
            known[key] = _can_fuse(norm, x)
        return known[key]

    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, PartialSum):
            return engine_forward(x, *args, **kwargs)
        residual = kwargs["residual_input"] if "residual_input" in kwargs else (args[0] if args else None)
        proxy = kwargs["proxy_rmsnorm"] if "proxy_rmsnorm" in kwargs else (args[2] if len(args) > 2 else None)
        if fuses(x, residual, proxy):
            return x.fusion.add_rms_norm(x, residual, norm.weight, norm.eps)
        # The engine's own norm follows the sum, whatever variant of it is in force.
        return engine_forward(x.complete(), *args, **kwargs)

    norm.forward = forward


def _can_fuse(norm: Any, x: PartialSum) -> bool:
    """Whether this norm is a plain one, and the policy would fuse. Equal on all ranks, as both are."""
    moves_tokens = getattr(norm, "split_x", False) or getattr(norm, "allgather_out", False)  # sequence-parallel MoE
    does_more = getattr(norm, "bias", None) is not None or getattr(norm, "quant_scale", None) is not None
    if moves_tokens or does_more or norm.weight is None:
        return False
    dtype, weight_dtype = DTYPE_NAMES.get(x.dtype), DTYPE_NAMES.get(norm.weight.dtype)
    if dtype is None:
        return False
    return x.fusion.explain(x.shape, dtype=dtype, weight_dtype=weight_dtype).path in (Path.FUSED, Path.EMPTY)


def repair_weight_keys(model: Any) -> dict[str, str]:
    """Take the marks out of every layer's ``prefix`` and ``*_key`` attributes; ``{with: without}`` of what changed."""
    renamed: dict[str, str] = {}
    for layer in [model, *model.sublayers()]:
        for holder, name, value in list(_key_texts(layer)):
            clean = parse_site(value).weight_prefix
            if clean != value:
                holder[name] = renamed[value] = clean
    return renamed


def _key_texts(layer: Any) -> Iterator[tuple[dict[str, Any], str, str]]:
    for name, value in vars(layer).items():
        if isinstance(value, str) and _KEY_NAMES.search(name):
            yield vars(layer), name, value
        elif isinstance(value, dict) and name == "weight_key_map":
            yield from ((value, key, text) for key, text in value.items() if isinstance(text, str))
