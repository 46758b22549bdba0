"""What the ranks of test_flashinfer.py run."""

from typing import Any

import numpy as np
import paddle

from fastdeploy_fusion import groups
from fastdeploy_fusion.backends import WorkspacePlan
from fastdeploy_fusion.backends.flashinfer import live
from fastdeploy_fusion.backends.flashinfer.comm import PeerFailed
from fastdeploy_fusion.backends.flashinfer.launchers import Options
from fastdeploy_fusion.errors import WorkspaceError
from tests.multi.fake_flashinfer import STREAM, FakeFlashInfer, env_stream

HIDDEN, EPS = 64, 1e-5


def _operands(num_ranks: int, tokens: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    rng = np.random.default_rng(tokens)
    partials = [rng.standard_normal((tokens, HIDDEN)).astype("float32") for _ in range(num_ranks)]
    residual, weight = rng.standard_normal((tokens, HIDDEN)), rng.standard_normal(HIDDEN)
    return partials, residual.astype("float32"), weight.astype("float32")


def _expected(partials: Any, residual: Any, weight: Any) -> tuple[np.ndarray, np.ndarray]:
    total = np.sum(partials, 0, "float64") + residual
    return total / np.sqrt((total**2).mean(-1, keepdims=True) + EPS) * weight, total


def _start(num_ranks: int, fault: str = "") -> tuple[Any, FakeFlashInfer, WorkspacePlan]:
    group = groups.init_world()
    fake = FakeFlashInfer(group, fault)
    fake.replace_driver()
    return group, fake, WorkspacePlan(num_ranks, HIDDEN, "float32", 16)


def _check(backend: Any, rank: int, num_ranks: int, tokens: int) -> tuple[Any, Any]:
    partials, residual, weight = _operands(num_ranks, tokens)
    tensors = [paddle.to_tensor(array) for array in (partials[rank], residual, weight)]
    norm_out, residual_out = backend.add_rms_norm(*tensors, EPS)
    norm, total = _expected(partials, residual, weight)
    np.testing.assert_allclose(residual_out.numpy(), total, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(norm_out.numpy(), norm, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(backend.all_reduce(tensors[0]).numpy(), np.sum(partials, 0), rtol=1e-5, atol=1e-5)
    return norm_out, residual_out


def routes(rank: int, num_ranks: int) -> dict[str, Any]:
    """Every route gives the reference's numbers; the chosen one is the fastest that Paddle allows."""
    group, fake, plan = _start(num_ranks)
    backend = live.create(fake.way(), group, plan)
    chosen, launches = backend.route, {}
    for route in ("slots", "public", *(["direct"] if chosen == "direct" else [])):
        backend.use(route, Options(pdl=False, oneshot=True))
        fake.calls.clear()
        for tokens in (1, 3, 16, 3):  # back to a shape that was seen
            _check(backend, rank, num_ranks, tokens)
        launches[route] = {(call["launch_with_pdl"], call["use_oneshot"]) for call in fake.calls} == {(False, True)}
        if route == "slots":
            assert {call["stream"] for call in fake.calls} == {STREAM}
            assert env_stream() == 0
    backend.close()
    backend.close()
    assert fake.freed == [100 + 3 * num_ranks]
    try:
        backend.all_reduce(paddle.zeros([1, HIDDEN]))
    except WorkspaceError as error:
        closed = str(error)
    return {"chosen": chosen, "launches": launches, "closed": closed, "exchangeable": _exchangeable()}


def _exchangeable() -> bool:
    from fastdeploy_fusion.backends.flashinfer import paddle_side

    return paddle_side.is_exchangeable()


def nothing_goes_stale(rank: int, num_ranks: int) -> str:
    """Outputs that come back as residuals, freed and reused memory, changed weights: views follow the tensors."""
    group, fake, plan = _start(num_ranks)
    backend = live.create(fake.way(), group, plan)
    for route in ("slots", backend.route):
        backend.use(route)
        weight = paddle.to_tensor(np.ones(HIDDEN, "float32"))
        residual = paddle.zeros([4, HIDDEN])
        expected = np.zeros((4, HIDDEN))
        for step in range(20):
            partials, _, _ = _operands(num_ranks, 4)
            partials = [part * (step + 1) for part in partials]
            norm_out, residual = backend.add_rms_norm(paddle.to_tensor(partials[rank]), residual, weight, EPS)
            norm, expected = _expected(partials, expected, weight.numpy())
            np.testing.assert_allclose(norm_out.numpy(), norm, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(residual.numpy(), expected, rtol=1e-4, atol=1e-4)
            weight = paddle.to_tensor(np.full(HIDDEN, step + 2.0, "float32"))
    backend.close()
    return "ok"


def odd_operands(rank: int, num_ranks: int) -> str:
    """Views that are not aligned to 16 bytes are copied, not misread."""
    group, fake, plan = _start(num_ranks)
    backend = live.create(fake.way(), group, plan)
    backend.use("slots")
    partials, residual, weight = _operands(num_ranks, 3)
    long = np.concatenate([[0], weight]).astype("float32")
    flat = np.concatenate([[0], partials[rank].ravel()]).astype("float32")
    partial = paddle.to_tensor(flat)[1:].reshape([3, HIDDEN])
    norm_out, _ = backend.add_rms_norm(partial, paddle.to_tensor(residual), paddle.to_tensor(long)[1:], EPS)
    np.testing.assert_allclose(norm_out.numpy(), _expected(partials, residual, weight)[0], rtol=1e-4, atol=1e-4)
    assert all(pointer % 16 == 0 for call in fake.calls for pointer in call["pointers"])
    backend.close()
    return "ok"


def one_rank_fails(rank: int, num_ranks: int, fault: str) -> str:
    """A rank that fails inside FlashInfer takes all along, with its reason, and the channel stays in step."""
    group, fake, plan = _start(num_ranks, fault if rank == 1 else "")
    try:
        live.create(fake.way(), group, plan)
        text = "made"
    except PeerFailed as error:
        text = f"PeerFailed: {error}"
    except MemoryError as error:
        text = f"MemoryError: {error}"
    assert group.all_gather_object(rank) == list(range(num_ranks))
    return text


def wrong_route_is_left(rank: int, num_ranks: int) -> list[str]:
    """Where one rank's bound call disagrees with the public one, all ranks use the public one."""
    group, fake, plan = _start(num_ranks, "wrong" if rank == 1 else "")
    backend = live.create(fake.way(), group, plan)
    found = [backend.route, backend.route_reason]
    backend.close()
    return found
