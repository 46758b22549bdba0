"""What the command line says before any rank is started."""

import os

import pytest

import fastdeploy_fusion
from fastdeploy_fusion.cli import main
from fastdeploy_fusion.cli.output import answer_only_on_stdout

FUSION = "--enable-flashinfer-allreduce-fusion"


def run(capsys, *argv):
    """(exit code, stderr) of `generate` in this process; nothing may be written to stdout."""
    try:
        code = main(["generate", *argv])
    except SystemExit as leaving:
        code = leaving.code
    out, err = capsys.readouterr()
    assert out == ""
    return code, err


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("--enable-flashinfer-all-reduce-fusion", FUSION),
        ("--enable-flashinfer-allreduce-fusio", FUSION),
        ("--enable_flashinfer_allreduce_fusion", FUSION),
        ("--flashinfer-allreduce-fusion-backends=shm", "--flashinfer-allreduce-fusion-backend"),
        ("--flashinfer-allreduce-fusion-max-token=3", "--flashinfer-allreduce-fusion-max-tokens"),
        ("--tensor-parallel=2", "--tensor-parallel-size"),
        ("--max-new-token", "--max-new-tokens"),
        ("--prompts", "--prompt"),
    ],
)
def test_a_misspelt_flag_is_an_error_that_names_the_right_one(capsys, wrong, right):
    code, err = run(capsys, "--model", "m", "--prompt", "p", wrong, "7")
    assert (code, err) == (2, f"error: unknown flag {wrong.split('=')[0]}; did you mean {right}?\n")


@pytest.mark.parametrize(
    "flag, values",
    [
        ("--max-new-tokens", ("0", "-1", "many", "1.5", "")),
        ("--tensor-parallel-size", ("0", "-2", "two", "2.0")),
        ("--flashinfer-allreduce-fusion-max-tokens", ("0", "-1", "none")),
        ("--flashinfer-allreduce-fusion-backend", ("nccl", "")),
        ("--temperature", ("-0.1", "hot", "nan", "inf")),
        ("--top-p", ("0", "1.1", "nan", "-1")),
        ("--seed", ("-1", "x", "1.0")),
        ("--dtype", ("float64", "fp16")),
    ],
)
def test_values_out_of_range_are_errors(capsys, flag, values):
    for value in values:
        code, err = run(capsys, "--model", "m", "--prompt", "p", f"{flag}={value}")
        assert code == 2 and err.startswith(f"error: argument {flag}: ") and err.count("\n") == 1


def test_what_is_missing_is_said(capsys, tmp_path):
    assert run(capsys) == (2, "error: no prompt: give --prompt TEXT or --prompt-file FILE\n")
    assert run(capsys, "--prompt", "p") == (2, "error: no model: give --model DIR\n")
    assert run(capsys, "--prompt", "p", "--prompt", "", "--model", "m")[1].startswith("error: prompt 2 is empty")
    assert run(capsys, "--prompt", "p", "--prompt", "caf\udce9")[1] == (
        "error: prompt 2, 'caf\\udce9', is not UTF-8: give it as text in UTF-8\n"
    )
    assert run(capsys, "--prompt", "p", "--model", "/no/such") == (2, "error: --model /no/such: no such folder\n")
    nothing = run(capsys, "--prompt", "p", "--model", str(tmp_path))
    assert nothing == (2, f"error: --model {tmp_path}: config.json: No such file or directory\n")


def test_unreadable_files_are_named(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{")
    code, err = run(capsys, "--prompt", "p", "--model", str(tmp_path))
    assert code == 2 and err.startswith(f"error: --model {tmp_path}: config.json: ")
    prompts = tmp_path / "prompts"
    assert "No such file" in run(capsys, "--model", "m", "--prompt-file", str(prompts))[1]
    prompts.write_bytes(b"\xff\xfe")
    assert run(capsys, "--model", "m", "--prompt-file", str(prompts))[0] == 2
    prompts.write_text("\n \n")
    assert run(capsys, "--model", "m", "--prompt-file", str(prompts))[1].startswith("error: no prompt")


def test_a_world_of_another_size_is_refused(capsys, monkeypatch, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "4")
    code, err = run(capsys, "--prompt", "p", "--model", str(tmp_path), "--tensor-parallel-size", "2")
    assert code == 2 and "started 4 ranks but the layout has 2 ranks (--tensor-parallel-size 2)" in err


def test_debugging_shows_tracebacks(monkeypatch):
    monkeypatch.setenv("FDFUSION_DEBUG", "1")
    with pytest.raises(ValueError, match="no prompt"):
        main(["generate"])


def test_only_the_answer_reaches_stdout(capfd):
    with answer_only_on_stdout() as answer:
        print("chatter")
        os.write(1, b"chatter of C++\n")
        answer.write("answer 好\n")
    print("afterwards")
    out, err = capfd.readouterr()
    assert out == "answer 好\nafterwards\n"
    assert sorted(err.splitlines()) == ["chatter", "chatter of C++"]


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out == f"fastdeploy-fusion {fastdeploy_fusion.__version__}\n"


def test_a_models_name_has_to_be_text(capsys, data):
    assert main(["serve", "--model", str(data / "glm4_moe_a"), "--served-model-name", "caf\udce9"]) == 2
    assert capsys.readouterr().err == (
        "error: the model's name 'caf\\udce9' is not UTF-8: give another --served-model-name\n"
    )
