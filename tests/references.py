"""The small reference checkpoints in tests/data and what transformers answers for them."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

NUM_PROMPTS = 4


def load_reference(folder):
    """``(prompts, logits, greedy)`` of the four prompts: token ids, float32 ``[len, vocab]``, 16 token ids."""
    stored = np.load(Path(folder) / "expected.npz")
    indices = range(NUM_PROMPTS)
    return (
        [stored[f"prompt_{k}"].tolist() for k in indices],
        [stored[f"logits_{k}"] for k in indices],
        [stored[f"greedy_{k}"].tolist() for k in indices],
    )


def round_rotary_as_the_reference_did(model, folder):
    """The bfloat16 reference was computed with the model cast to bfloat16 and back, which also rounded its rotary
    frequencies (not weights, and float32 in every deployment). Do the same, so that the rest can be compared closely.
    """
    if json.loads((Path(folder) / "config.json").read_text()).get("torch_dtype") == "bfloat16":
        model.rotary.frequencies = model.rotary.frequencies.astype(ml_dtypes.bfloat16).astype(np.float32)
