"""The default model, loaded once a precision for all tests of this folder."""

import os
from pathlib import Path

import pytest

from schemas.envelope import Message
from tests.engine_torch import driver
from workers.engine.runner import ModelRunner
from workers.engine.tokenizer import ModelTokenizer

CACHE_BLOCKS = 256

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three uses of a paper clip.",
    "Translate 'good morning' into Spanish.",
    "What is 17 plus 25?",
    "Who wrote Romeo and Juliet, and when?",
    "Give me a recipe for pancakes.",
    "def fibonacci(n):  # finish this Python function",
    "Summarise: The quick brown fox jumps over the lazy dog. The dog does not mind, for it is asleep in the sun.",
)


@pytest.fixture(scope="session")
def gguf_path() -> Path:
    """The default chat model, or the one that HEADRACE_TEST_GGUF names."""
    named = os.environ.get("HEADRACE_TEST_GGUF")
    if named:
        return Path(named)
    from runtime.model_files import default_chat_model

    return default_chat_model()


@pytest.fixture(scope="session")
def fp32(gguf_path: Path) -> ModelRunner:
    """The model in float32."""
    return ModelRunner(gguf_path, "fp32", CACHE_BLOCKS, driver.BLOCK_TOKENS)


@pytest.fixture(scope="session")
def bf16(gguf_path: Path) -> ModelRunner:
    """The model in bf16."""
    return ModelRunner(gguf_path, "bf16", CACHE_BLOCKS, driver.BLOCK_TOKENS)


@pytest.fixture(scope="session")
def prompts(fp32: ModelRunner) -> list[list[int]]:
    """Ten questions through the model's chat template, as token ids."""
    tokenizer = ModelTokenizer(fp32.tokenizer_fields)
    return [tokenizer.encode_chat([Message(role="user", content=question)]) for question in QUESTIONS]
