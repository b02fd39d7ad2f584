"""bf16: the same text under any load. Bits are compared, not closeness."""

from collections.abc import Sequence

import pytest

from schemas.envelope import Sampling
from tests.engine_torch.driver import Running, generate, place
from workers.engine.plan import Chunk, StepPlan
from workers.engine.runner import ModelRunner

TOKENS = 8
SAMPLED = Sampling(seed=11, temperature=0.9, top_p=0.95, top_k=40)


@pytest.fixture(scope="module")
def alone(bf16: ModelRunner, prompts: list[list[int]]) -> list[Running]:
    """Each prompt by itself, its prefill in one piece."""
    sequences = [place([prompt], TOKENS, 256)[0] for prompt in prompts]
    for sequence in sequences:
        generate(bf16, [sequence], TOKENS)
    return sequences


def assert_same_bits(first: Sequence[Running], second: Sequence[Running]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one.known == other.known
        assert [row.tobytes() for row in one.logits] == [row.tobytes() for row in other.logits]


def test_the_machine_is_found_exact(bf16: ModelRunner) -> None:
    """bf16 is exact, or the runner says why not; with the kernels it is."""
    assert bf16.exact, bf16.describe().exact_reason


def test_a_batch_of_sixteen_changes_no_bit(bf16: ModelRunner, prompts: list[list[int]], alone: list[Running]) -> None:
    """Ten prompts and six strangers in the same steps."""
    strangers = [list(range(100 + 7 * number, 140 + 9 * number)) for number in range(6)]
    together = place([*prompts, *strangers], TOKENS, 256)
    generate(bf16, together, TOKENS)
    assert_same_bits(alone, together[: len(prompts)])


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 16, 17])
def test_chunked_prefill_changes_no_bit(
    bf16: ModelRunner, prompts: list[list[int]], alone: list[Running], chunk_tokens: int
) -> None:
    """The prompts cut into pieces of so many tokens, batched with others that decode meanwhile."""
    together = place(prompts, TOKENS, 256)
    generate(bf16, together, TOKENS, chunk_tokens=chunk_tokens)
    assert_same_bits(alone, together)


def test_a_step_of_many_calls_changes_no_bit(bf16: ModelRunner) -> None:
    """700 rows, computed in several calls a layer, against pieces of 97."""
    prompt = [1 + 37 * number % 40000 for number in range(700)]
    [whole], [cut] = place([prompt], 3, 256), place([prompt], 3, 256)
    generate(bf16, [whole], 3, chunk_tokens=700)
    generate(bf16, [cut], 3, chunk_tokens=97)
    assert_same_bits([whole], [cut])


def test_sampled_text_is_the_same_in_any_batch(bf16: ModelRunner, prompts: list[list[int]]) -> None:
    """A seed's answer does not depend on what else runs."""
    [alone] = place(prompts[3:4], TOKENS, 256, SAMPLED)
    [text] = generate(bf16, [alone], TOKENS)
    texts = generate(bf16, place(prompts, TOKENS, 256, SAMPLED), TOKENS, chunk_tokens=5)
    assert texts[3] == text


def test_a_reused_cache_leaves_no_trace(bf16: ModelRunner, prompts: list[list[int]], alone: list[Running]) -> None:
    """A prompt over blocks full of another one's keys and values gives the bits of a fresh cache."""
    generate(bf16, place([[5] * 700], 1, 256), 1, chunk_tokens=256)
    again = place(prompts[:1], TOKENS, 256)
    generate(bf16, again, TOKENS)
    assert_same_bits(alone[:1], again)


def test_only_chunks_that_sample_draw(bf16: ModelRunner, prompts: list[list[int]]) -> None:
    """A plan's result names exactly the requests whose chunk samples."""
    first, second = place(prompts[:2], 1, 256)
    cut = Chunk(second.request, tuple(second.known[:4]), 0, second.table[:1], False, second.sampling)
    assert set(bf16.run(StepPlan((first.chunk(512), cut))).drawn) == {first.request}
