"""A Llama of one layer with random weights, written as a GGUF file: for what the default model cannot show."""

from pathlib import Path

import gguf
import numpy as np

HIDDEN, FORWARD, HEADS, KV_HEADS, TOKENS = 64, 96, 2, 1, 40


def tensors() -> dict[str, np.ndarray]:
    """A whole model of one layer: two heads of 32, one kv head."""
    random = np.random.default_rng(1)
    shapes = {
        "token_embd.weight": (TOKENS, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v.weight": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (FORWARD, HIDDEN),
        "blk.0.ffn_up.weight": (FORWARD, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FORWARD),
    }
    return {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def write(path: Path, weights: dict[str, np.ndarray], architecture: str = "llama", rotated: int = 32, window: int = 0) -> Path:
    """A small GGUF file. rotated: how many values of a head are rotated, of 32; window: positions seen, 0 for all."""
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": rotated,
        "attention.sliding_window": window,
    }
    for key, number in sizes.items():
        writer.add_uint32(f"{architecture}.{key}", number)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(TOKENS)])
    writer.add_token_types([1] * TOKENS)
    writer.add_token_merges(["t 0"])
    for name, data in weights.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
