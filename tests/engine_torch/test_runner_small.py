"""What the runner does at its edges, on a model of one layer."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch

from tests.engine_torch.driver import GREEDY, generate, place
from tests.engine_torch.small_model import HIDDEN, TOKENS, tensors, write
from workers.engine.plan import Chunk, StepPlan
from workers.engine.runner import ModelRunner
from workers.engine.sampler import NotFiniteLogits

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [30, 20, 10]]


def chunk(request: str, ids: tuple[int, ...], block: int) -> Chunk:
    return Chunk(request, ids, 0, (block,), True, GREEDY)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "m.gguf", tensors())


def test_a_result_that_is_not_a_number_names_its_requests(tmp_path: Path) -> None:
    """One broken embedding row: the requests that read it are named, the other is not."""
    weights = tensors() | {"output.weight": tensors()["token_embd.weight"]}
    weights["token_embd.weight"][9] = np.nan
    runner = ModelRunner(write(tmp_path / "m.gguf", weights), "fp32", cache_blocks=4)
    with pytest.raises(NotFiniteLogits) as caught:
        runner.run(StepPlan((chunk("well", (1, 2), 0), chunk("ill", (1, 9), 1), chunk("worse", (9, 9), 2))))
    assert caught.value.requests == ("ill", "worse")


def test_an_own_head_is_used_where_the_file_has_one(tmp_path: Path, path: Path) -> None:
    """The head of zeros gives logits of zero; tied, they are not."""
    headed = write(tmp_path / "h.gguf", tensors() | {"output.weight": np.zeros((TOKENS, HIDDEN), np.float32)})
    plan = StepPlan((chunk("a", (1, 2), 0),))
    assert not ModelRunner(headed, "fp32", cache_blocks=4).logits(plan).any()
    assert ModelRunner(path, "fp32", cache_blocks=4).logits(plan).any()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_numba_the_reference_takes_over_and_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """The same answers within numerics, a line in the log, and no claim to be exact."""
    kernels = ModelRunner(path, precision, cache_blocks=8)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "workers.engine.attention.cpu", None)
    with structlog.testing.capture_logs() as lines:
        reference = ModelRunner(path, precision, cache_blocks=8)  # type: ignore[arg-type]
    assert [(line["event"], line["backend"], line["exact"]) for line in lines] == [("attention_fallback", "reference", False)]
    assert kernels.exact
    assert not reference.exact
    assert "plain torch" in reference.describe().exact_reason
    fast, slow = place(PROMPTS, 5, 8), place(PROMPTS, 5, 8)
    generate(kernels, fast, 5, chunk_tokens=4)
    generate(reference, slow, 5, chunk_tokens=4)
    worst = max(float(np.abs(one.logits[0] - other.logits[0]).max()) for one, other in zip(fast, slow, strict=True))
    print(f"{precision}: largest difference of logits {worst:.2e}")
    assert worst < (1e-5 if precision == "fp32" else 2e-2)


def test_loading_tells_its_progress_and_what_came_of_it(path: Path) -> None:
    """Shares rise to 1; the description counts bytes: 2 (keys, values) x 1 layer x 8 x 16 positions x 32 values x 4."""
    told: list[float] = []
    runner = ModelRunner(path, "fp32", cache_blocks=8, threads=1, progress=lambda share, what: told.append(share))
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.0, 1.0)
    numbers = runner.describe().numbers()
    assert numbers["cache_bytes"] == 2 * 8 * 16 * 32 * 4
    assert (numbers["cache_tokens"], numbers["threads"], numbers["precision"]) == (128, 1, "fp32")
    runner.warm_up()


def test_the_kernels_are_bound_to_fit_or_left(tmp_path: Path) -> None:
    """Blocks of 8 tokens do not fit the kernels' lanes: the reference computes."""
    runner = ModelRunner(write(tmp_path / "m.gguf", tensors()), "fp32", cache_blocks=8, block_tokens=8)
    assert not runner.exact
    assert runner.run(StepPlan((chunk("a", (1, 2, 3), 5),))).drawn.keys() == {"a"}


def test_another_thread_computes_on_as_many_threads(path: Path) -> None:
    """OpenMP counts threads per calling thread, and the engine's is not the one that loaded."""
    runner = ModelRunner(path, "bf16", cache_blocks=8, threads=1)

    def threads_after_a_step() -> int:
        runner.run(StepPlan((chunk("a", (1, 2, 3), 5),)))
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as other:
        assert other.submit(threads_after_a_step).result() == 1


@pytest.mark.parametrize(("start", "table"), [(120, tuple(range(9))), (0, (8,))])
def test_a_plan_outside_context_or_cache_is_our_bug(path: Path, start: int, table: tuple[int, ...]) -> None:
    """Kernels do not check addresses, so the runner does."""
    runner = ModelRunner(path, "fp32", cache_blocks=8)
    with pytest.raises(AssertionError, match=r"position 129 of a context of 128|slot 137 of 128"):
        runner.run(StepPlan((Chunk("a", (1,) * 10, start, table, True, GREEDY),)))
