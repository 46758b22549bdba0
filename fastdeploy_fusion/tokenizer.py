"""A checkpoint's tokenizer, as every command loads it and asks it."""

from pathlib import Path
from typing import Any


def load_tokenizer(model_dir: Path) -> Any:
    """``tokenizer.json`` without the truncation and padding that it may have been saved with: they belong to the
    training that it was saved in, and would change prompts without a word."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def token_ids(tokenizer: Any, text: str, vocab_size: int, *, add_special_tokens: bool) -> list[int]:
    """The text's tokens.

    Raises:
        ValueError: one of them is none of the model's; tokenizers may know more tokens than the embedding has rows.
    """
    ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    unknown = max(ids, default=0)
    if unknown >= vocab_size:
        raise ValueError(
            f"the prompt holds {tokenizer.id_to_token(unknown)!r}, for the tokenizer token {unknown}; the model has "
            f"0 to {vocab_size - 1}: leave it out"
        )
    return ids
