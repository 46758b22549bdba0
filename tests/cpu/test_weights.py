"""Loading: every tensor is accounted for before one is read, only this rank's part is read, and little else is held."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file

from fastdeploy_fusion import checkpoint
from fastdeploy_fusion.errors import CheckpointError
from fastdeploy_fusion.layers.parameter import TensorSpec, empty_parameter
from fastdeploy_fusion.weights import BUFFER, MTP_LAYER, TIED_HEAD, load_weights, skip_rule
from tests.fake_tp import FakeGroup, array, draw

ROOT = Path(__file__).resolve().parents[2]


def whole(key, shape, dtype="float32"):
    index = tuple(slice(0, n) for n in shape)
    return TensorSpec(key, tuple(shape), empty_parameter(list(shape), dtype), index, index)


def load(specs, folder, num_hidden_layers=4, **options):
    return load_weights(
        specs, folder, group=FakeGroup(0, 1), num_hidden_layers=num_hidden_layers, progress=False, **options
    )


def write(folder, tensors, name="model.safetensors"):
    save_file(tensors, folder / name)
    return folder


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("file_dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_files_own_dtype_is_read_into_the_parameters(tmp_path, file_dtype, param_dtype):
    stored = draw(6, 5).astype(file_dtype)
    spec = whole("w", (6, 5), param_dtype)
    summary = load([spec], write(tmp_path, {"w": stored}))
    want = paddle.to_tensor(stored.astype(np.float32)).astype(param_dtype)
    np.testing.assert_array_equal(array(spec.param), array(want))
    assert (summary.num_loaded, summary.num_bytes) == (1, stored.nbytes)


def test_slices_go_where_the_spec_says_in_chunks_and_across_reopened_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 100)
    monkeypatch.setattr(checkpoint, "REOPEN_BYTES", 250)
    stored = draw(12, 10)
    param = empty_parameter([2, 9, 4], "float32")
    spec = TensorSpec("w", (12, 10), param, (1, slice(2, 7), slice(0, 4)), (slice(4, 9), slice(3, 7)))
    other = TensorSpec("b", (12,), None, (slice(0, 12),), (slice(0, 12),))
    summary = load([spec, other], write(tmp_path, {"w": stored, "b": draw(12)}))
    np.testing.assert_array_equal(array(param)[1, 2:7], stored[4:9, 3:7])
    assert summary.num_bytes == 5 * 4 * 4


def test_one_error_lists_everything_with_the_nearest_names(tmp_path):
    write(
        tmp_path,
        {"model.layers.0.mlp.up_prjo.weight": draw(2, 2), "odd": draw(2), "n": draw(3), "i": np.zeros(2, "i8")},
    )
    specs = [
        whole("model.layers.0.mlp.up_proj.weight", (2, 2)),
        whole("n", (4,)),
        whole("i", (2,)),
        whole("gone", (1,)),
    ]
    with pytest.raises(CheckpointError) as caught:
        load(specs, tmp_path)
    text = str(caught.value)
    assert (
        "2 missing:\n  model.layers.0.mlp.up_proj.weight  (nearest stored: model.layers.0.mlp.up_prjo.weight)" in text
    )
    assert "gone  (no stored name is near)" in text
    assert "2 unexpected:" in text and "(nearest expected: model.layers.0.mlp.up_proj.weight)" in text
    assert "1 of another shape:\n  n  ([3], expected [4])" in text
    assert "1 of an unknown dtype:\n  i  (I64, expected F32 or F16 or BF16)" in text


def test_a_long_list_is_cut_and_counted(tmp_path):
    write(tmp_path, {"x": draw(1)})
    with pytest.raises(CheckpointError, match=r"(?s)40 missing:.*\.\.\. and 28 more"):
        load([whole(f"model.layers.1.experts.{i}.weight", (1,)) for i in range(40)], tmp_path)


def test_nothing_is_written_before_everything_is_accounted_for(tmp_path):
    spec = whole("w", (2,))
    spec.param.set_value(paddle.zeros([2]))
    with pytest.raises(CheckpointError):
        load([spec, whole("gone", (1,))], write(tmp_path, {"w": draw(2)}))
    np.testing.assert_array_equal(array(spec.param), 0.0)


def test_a_missing_head_says_that_it_is_not_tied(tmp_path):
    with pytest.raises(CheckpointError, match="does not tie the head to the embedding; set tie_word_embeddings"):
        load([whole("w", (2,)), whole("lm_head.weight", (2,))], write(tmp_path, {"w": draw(2)}))


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("model.layers.3.mlp.up_proj.weight", None),
        ("model.layers.4.eh_proj.weight", MTP_LAYER),
        ("model.language_model.layers.5.enorm.weight", MTP_LAYER),
        ("layers.92.shared_head.norm.weight", MTP_LAYER),
        ("model.mtp_layers.7.weight", None),
        ("model.layers.0.mlp.experts.77.up_proj.weight", None),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", BUFFER),
        ("lm_head.weight", TIED_HEAD),
    ],
)
def test_what_is_skipped_by_which_rule(key, rule):
    assert skip_rule(key, 4, tied_head="lm_head.weight") == rule


def test_skipped_tensors_are_counted_by_rule_noted_and_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    stored = {"w": draw(2), "layers.4.a": draw(1), "x.layers.5.b": draw(1), "lm_head.weight": draw(2, 2)}
    summary = load([whole("w", (2,))], write(tmp_path, stored), tied_head="lm_head.weight")
    assert summary.skipped == {MTP_LAYER: 2, TIED_HEAD: 1}
    assert any("config.json ties it to the embedding: the embedding is used" in note for note in summary.notes)
    assert tuple(caplog.messages) == summary.notes


def index(folder, weight_map):
    (folder / checkpoint.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_many_files_are_read_through_their_index(tmp_path):
    a, b = draw(2), draw(3)
    write(tmp_path, {"a": a}, "model-00001-of-00002.safetensors")
    write(tmp_path, {"b": b}, "model-00002-of-00002.safetensors")
    index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    specs = [whole("b", (3,)), whole("a", (2,))]
    assert load(specs, tmp_path).num_loaded == 2
    np.testing.assert_array_equal(array(specs[0].param), b)


def test_a_file_that_the_index_names_but_nobody_has(tmp_path):
    index(tmp_path, {"a": "model-00001-of-00001.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001.safetensors \(missing\)"):
        load([whole("a", (2,))], tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index_is_named(tmp_path, text):
    (tmp_path / checkpoint.INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json is not a safetensors index"):
        load([whole("a", (2,))], tmp_path)


def test_an_index_can_not_point_outside_its_folder(tmp_path):
    index(tmp_path, {"a": "../model.safetensors"})
    with pytest.raises(CheckpointError, match="outside its folder"):
        load([whole("a", (2,))], tmp_path)


@pytest.mark.parametrize("size", [0, 5, 60, 150])
def test_a_truncated_file_is_named_with_its_size(tmp_path, size):
    write(tmp_path, {"a": draw(64)})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=rf"model.safetensors \({size} bytes\).*(?s:.*)download or copy"):
        load([whole("a", (64,))], tmp_path)


def test_a_tensor_stored_twice_is_refused(tmp_path):
    for name in ("model-1.safetensors", "model-2.safetensors"):
        write(tmp_path, {"a": draw(2)}, name)
    with pytest.raises(CheckpointError, match="a is stored in both model-1.safetensors and model-2.safetensors"):
        load([whole("a", (2,))], tmp_path)


def test_a_folder_without_weights_says_what_it_has(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no \*.safetensors file \(it has: \['pytorch_model.bin'\]\)"):
        load([whole("a", (2,))], tmp_path)
    with pytest.raises(CheckpointError, match="no folder"):
        load([whole("a", (2,))], tmp_path / "nowhere")


def test_a_bar_is_shown_on_rank_0s_stderr_only(tmp_path, capfd):
    write(tmp_path, {"w": draw(2)})
    for progress in (False, True):
        load_weights([whole("w", (2,))], tmp_path, group=FakeGroup(0, 1), num_hidden_layers=1, progress=progress)
        out, err = capfd.readouterr()
        assert out == "" and ("100%" in err) == progress


PEAK = """
import sys
from tests.cpu.test_weights import peak_of_loading
peak_of_loading(sys.argv[1])
"""


def peak_of_loading(folder):
    """Print (shard bytes, growth of the peak memory) of reading one of two shards, as split by rows and by columns."""
    shapes = {f"w{i}": (4096, 2048) for i in range(12)}
    specs = []
    for i, (key, (rows, columns)) in enumerate(shapes.items()):
        if i % 2:
            param, src = (
                empty_parameter([rows, columns // 2], "float32"),
                (slice(0, rows), slice(columns // 2, columns)),
            )
        else:
            param, src = empty_parameter([rows // 2, columns], "float32"), (slice(rows // 2, rows), slice(0, columns))
        dst = tuple(slice(0, n) for n in param.shape)
        specs.append(TensorSpec(key, (rows, columns), param, dst, src))
    before = peak_rss()
    load(specs, Path(folder))
    print(sum(int(np.prod(s.param.shape)) * 4 for s in specs), peak_rss() - before)


def peak_rss():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def test_peak_memory_is_the_shard_and_at_most_a_quarter_more(tmp_path):
    for half in range(2):
        tensors = {f"w{i}": np.ones((4096, 2048), ml_dtypes.bfloat16) for i in range(half * 6, half * 6 + 6)}
        write(tmp_path, tensors, f"model-{half}.safetensors")
    done = subprocess.run([sys.executable, "-c", PEAK, tmp_path], cwd=ROOT, text=True, capture_output=True, timeout=120)
    shutil.rmtree(tmp_path)
    assert done.returncode == 0, done.stderr
    shard, growth = map(int, done.stdout.split())
    assert growth <= 1.25 * shard, f"{growth / shard:.2f} times the shard of {shard >> 20} MiB"
