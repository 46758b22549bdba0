#!/usr/bin/env python3
"""Make a GLM4-MoE checkpoint of random weights in Hugging Face layout, for benchmarks and memory tests.

    python tools/make_checkpoint.py DIR --size bench [--dtype F32] [--files 2]

Sizes: `tiny` (a few MB, seconds a test), `bench` (decoding where reductions matter: 24 layers of hidden 1024), `wide`
(1.5 GB in float32, to watch memory while loading). Text is meaningless; speed and memory are real.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    "tiny": {"layers": 4, "hidden": 128, "heads": 8, "kv": 2, "dense": 256, "expert": 64, "experts": 8},
    "bench": {"layers": 24, "hidden": 1024, "heads": 16, "kv": 4, "dense": 2048, "expert": 256, "experts": 8},
    "wide": {"layers": 8, "hidden": 2048, "heads": 16, "kv": 4, "dense": 8192, "expert": 1024, "experts": 8},
}
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
HEAD_DIM = 64
TOP_K = 2


def config(size: dict[str, int], vocab_size: int, dtype: str) -> dict:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "torch_dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype],
        "vocab_size": vocab_size,
        "hidden_size": size["hidden"],
        "intermediate_size": size["dense"],
        "moe_intermediate_size": size["expert"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv"],
        "head_dim": HEAD_DIM,
        "n_routed_experts": size["experts"],
        "n_shared_experts": 1,
        "num_experts_per_tok": TOP_K,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "attention_bias": True,
        "use_qk_norm": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": [0],
    }


def mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def layer_shapes(layer: int, size: dict[str, int]) -> dict[str, tuple[int, ...]]:
    prefix, hidden = f"model.layers.{layer}", size["hidden"]
    q, kv = size["heads"] * HEAD_DIM, size["kv"] * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.self_attn.o_proj.weight": (hidden, q),
    }
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        shapes[f"{prefix}.self_attn.{name}.weight"] = (rows, hidden)
        shapes[f"{prefix}.self_attn.{name}.bias"] = (rows,)
    if layer == 0:
        return shapes | mlp_shapes(f"{prefix}.mlp", hidden, size["dense"])
    shapes[f"{prefix}.mlp.gate.weight"] = (size["experts"], hidden)
    shapes[f"{prefix}.mlp.gate.e_score_correction_bias"] = (size["experts"],)
    shapes |= mlp_shapes(f"{prefix}.mlp.shared_experts", hidden, size["expert"])
    for expert in range(size["experts"]):
        shapes |= mlp_shapes(f"{prefix}.mlp.experts.{expert}", hidden, size["expert"])
    return shapes


def groups_of_shapes(size: dict[str, int], vocab_size: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Shapes layer by layer, the parts outside the layers last."""
    for layer in range(size["layers"]):
        yield layer_shapes(layer, size)
    hidden = size["hidden"]
    yield {
        "model.embed_tokens.weight": (vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab_size, hidden),
    }


def tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if "norm" in name:
        return np.ones(shape, np.float32)
    scale = 0.02 if len(shape) == 1 else shape[-1] ** -0.5
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


def make(folder: Path, size_name: str, dtype: str, num_files: int, seed: int) -> int:
    """Write the checkpoint; returns its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = ROOT / "tests/data/glm4_moe_a/tokenizer.json"
    shutil.copy(tokenizer, folder / "tokenizer.json")
    vocab_size = 384
    size = SIZES[size_name]
    (folder / "config.json").write_text(json.dumps(config(size, vocab_size, dtype), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    rng = np.random.default_rng(seed)
    shape_groups = list(groups_of_shapes(size, vocab_size))
    index: dict[str, str] = {}
    total = 0
    for number in range(num_files):
        name = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        tensors = {}
        for shapes in shape_groups[number::num_files]:
            tensors |= {key: tensor(key, shape, rng).astype(DTYPES[dtype]) for key, shape in shapes.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
        total += sum(array.nbytes for array in tensors.values())
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document, indent=1))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--dtype", choices=DTYPES, default="F32")
    parser.add_argument("--files", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    total = make(args.folder, args.size, args.dtype, args.files, args.seed)
    print(f"{args.folder}: {total / 1e6:.1f} MB, {args.files} files, {args.dtype}")


if __name__ == "__main__":
    main()
