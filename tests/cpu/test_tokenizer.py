"""Prompts as tokens: whole, as they are, and only tokens that the model has."""

import json
from types import SimpleNamespace

import pytest

from fastdeploy_fusion.cli.generate_rank import encode
from fastdeploy_fusion.cli.parser import UsageError
from fastdeploy_fusion.tokenizer import load_tokenizer, token_ids

TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<|endoftext|>",
}


@pytest.mark.parametrize("saved", [{"truncation": TRUNCATION}, {"padding": PADDING}])
def test_truncation_and_padding_that_were_saved_change_no_prompt(data, tmp_path, saved):
    document = json.loads((data / "glm4_moe_a" / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(document | saved))
    plain, loaded = load_tokenizer(data / "glm4_moe_a"), load_tokenizer(tmp_path)
    for text in ("hello ", "hello " * 50):
        assert loaded.encode(text).ids == plain.encode(text).ids


def test_tokens_that_the_model_has_not_are_refused(data):
    tokenizer = load_tokenizer(data / "glm4_moe_a")
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<|extra|>"])
    assert token_ids(tokenizer, "<|extra|>", size + 1, add_special_tokens=False) == [size]
    with pytest.raises(ValueError, match=rf"'<\|extra\|>', .* {size}; the model has 0 to {size - 1}: leave it out"):
        token_ids(tokenizer, "a <|extra|>", size, add_special_tokens=False)
    config = SimpleNamespace(vocab_size=size, max_position_embeddings=None)
    with pytest.raises(UsageError, match=r"^prompt 2: the prompt holds '<\|extra\|>'"):
        encode(tokenizer, ["a", "<|extra|>"], config, 5)
