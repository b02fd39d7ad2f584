"""float32: the runner computes what the reference implementation computes from the same file."""

import warnings
from pathlib import Path

import pytest
import torch

from tests.engine_torch.driver import generate, place
from workers.engine.runner import ModelRunner

TOKENS = 64


def reference_model(path: Path) -> torch.nn.Module:
    """transformers' Llama in float32 from the same GGUF file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, GgufConfig

        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    return model.eval()


@pytest.mark.timeout(300)
def test_greedy_text_is_the_references(fp32: ModelRunner, gguf_path: Path, prompts: list[list[int]]) -> None:
    """Ten prompts, 64 greedy tokens each: at every position the reference's best token is the one that was drawn.

    By induction over positions that is the reference's own greedy answer; checking it takes one pass a prompt instead of 64.
    """
    answers = generate(fp32, place(prompts, TOKENS, 256), TOKENS)
    model = reference_model(gguf_path)
    largest = 0.0
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
            assert logits.argmax(-1).tolist() == answer
        [alone] = place([prompts[0]], 1, 256)
        generate(fp32, [alone], 1)
        largest = float((model(torch.tensor([prompts[0]])).logits[0, -1] - torch.from_numpy(alone.logits[0])).abs().max())
    print(f"largest difference of one row of logits: {largest:.2e}")
    assert largest < 2e-3


def test_float32_is_exact_where_it_says_so(fp32: ModelRunner, prompts: list[list[int]]) -> None:
    """Logits of a sequence alone have the bits of the same sequence in a batch and in pieces, if the runner claims it."""
    if not fp32.exact:
        pytest.skip(fp32.describe().exact_reason)
    [alone] = place(prompts[:1], 6, 256)
    generate(fp32, [alone], 6)
    together = place(prompts, 6, 256)
    generate(fp32, together, 6, chunk_tokens=7)
    assert [row.tobytes() for row in alone.logits] == [row.tobytes() for row in together[0].logits]
