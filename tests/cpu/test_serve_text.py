"""Text as tokens come: never half a character or part of a stop string, in the end what decoding at once gives."""

import random

import pytest
from tokenizers import Tokenizer

from fastdeploy_fusion.serve.text import StopStrings, TextStream


@pytest.fixture(scope="module")
def tokenizer(data):
    return Tokenizer.from_file(str(data / "glm4_moe_a" / "tokenizer.json"))


def streamed(decode, tokens):
    stream = TextStream(decode)
    return [*map(stream.add, tokens), stream.finish()]


@pytest.mark.parametrize("seed", range(30))
def test_pieces_make_up_the_whole(tokenizer, seed):
    rng = random.Random(seed)
    words = ["naïve ", "日本語", "🙂", "👩‍👩‍👧", " plain", "\n", "é", "\ufffd"]
    text = "".join(rng.choice(words) for _ in range(20))
    tokens = tokenizer.encode(text).ids
    if seed % 2:  # broken bytes among them, as a model may write them
        tokens = [t if rng.random() < 0.7 else rng.randrange(3, 384) for t in tokens]
    pieces = streamed(lambda ids: tokenizer.decode(ids), tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)
    if not seed % 2:
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_character_comes_when_all_of_its_bytes_have(tokenizer):
    tokens = tokenizer.encode("a🙂").ids
    assert len(tokens) == 5
    assert streamed(lambda ids: tokenizer.decode(ids), tokens) == ["a", "", "", "", "🙂", ""]


def test_what_never_becomes_a_character_comes_at_the_end(tokenizer):
    tokens = tokenizer.encode("a🙂").ids[:3]
    assert streamed(lambda ids: tokenizer.decode(ids), tokens) == ["a", "", "", "\ufffd"]


def test_decoders_that_drop_a_space_at_the_start():
    words = {0: "▁one", 1: "▁two", 2: "▁three"}

    def decode(ids):
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert streamed(decode, [0, 1, 2]) == ["one", " two", " three", ""]


def test_long_runs_of_broken_bytes_stay_cheap():
    sizes = []

    def decode(ids):
        sizes.append(len(ids))
        return "\ufffd" * len(ids)

    assert "".join(streamed(decode, range(1000))) == "\ufffd" * 1000
    assert max(sizes) < 200


@pytest.mark.parametrize("broken", range(55, 75))
def test_a_character_after_a_long_run_of_broken_bytes_is_whole(tokenizer, broken):
    byte = tokenizer.encode("🙂").ids[0]  # the first of its four
    tokens = [byte] * broken + tokenizer.encode("é日本🙂 end").ids
    pieces = streamed(tokenizer.decode, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens) and "é日本🙂 end" in "".join(pieces)


def cut(text, strings, pieces):
    stops, given = StopStrings(strings), []
    for piece in pieces:
        given.append(stops.feed(piece))
        if stops.hit:
            break
    return "".join(given) + stops.finish(), stops.hit


@pytest.mark.parametrize("strings", [["stop"], ["ab", "abc", "bc"], ["aab"], ["END", "\n\n"], []])
def test_stop_strings_are_found_however_the_text_is_cut(strings):
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice(["a", "b", "c", "st", "op", "END", "\n", "x"]) for _ in range(12))
        ends = sorted(rng.sample(range(len(text) + 1), 4))
        pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
        got, hit = cut(text, strings, pieces)
        # The first place where any of them is complete, in the order in which text comes.
        places = [text.find(s) for s in strings if s in text]
        assert hit == bool(places)
        if not hit:
            assert got == text
        else:
            assert text.startswith(got) and got == text[: len(got)]
            assert any(text[len(got) :].startswith(s) for s in strings)


def test_no_beginning_of_a_stop_string_is_given_out():
    stops = StopStrings(["</s>"])
    assert [stops.feed(c) for c in "a<b</s"] == ["a", "", "<b", "", "", ""]
    assert (stops.finish(), stops.hit) == ("</s", False)
