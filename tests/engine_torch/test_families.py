"""Each family against transformers, from tiny random models that it wrote; and the same text under any load."""

import json
import warnings
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine_torch.driver import Running, generate, place, step
from workers.engine.runner import ModelRunner
from workers.engine.weights.errors import DamagedFile, TensorsMismatch, UnsupportedModel

VOCABULARY, BLOCKS, TOKENS = 96, 128, 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"tie_word_embeddings": False}),
    "llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 20}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "head_dim": None, "hidden_size": 128}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
}
PROMPTS = [[(7 * at + 3) % VOCABULARY for at in range(45)], [5, 9, 2], [(at * at + 1) % VOCABULARY for at in range(31)]]


@cache
def reference(family: str) -> tuple[Path, Any]:
    """A directory that transformers wrote, and its model. Biases and norms are random too: they start at 0 and 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        name, changes = FAMILIES[family]
        sizes = {key: value for key, value in (SIZES | changes).items() if value is not None}
        torch.manual_seed(3)
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape)
        folder = Path(mkdtemp(prefix=family))
        model.save_pretrained(folder)
    return folder, model


def expected(family: str, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        logits: np.ndarray = reference(family)[1](torch.tensor([ids])).logits[0].numpy()
    return logits


def answers(runner: ModelRunner, chunk_tokens: int, tokens: int = TOKENS) -> list[Running]:
    running = place(PROMPTS, tokens, BLOCKS)
    generate(runner, running, tokens, chunk_tokens)
    return running


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_tokens", [512, 7])
def test_logits_are_the_references(family: str, chunk_tokens: int) -> None:
    """Prefill whole and in pieces, then decoding through the paged cache: every row that draws, in float32."""
    runner = ModelRunner(reference(family)[0], "fp32", BLOCKS)
    worst = 0.0
    for running in answers(runner, chunk_tokens, 24):
        rows = expected(family, running.known[:-1])[-24:]
        worst = max(worst, float(np.abs(rows - np.stack(running.logits)).max()))
    print(f"{family}, pieces of {chunk_tokens}: largest difference {worst:.2e}")
    assert worst < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_the_same_alone_batched_and_in_any_pieces(family: str) -> None:
    """Default precision, 64 greedy tokens: bits of all logits, pieces of 1 to 17 tokens."""
    runner = ModelRunner(reference(family)[0], cache_blocks=BLOCKS)
    assert runner.exact, runner.describe().exact_reason
    alone = place(PROMPTS, TOKENS, BLOCKS)
    for sequence in alone:
        generate(runner, [sequence], TOKENS)
    for chunk_tokens in (*range(1, 18), 512):
        for one, other in zip(alone, answers(runner, chunk_tokens), strict=True):
            assert one.known == other.known, f"pieces of {chunk_tokens}"
            assert np.array_equal(one.logits, other.logits), f"pieces of {chunk_tokens}"


def changed(
    tmp_path: Path, family: str = "qwen2", config: dict[str, Any] | None = None, **tensors: torch.Tensor | None
) -> Path:
    """A copy of a family's directory with other config values and tensors; None takes one out."""
    folder = reference(family)[0]
    values = json.loads((folder / "config.json").read_text()) | (config or {})
    (tmp_path / "config.json").write_text(json.dumps(values))
    stored = load_file(folder / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, tmp_path / "model.safetensors")
    return tmp_path


BIAS = "model.layers.1.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({BIAS: None}, rf"tensor {BIAS} is missing"),
        ({BIAS: torch.zeros(127)}, rf"tensor {BIAS} has shape \(127,\), expected \(128,\)"),
        ({"extra": torch.zeros(1)}, "no use for tensors extra"),
    ],
)
def test_tensors_that_are_not_the_models_are_named(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(TensorsMismatch, match=message):
        ModelRunner(changed(tmp_path, **tensors), "fp32", 4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; supported: LlamaForCausalLM, Mistral"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported; supported: silu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, r"rotary scaling .*longrope.* is not supported; supported: default"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ModelRunner(changed(tmp_path, config=config), "fp32", 4)


def test_shards_are_read_as_one_and_a_missing_one_is_named(tmp_path: Path) -> None:
    """Two shards with an index give the logits of one file; without the second, its name is in the error."""
    folder = changed(tmp_path)
    stored = load_file(folder / "model.safetensors")
    places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(stored)}
    for shard in set(places.values()):
        save_file({name: tensor for name, tensor in stored.items() if places[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()
    whole, sharded = place(PROMPTS, 1, BLOCKS), place(PROMPTS, 1, BLOCKS)
    step(ModelRunner(reference("qwen2")[0], "fp32", BLOCKS), whole, 512)
    step(ModelRunner(folder, "fp32", BLOCKS), sharded, 512)
    assert all(np.array_equal(one.logits, other.logits) for one, other in zip(whole, sharded, strict=True))
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(DamagedFile, match=r"part-1\.safetensors"):
        ModelRunner(folder, "fp32", 4)


def test_a_shard_cut_short_is_named(tmp_path: Path) -> None:
    whole = (changed(tmp_path) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(DamagedFile, match=r"model\.safetensors is damaged"):
        ModelRunner(tmp_path, "fp32", 4)
