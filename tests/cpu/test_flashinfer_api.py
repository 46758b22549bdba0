"""Our calls against the real signatures of FlashInfer, recorded by tools/record_flashinfer_api.py."""

import importlib.util
import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastdeploy_fusion.backends import WorkspacePlan
from fastdeploy_fusion.backends.flashinfer import api, bound, detect, driver, public_call
from fastdeploy_fusion.backends.flashinfer.comm import Communicator
from fastdeploy_fusion.backends.flashinfer.launchers import Options, Site

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "flashinfer_api.json").read_text())
FORK, NEWEST = "flashinfer-python-paddle==0.4.1.1", "flashinfer-python==0.7.4"
packages = pytest.mark.parametrize("package", sorted(RECORDED))
usable = pytest.mark.parametrize("package", sorted(name for name in RECORDED if RECORDED[name]["api"] != "unknown"))


class Recorded:
    """A function with a recorded signature; it keeps what it was called with, bound to the parameters."""

    def __init__(self, recorded, refers_to=(), then=None):
        parameters = [
            inspect.Parameter(name, inspect._ParameterKind[kind], default=None if optional else inspect.Parameter.empty)
            for name, kind, optional in recorded
        ]
        self.__signature__ = inspect.Signature(parameters)
        self.__code__ = SimpleNamespace(co_names=tuple(refers_to))
        self.calls = []
        self.then = then

    def __call__(self, *args, **kwargs):
        self.calls.append(self.__signature__.bind(*args, **kwargs).arguments)
        return self.then


def flashinfer(package):
    """A stand-in for flashinfer.comm with the recorded signatures."""
    recorded = RECORDED[package]
    comm = SimpleNamespace(**{name: Recorded(found) for name, found in recorded["signatures"].items()})
    comm.trtllm_create_ipc_workspace_for_all_reduce_fusion.__code__.co_names = tuple(recorded["create_refers_to"])
    return comm


def recognize(package):
    comm = flashinfer(package)
    return comm, api.recognize(comm, package.partition("==")[2])


@packages
def test_each_package_is_recognized_as_it_was_when_recorded(package):
    if RECORDED[package]["api"] == "unknown":
        with pytest.raises(api.UnknownApi, match="none of those that this package can use"):
            recognize(package)
        return
    _, found = recognize(package)
    assert found.kind == RECORDED[package]["api"]
    assert found.has_weight_bias == (found.kind == api.KIND_UNIFIED)
    assert found.wide_float32 == (package == NEWEST)


def test_which_package_has_which_api():
    kinds = {package.partition("==")[2]: recorded["api"] for package, recorded in RECORDED.items()}
    assert kinds == {
        "0.4.1.1": "legacy",
        "0.6.6": "legacy",
        "0.6.12": "unknown",
        "0.6.18": "unified",
        "0.7.4": "unified",
    }


def test_an_unknown_api_is_refused_with_both_versions():
    import paddle

    comm = flashinfer(FORK)
    del comm.trtllm_allreduce_fusion
    with pytest.raises(api.UnknownApi, match=rf"FlashInfer 9\.9 with Paddle {paddle.__version__}"):
        api.recognize(comm, "9.9")


def test_a_new_required_argument_is_not_called_past():
    comm = flashinfer(NEWEST)
    recorded = RECORDED[NEWEST]["signatures"]["create_allreduce_fusion_workspace"]
    comm.create_allreduce_fusion_workspace = Recorded([*recorded, ["surprise", "KEYWORD_ONLY", False]])
    with pytest.raises(api.UnknownApi):
        api.recognize(comm, "0.7.9")


@packages
def test_the_compiled_call_s_order_can_be_filled(package):
    order = tuple(RECORDED[package]["order"])
    bound.check_order(order)
    values = bound.Binding(None, order).arguments({"token_num": 7, "pattern_code": 1})
    assert values[order.index("token_num")] == 7
    assert values[order.index("quant_out")] is None


@usable
def test_public_calls_bind(package):
    """The fallback route's arguments, for the norm and for the sum."""
    comm, found = recognize(package)
    way = detect.Way("torch", "0", comm, None, found, None)
    site = Site(2, 0, 64, "float32", 16, 0)
    workspace = SimpleNamespace(unified="workspace", table="table")
    call = public_call.call_unified if found.kind == api.KIND_UNIFIED else public_call.call_legacy
    tensor = SimpleNamespace(reshape=lambda shape: "flat")
    bias = {"weight_bias": 1.0} if found.has_weight_bias else {}
    norm = dict.fromkeys(("residual_in", "residual_out", "norm_out", "rms_gamma"), tensor)
    call(way, workspace, site.constants(bound.NORM, 3, Options()), tensor, norm, {"rms_eps": 1e-6} | bias)
    call(way, workspace, site.constants(bound.ALL_REDUCE, 3, Options()), tensor, {"output": tensor}, {})
    function = comm.allreduce_fusion if found.kind == api.KIND_UNIFIED else comm.trtllm_allreduce_fusion
    first, second = function.calls
    pattern = "pattern" if found.kind == api.KIND_UNIFIED else "pattern_code"
    assert (first[pattern], second[pattern]) == (1, 0)
    assert first["fp32_acc"] is True
    assert first["launch_with_pdl"] is True
    assert first.get("trigger_completion_at_end", True) is True
    assert first.get("weight_bias", 1.0) == 1.0


class FakeGroup:
    """A group of two in which this rank hears itself twice."""

    size, rank = 2, 0

    def all_gather_object(self, value, what=""):
        return [value, value]


@usable
def test_the_workspace_is_made_and_given_back(package, monkeypatch):
    """create and destroy bind; the control flag, which FlashInfer's destroy leaves, is freed; by whichever API."""
    comm, found = recognize(package)
    table, handles, destroyed = SimpleNamespace(data_ptr=lambda: 4096), [[1, 2], [3, 4], [5, 6]], []
    made = SimpleNamespace(
        ipc_handles=handles, workspace_tensor=table, mem_handles=[], destroy=lambda: destroyed.append(True)
    )
    legacy = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion
    legacy.then = (handles, table) if package == FORK else (handles, table, {"more": 1})
    if found.kind == api.KIND_UNIFIED:
        comm.create_allreduce_fusion_workspace.then = made
    freed = []
    monkeypatch.setattr(driver, "read_words", lambda pointer, count: list(range(count)))
    monkeypatch.setattr(driver, "free", freed.append)
    way = detect.Way("proxy", "0", comm, SimpleNamespace(bfloat16="bf16"), found, None)
    workspace = api.Workspace(way, Communicator(FakeGroup()), WorkspacePlan(2, 64, "bfloat16", 16))
    workspace.close(peers_alive=True)
    assert freed == [6]
    (given_back,) = comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion.calls
    assert given_back["workspace"] is handles
    if found.kind == api.KIND_UNIFIED:
        assert comm.create_allreduce_fusion_workspace.calls[0]["backend"] == "trtllm"
        assert comm.create_allreduce_fusion_workspace.calls[0]["comm_backend"].Get_size() == 2
        assert destroyed == [True]
    else:
        assert legacy.calls[0]["group"].get_world_size() == 2


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
def test_the_installed_flashinfer_is_understood():
    way, reason = detect.find_way()
    assert way is not None, reason
