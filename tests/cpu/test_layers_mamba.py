"""The Mamba2 mixer equals its recurrence written out, however prompts are cut, packed and split over ranks."""

import numpy as np
import paddle
import pytest

from fastdeploy_fusion.layers import MambaMixer, MambaSizes, PackedBatch, StateStep
from fastdeploy_fusion.layers.selective_scan import chunked_scan, scan_step
from fastdeploy_fusion.layers.shards import split_mamba
from fastdeploy_fusion.partial import PartialSum
from tests.fake_tp import FakeTp, array, draw, fill, ranks, tensor

HIDDEN = 12
SIZES = MambaSizes(num_heads=8, head_dim=4, n_groups=2, state_size=6, conv_kernel=4, chunk_size=3, with_bias=True)


def recurrence(x, dt, a, b, c, state):
    """``chunked_scan`` token by token, in float64."""
    state, per_group, y = state.astype(np.float64), x.shape[1] // b.shape[1], []
    for t in range(len(x)):
        b_t, c_t = (np.repeat(v[t], per_group, axis=0) for v in (b, c))
        state = state * np.exp(dt[t] * a)[:, None, None] + (dt[t][:, None] * x[t])[:, :, None] * b_t[:, None]
        y.append((state * c_t[:, None]).sum(-1))
    return np.stack(y), state


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 20])
def test_chunks_and_steps_are_the_recurrence(num_tokens):
    x, dt = draw(num_tokens, 4, 5), np.abs(draw(num_tokens, 4)) * 3
    b, c, state = draw(num_tokens, 2, 6, seed=2), draw(num_tokens, 2, 6, seed=3), draw(4, 5, 6)
    a = -np.array([0.1, 1.0, 20.0, 100.0], np.float32)
    want, want_state = recurrence(x, dt, a, b, c, state)
    operands = [tensor(v) for v in (x, dt, a, b, c, state)]
    y, end = chunked_scan(*operands, chunk_size=8)
    np.testing.assert_allclose(array(y), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(array(end), want_state, rtol=1e-4, atol=1e-4)
    y, end = scan_step(*[v[:1] for v in operands[:2]], operands[2], *[v[:1] for v in operands[3:5]], operands[5][None])
    np.testing.assert_allclose(array(y), want[:1], rtol=1e-4, atol=1e-4)


def mixer(tp, stored=None):
    made = MambaMixer(HIDDEN, SIZES, 1e-5, tp=tp, prefix="m", layer_id=5)
    fill(made, stored)
    return made


def run(made, cache, batch, rows):
    out = made(tensor(rows), StateStep(PackedBatch(*batch), cache))
    return array(out.take() if isinstance(out, PartialSum) else out)


def test_packed_and_cut_prompts_are_as_each_alone_and_slots_start_anew():
    made = mixer(FakeTp())
    prompts = {0: draw(11, HIDDEN), 2: draw(2, HIDDEN, seed=4), 1: draw(6, HIDDEN, seed=5)}
    alone = {s: run(made, made.new_cache([5], 3), ((s,), (0,), (len(p),)), p) for s, p in prompts.items()}
    cache = made.new_cache([5], 3)
    run(made, cache, ((0, 1, 2), (0, 0, 0), (3, 1, 2)), draw(6, HIDDEN, seed=9))  # whoever had the slots before
    seen, got = dict.fromkeys(prompts, 0), {s: [] for s in prompts}
    # A prompt of one token, shorter than the kernel, next to others; then a mixed batch; then single tokens.
    for lengths in ({0: 4, 2: 1, 1: 1}, {2: 1, 0: 5, 1: 3}, {1: 1, 0: 1}, {0: 1, 1: 1}):
        batch = (tuple(lengths), tuple(seen[s] for s in lengths), tuple(lengths.values()))
        rows = np.concatenate([prompts[s][seen[s] : seen[s] + n] for s, n in lengths.items()])
        ends = np.cumsum(list(lengths.values()))[:-1]
        for (s, n), part in zip(lengths.items(), np.split(run(made, cache, batch, rows), ends), strict=True):
            got[s].append(part)
            seen[s] += n
    assert seen == {s: len(p) for s, p in prompts.items()}
    for s in prompts:
        np.testing.assert_allclose(np.concatenate(got[s]), alone[s], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_add_up_whether_they_share_groups_or_not(num_ranks):
    stored = {}
    rows, batch = draw(9, HIDDEN), ((0, 1), (0, 0), (8, 1))
    whole = mixer(FakeTp(), stored)
    want = run(whole, whole.new_cache([5], 2), batch, rows)
    parts = [mixer(tp, stored) for tp in ranks(num_ranks, defers=True)]
    shares = [run(part, part.new_cache([5], 2), batch, rows) for part in parts]
    np.testing.assert_allclose(sum(shares), want, rtol=1e-4, atol=1e-5)
    assert {part.heads for part in parts} == {SIZES.num_heads // min(num_ranks, SIZES.n_groups)}
    read = [(spec.key, spec.shape) for spec in parts[-1].checkpoint_tensors()]
    assert read == [(spec.key, spec.shape) for spec in whole.checkpoint_tensors()]


def test_16_bit_activations_are_computed_in_float32():
    made = mixer(FakeTp())
    rows = draw(5, HIDDEN)
    want = run(made, made.new_cache([5], 1), ((0,), (0,), (5,)), rows)
    step = StateStep(PackedBatch((0,), (0,), (5,)), made.new_cache([5], 1))
    got = made(tensor(rows, "bfloat16"), step)
    assert got.dtype == paddle.bfloat16
    np.testing.assert_allclose(array(got), want, atol=0.03 * np.abs(want).max())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 4, 3, 0, 1), "mamba_num_heads 8 is not a positive multiple of n_groups 3"),
        ((8, 4, 4, 0, 3), "mamba_num_heads . mamba_head_dim 32 is not divisible by tensor_parallel_size 3"),
        (
            (6, 4, 2, 0, 3),
            "n_groups 2 is neither a multiple nor a divisor of tensor_parallel_size 3; choose one of .1,",
        ),
    ],
)
def test_splits_that_do_not_work_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        split_mamba(*sizes)
