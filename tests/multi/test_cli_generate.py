"""`generate` from the shell, end to end: the answers, what reaches stdout, and how it ends when something is wrong."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.leftovers import new_segments, processes_with

TOKEN = ("GENERATE_TEST_TOKEN", f"{os.getpid()}.")  # in the environment of all that this file starts
FUSED = ("--enable-flashinfer-allreduce-fusion",)


@pytest.fixture(autouse=True)
def end_what_a_failed_test_leaves():
    yield
    for pid in processes_with("=".join(TOKEN)):
        os.kill(pid, signal.SIGKILL)


def start(*argv, command=(sys.executable, "-m", "fastdeploy_fusion"), cwd=None, **environment):
    env = {**os.environ, TOKEN[0]: TOKEN[1], **environment}
    return subprocess.Popen(
        [*command, "generate", *map(str, argv)],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(*argv, timeout=60, **options):
    """(exit code, stdout, stderr), after which nothing of it may be left: no process, no shared memory."""
    before = set(os.listdir("/dev/shm"))
    process = start(*argv, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate()
        pytest.fail(f"not done after {timeout} s\n{out.decode()}\n{err.decode()}")
    assert_nothing_left(before)
    # Decoded here: a text stream would turn the "\r" of some answers into "\n".
    return process.returncode, out.decode(), err.decode()


def assert_nothing_left(shm_before):
    deadline = time.monotonic() + 2
    while (left := processes_with("=".join(TOKEN))) or (left := new_segments(shm_before)):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)


def expected(model):
    return json.loads((model / "expected_text.json").read_text(encoding="utf-8"))


def prompts_of(model):
    return [word for entry in expected(model) for word in ("--prompt", entry["prompt"])]


def size(ranks):
    return ("--tensor-parallel-size", str(ranks))


def check_answers(document, model):
    assert list(document) == ["results", "stats"]
    for result, entry in zip(document["results"], expected(model), strict=True):
        assert list(result) == ["prompt", "prompt_token_ids", "token_ids", "text", "finish_reason"]
        assert result["prompt"] == entry["prompt"]
        assert result["prompt_token_ids"] == entry["prompt_ids"]
        assert result["token_ids"] == entry["greedy_ids"]
        assert result["text"] == entry["text"]
        assert result["finish_reason"] == ("length" if len(entry["greedy_ids"]) == 24 else "stop")


def calls(document, path):
    return sum(entry["calls"] for entry in document["stats"]["sums"] if entry["path"] == path)


@pytest.mark.parametrize("model", ["glm4_moe_a", "glm4_moe_b"])
@pytest.mark.parametrize(
    "ranks, flags", [(1, ()), (2, ()), (2, FUSED), (2, (*FUSED, "--flashinfer-allreduce-fusion-max-tokens=8"))]
)
def test_json_answers(data, model, ranks, flags):
    argv = ["--model", data / model, *prompts_of(data / model), "--max-new-tokens", "24", "--json", *size(ranks)]
    code, out, err = run(*argv, *flags)
    assert code == 0, err
    document = json.loads(out)
    assert out.count("\n") == 1
    check_answers(document, data / model)
    stats = document["stats"]
    assert (stats["num_ranks"], stats["dtype"], stats["new_tokens"]) == (ranks, "float32", 24 * 5)
    assert stats["tokens_per_second"] > 0
    assert bool(calls(document, "fused")) == (flags != ())
    assert bool(calls(document, "plain")) == (ranks > 1 and flags != FUSED)


@pytest.mark.parametrize(
    "sizes",
    ["--data-parallel-size=2", "--context-parallel-size=2", "--pipeline-parallel-size=2 --tensor-parallel-size=2"],
)
def test_every_layout_gives_the_same_answers_in_the_order_of_the_prompts(data, sizes):
    model = data / "glm4_moe_a"
    argv = ["--model", model, *prompts_of(model), "--max-new-tokens", "24", "--json", *sizes.split(), *FUSED]
    code, out, err = run(*argv)
    assert code == 0, err
    document = json.loads(out)
    check_answers(document, model)
    assert document["stats"]["num_ranks"] == 2 ** len(sizes.split())
    assert document["stats"]["new_tokens"] == 24 * 5


def test_text_answers_and_the_closing_line(data, tmp_path):
    model = data / "glm4_moe_a"
    entries = expected(model)[:3]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"{entry['prompt']}\n\n" for entry in entries[1:]), encoding="utf-8")
    argv = ["--model", model, "--prompt", entries[0]["prompt"], "--prompt-file", prompts]
    code, out, err = run(*argv, "--max-new-tokens", "24", *size(2), *FUSED)
    assert code == 0, err
    answers, _, closing = out.rstrip("\n").rpartition("\n\n")
    assert answers == "\n\n".join(f"> {entry['prompt']}\n{entry['text']}" for entry in entries)
    assert re.fullmatch(
        r"72 tokens in \d+\.\d\d s, \d+\.\d tokens/s on 2 ranks; sums: \d+ \w+ fused \(fits the fused workspace\)"
        r"(, \d+ \w+ fused \(fits the fused workspace\))*; fused: fits the fused workspace \(shm\)",
        closing,
    )


def test_an_eos_token_ends_an_answer_and_is_not_part_of_it(data, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(data / "glm4_moe_a", model)
    entry = expected(model)[0]
    settings = json.loads((model / "generation_config.json").read_text())
    settings["eos_token_id"] = [0, entry["greedy_ids"][5]]
    (model / "generation_config.json").chmod(0o644)
    (model / "generation_config.json").write_text(json.dumps(settings))
    argv = ["--model", model, "--prompt", entry["prompt"], "--max-new-tokens", "8", "--json"]
    (result,) = json.loads(run(*argv)[1])["results"]
    assert (result["token_ids"], result["finish_reason"]) == (entry["greedy_ids"][:5], "stop")
    (result,) = json.loads(run(*argv, "--ignore-eos")[1])["results"]
    assert (result["token_ids"], result["finish_reason"]) == (entry["greedy_ids"][:8], "length")


def test_a_seed_gives_the_same_samples_on_any_number_of_ranks(data):
    argv = ["--model", data / "glm4_moe_a", "--prompt", "2 + 2 =", "--max-new-tokens", "12", "--json"]
    argv += ["--prompt", "one more"]
    sampling = ["--temperature", "0.9", "--top-p", "0.95", "--seed", "7"]
    sizes = (size(1), size(2), ("--data-parallel-size", "2"))
    one, *others = (json.loads(run(*argv, *sampling, *flags)[1])["results"] for flags in sizes)
    assert others == [one, one]
    assert one[0]["token_ids"] != expected(data / "glm4_moe_a")[4]["greedy_ids"][:12]


def test_paddles_launcher_starts_the_ranks_as_well(data, tmp_path):
    model = data / "glm4_moe_a"
    script = Path(sys.executable).with_name("fastdeploy-fusion")
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_level", "ERROR"]
    argv = ["--model", model, *prompts_of(model), "--max-new-tokens", "24", "--json", *size(2), *FUSED]
    code, out, err = run(*argv, command=[*launcher, "--log_dir", str(tmp_path), str(script)], cwd=tmp_path)
    assert code == 0, out + err
    # This launcher merges the ranks' stdout and stderr, so the document is a line among others.
    (line,) = [line for line in out.splitlines() if line.startswith('{"results"')]
    check_answers(json.loads(line), model)


def generate_with_fault(data, fault, *sizes):
    begin = time.monotonic()
    argv = ["--model", data / "glm4_moe_a", "--prompt", "2 + 2 =", "--prompt", "p", "--max-new-tokens", "24"]
    code, out, err = run(*argv, *size(2), *sizes, *FUSED, FDFUSION_FAULT=fault)
    assert "Traceback" not in err and "FatalError" not in err, err
    return code, out, [line for line in err.splitlines() if line.startswith("error:")], time.monotonic() - begin


def start_long(data, **environment):
    """A run of some seconds on two ranks, returned when both generate."""
    argv = ["--model", data / "glm4_moe_a", "--prompt", "2 + 2 =", "--max-new-tokens", "500", "--ignore-eos"]
    launcher = start(*argv, *size(2), *FUSED, **environment)
    while b"weights" not in (line := launcher.stderr.readline()):
        assert line, "it ended before the weights were read"
    time.sleep(1.5)  # that was rank 0: while ranks load they wait for each other for minutes
    return launcher


def pid_of_rank(rank):
    def is_it(pid):
        return f"PADDLE_TRAINER_ID={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()

    (pid,) = [pid for pid in processes_with("=".join(TOKEN)) if is_it(pid)]
    return pid


def end_of(launcher, shm_before):
    """(exit code, stdout, lines of errors), at most 10 s from now and with nothing left."""
    begin = time.monotonic()
    out, err = launcher.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert_nothing_left(shm_before)
    assert b"Traceback" not in err
    return launcher.returncode, out.decode(), [line for line in err.decode().splitlines() if line.startswith("error:")]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all(data, rank):
    before = set(os.listdir("/dev/shm"))
    launcher = start_long(data)
    os.kill(pid_of_rank(rank), signal.SIGKILL)
    assert end_of(launcher, before) == (1, "", [f"error: rank {rank} of 2 was killed by SIGKILL"])


def test_a_rank_that_stands_still_is_named_by_its_peer(data):
    before = set(os.listdir("/dev/shm"))
    launcher = start_long(data, FDFUSION_CALL_TIMEOUT_S="2")
    os.kill(pid_of_rank(1), signal.SIGSTOP)
    code, out, (error,) = end_of(launcher, before)
    assert (code, out) == (1, "")
    assert error.startswith("error: rank 0 of 2: ") and "rank 1" in error.removeprefix("error: rank 0 of 2: ")


def test_a_rank_that_raises_ends_all(data):
    code, out, errors, seconds = generate_with_fault(data, "call:1:raise:9")
    assert (code, out, errors) == (1, "", ["error: rank 1 of 2: injected fault at call"])
    assert seconds < 15


@pytest.mark.parametrize("sizes", ["--data-parallel-size=2", "--pipeline-parallel-size=2"])
def test_the_rank_that_raises_is_the_one_named_in_other_layouts(data, sizes):
    code, out, errors, seconds = generate_with_fault(data, "call:3:raise:9", sizes)
    assert (code, out, errors) == (1, "", ["error: rank 3 of 4: injected fault at call"])
    assert seconds < 30


def test_a_backend_that_fails_at_the_start_is_replaced_and_said(data):
    code, out, errors, _ = generate_with_fault(data, "create:1:raise")
    assert (code, errors) == (0, [])
    assert "plain (no fused backend for this group)" in out and "injected fault at create" in out


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_outlives_the_launcher(data, number):
    before = set(os.listdir("/dev/shm"))
    launcher = start_long(data)
    launcher.send_signal(number)
    code = -number if number == signal.SIGKILL else 128 + number
    assert end_of(launcher, before) == (code, "", [])


def damage(folder, name, change):
    path = folder / name
    path.chmod(0o644)
    path.write_bytes(change(path.read_bytes()))


def test_a_damaged_checkpoint_is_one_error(data, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(data / "glm4_moe_b", model)
    damage(model, "model.safetensors", lambda content: content[:-1000])
    code, out, err = run("--model", model, "--prompt", "p", *size(2))
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert (code, out, len(errors)) == (2, "", 1)
    assert "model.safetensors" in err and "Traceback" not in err


def test_what_the_model_cannot_do_is_one_error(data):
    argv = ["--model", data / "glm4_moe_a", "--prompt", "p"]
    for more, words in ((size(3), "3"), (("--max-new-tokens", "600"), "prompt 1 has")):
        code, out, err = run(*argv, *more)
        errors = [line for line in err.splitlines() if line.startswith("error:")]
        assert (code, out, len(errors)) == (2, "", 1), err
        assert words in errors[0] and "Traceback" not in err


def test_debugging_adds_the_traceback(data):
    code, _, err = run("--model", data / "glm4_moe_a", "--prompt", "p", *size(3), FDFUSION_DEBUG="1")
    assert code == 2 and "Traceback" in err
