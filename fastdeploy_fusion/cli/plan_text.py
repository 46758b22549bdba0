"""A plan document (``plan_document.make``) as text for people: head, table, totals, and a drawing of one layer."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

_MARKS = {"fused": "fused", "summed": "summed", "plain": "plain", "empty": "-"}


def render(document: dict[str, Any], *, all_sites: bool = False, layer: int | None = None) -> str:
    """The whole text, ending in a newline.

    Raises:
        ValueError: ``layer`` is none of the model's.
    """
    parts = [
        "\n".join(_head(document)),
        "\n".join(_table(document, all_sites)),
        "\n".join(_reasons(document)),
        "\n".join(draw_layer(document, layer)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(d: dict[str, Any]) -> Iterator[str]:
    sizes = ", ".join(f"{name.removesuffix('_size')} {n}" for name, n in d["layout"].items() if n not in (1, False))
    sm = f" (SM{d['device']['sm']})" if d["device"]["sm"] else ""
    yield (
        f"{d['architecture']}: {d['num_layers']} layers, hidden {d['hidden_size']}, {d['dtype']}, on "
        f"{d['num_ranks']} x {d['device']['name']}{sm}" + (f", {sizes}" if sizes else "")
    )
    if not d["sites"]:
        yield "nothing is added up over ranks: every sum is one rank's own"
    for group in d["groups"]:
        like_it = f" and {group['groups_like_it'] - 1} more like it" if group["groups_like_it"] > 1 else ""
        limit, own = group["num_max_tokens"], group["all_reduce_max_tokens"]
        limits = f"{limit} tokens" + (f" ({own} without a norm)" if own != limit else "")
        made = (
            f"{group['backend']}, fused up to {limits}, workspace {_bytes(group['workspace_bytes_a_rank'])} a rank"
            if d["enabled"] and group["unavailable"] is None
            else f"plain: {group['unavailable'] or 'fusion is off'}"
        )
        yield f"ranks {_ranks(group['ranks'])}{like_it}: {made}"


def _table(d: dict[str, Any], all_sites: bool) -> Iterator[str]:
    """Kinds of sites, or all of them: how many, what they are, and the path at each token count."""
    if not d["sites"]:
        return
    counts = [str(n) for n in d["token_counts"]]
    rows = [["sums", "site", "taken by", "ranks", "bytes a token", *(f"{n} tok" for n in counts)]]
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for site in d["sites"]:
        names = (site["site"], site["consumer"] or "all-reduce alone")
        if not all_sites:
            names = (_kind(names[0]), _kind(names[1]))
        paths = tuple(_MARKS[site["paths"][n]["path"]] for n in counts)
        kinds.setdefault((*names, _ranks(site["ranks"]), site["bytes_a_token"], paths), []).append(site)
    for (site, consumer, ranks, size, paths), alike in kinds.items():
        rows.append([str(len(alike)), site, consumer, ranks, str(size), *paths])
    totals = [d["totals"][n] for n in counts]
    rows.append([str(len(d["sites"])), "fused of all", "", "", "", *(f"{t['fused']}/{t['sums']}" for t in totals)])
    rows.append(["", "bytes of operands", "", "", "", *(_bytes(t["bytes"]) for t in totals)])
    yield from _aligned(rows)


def _reasons(d: dict[str, Any]) -> Iterator[str]:
    """Why not, once for each reason, with the token counts that it holds for."""
    found: dict[tuple[str, str], set[int]] = {}
    for site in d["sites"]:
        for n, decision in site["paths"].items():
            if decision["path"] in ("summed", "plain"):
                text = decision["reason"]
                if decision["reason"] != "over the token limit" and decision["detail"]:
                    text += f" ({decision['detail']})"
                found.setdefault((decision["path"], text), set()).add(int(n))
    for (path, text), counts in found.items():
        yield f"{path} at {', '.join(map(str, sorted(counts)))} tokens: {text}"


def draw_layer(d: dict[str, Any], layer: int | None = None) -> Iterator[str]:
    """The data flow of one decoder layer, from top to bottom, with its sums."""
    by_layer: dict[int, list[dict[str, Any]]] = {}
    order: list[dict[str, Any]] = [step for steps in d["steps"] for step in steps]
    for step in order:
        if step["layer"] is not None:
            by_layer.setdefault(step["layer"], []).append(step)
    layer = _typical(by_layer) if layer is None else layer
    if layer not in by_layer:
        raise ValueError(f"--layer {layer}: the model has layers 0 to {d['num_layers'] - 1}")
    steps = by_layer[layer]
    after = order[order.index(steps[-1]) + 1 :]
    owed = steps[0]["site"] if steps[0]["kind"] == "norm" else None
    yield f"layer {layer}:"
    yield ""
    yield "  residual       hidden" + (f", owed by {owed}" if owed else ", complete")
    for step in steps:
        yield "     |              |"
        yield from _drawn(step)
    yield "     |              |"
    yield "     v              v" + (f"  to {after[0]['name']}" if after else "")


def _drawn(step: dict[str, Any]) -> Iterator[str]:
    where = f"over ranks {_ranks(step['group'])}" if step["group"] else ""
    if step["kind"] == "norm":
        yield f"     +--------> {step['what']} {step['name']}"
        if step["op"]:
            yield f"     |              |  add_rms_norm: the sum {where} + residual, then the norm"
        else:
            yield "     |              |  residual + hidden, then the norm; nothing is owed"
        return
    yield f"     |          {step['what']} {step['name']}"
    if step["owes"]:
        yield f"     |              |  leaves its sum {where} to the next norm"
    elif step["op"]:
        yield f"     |              |  all_reduce {where}"


def _typical(by_layer: dict[int, list[dict[str, Any]]]) -> int:
    """The first layer of the most frequent kind."""
    kinds = {
        layer: tuple((s["kind"], s["what"], s["op"], s["owes"] is not None) for s in steps)
        for layer, steps in by_layer.items()
    }
    most = Counter(kinds.values()).most_common(1)[0][0] if kinds else ()
    return next((layer for layer, kind in kinds.items() if kind == most), 0)


def _kind(name: str) -> str:
    """``model.layers.3.mlp.down_proj`` -> ``model.layers.*.mlp.down_proj``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _ranks(ranks: Sequence[int]) -> str:
    """``[0-3]`` for neighbours, else all of them."""
    first, last = ranks[0], ranks[-1]
    neighbours = len(ranks) > 2 and list(ranks) == list(range(first, last + 1))
    return f"[{first}-{last}]" if neighbours else f"[{','.join(map(str, ranks))}]"


def _bytes(count: int) -> str:
    """With a unit, three digits."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if number == 0:
            yield "  ".join("-" * width for width in widths)
