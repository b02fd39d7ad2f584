"""What each step computes: decode first, chunks within the budget, who preempts whom."""

from typing import Any

import pytest

from schemas.errors import HeadraceError
from schemas.subjects import Priority
from tests.engine.fakes import sampling
from workers.engine.plan import StepPlan, StepResult
from workers.engine.request import Sequence
from workers.engine.scheduler import DEADLINES_SPARE, PREEMPTIONS_BY_CLASS_MAX, Scheduler


def _add(
    scheduler: Scheduler, name: str, prompt: int, priority: Priority = "standard", now_us: int = 0, **options: Any
) -> Sequence:
    """A sequence of a tenant of its own, so that it shares no blocks."""
    sequence = Sequence(name, name, priority, tuple(range(prompt)), sampling(**options), now_us, 10**12)
    scheduler.add(sequence)
    return sequence


def _step(scheduler: Scheduler, now_us: int = 0) -> dict[str, tuple[int, int]]:
    """One step whose draws are all token 7; the positions that each request got computed."""
    plan = scheduler.plan(now_us)
    assert plan is not None
    _commit(scheduler, plan, now_us)
    scheduler.check()
    return {chunk.request: (chunk.start, chunk.end) for chunk in plan.chunks}


def _commit(scheduler: Scheduler, plan: StepPlan, now_us: int = 0) -> None:
    scheduler.commit(plan, StepResult({chunk.request: 7 for chunk in plan.chunks if chunk.samples}), now_us)


def test_a_long_prompt_takes_what_decodes_leave_of_the_budget() -> None:
    scheduler = Scheduler(100, 4, budget_tokens=8, slots=4, context_tokens=200)
    _add(scheduler, "a", 3)
    assert _step(scheduler) == {"a": (0, 3)}
    _add(scheduler, "long", 20)
    assert _step(scheduler) == {"a": (3, 4), "long": (0, 7)}
    assert _step(scheduler) == {"a": (4, 5), "long": (7, 14)}
    assert _step(scheduler) == {"a": (5, 6), "long": (14, 20)}
    assert _step(scheduler) == {"a": (6, 7), "long": (20, 21)}


def test_an_interactive_prompt_does_not_wait_for_a_long_batch_prompt() -> None:
    scheduler = Scheduler(100, 4, budget_tokens=8, slots=4, context_tokens=200)
    _add(scheduler, "batch", 100, "batch")
    _step(scheduler)
    _add(scheduler, "quick", 5, "interactive")
    assert _step(scheduler) == {"quick": (0, 5), "batch": (8, 11)}


def test_a_chunk_samples_only_when_it_reaches_the_last_known_token_and_a_decode_holds_one_id() -> None:
    scheduler = Scheduler(10, 4, budget_tokens=4, slots=1, context_tokens=40)
    _add(scheduler, "a", 6)
    seen = []
    for _ in range(3):
        plan = scheduler.plan(0)
        assert plan is not None
        seen.append((plan.chunks[0].token_ids, plan.chunks[0].samples, len(plan.chunks[0].block_table)))
        _commit(scheduler, plan)
    assert seen == [((0, 1, 2, 3), False, 1), ((4, 5), True, 2), ((7,), True, 2)]


def test_what_can_never_fit_is_refused_by_name_and_leaves_nothing_behind() -> None:
    scheduler = Scheduler(blocks=4, block_tokens=4, budget_tokens=8, slots=2, context_tokens=12)
    with pytest.raises(HeadraceError) as refused:
        _add(scheduler, "a", 12)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    assert refused.value.message == "the prompt has 12 tokens, this model's context holds 12"
    assert scheduler.idle
    assert _add(scheduler, "b", 11).tokens_max == 12


def test_the_context_is_cut_to_what_the_cache_holds() -> None:
    scheduler = Scheduler(blocks=2, block_tokens=4, budget_tokens=8, slots=2, context_tokens=1000)
    assert _add(scheduler, "a", 5, max_tokens=50).tokens_max == 8
    with pytest.raises(HeadraceError, match="holds 8"):
        _add(scheduler, "b", 8)


def test_a_budget_that_cannot_let_all_slots_decode_is_refused() -> None:
    with pytest.raises(ValueError, match="4 tokens cannot let 5 slots"):
        Scheduler(4, 4, budget_tokens=4, slots=5, context_tokens=16)


def test_a_full_engine_preempts_the_latest_batch_sequence_for_an_interactive_one() -> None:
    scheduler = Scheduler(100, 4, budget_tokens=50, slots=3, context_tokens=100)
    for name, priority in [("s", "standard"), ("b1", "batch"), ("b2", "batch")]:
        _add(scheduler, name, 5, priority)  # type: ignore[arg-type]
    _step(scheduler)
    _add(scheduler, "s2", 5, "standard")
    assert "s2" not in _step(scheduler)  # only interactive preempts
    _add(scheduler, "i", 5, "interactive")
    assert _step(scheduler) == {"s": (6, 7), "b1": (6, 7), "i": (0, 5)}
    assert scheduler.statistics().preemptions == 1
    assert scheduler.statistics().waiting == {"interactive": 0, "standard": 1, "batch": 1}


def test_interactive_does_not_preempt_interactive_nor_batch_that_has_aged() -> None:
    scheduler = Scheduler(100, 4, budget_tokens=50, slots=1, context_tokens=100, age_us=100)
    _add(scheduler, "i1", 5, "interactive")
    _step(scheduler)
    aged = _add(scheduler, "b", 5, "batch")
    assert "b" not in _step(scheduler, 200)
    scheduler.cancel("i1")
    assert "b" in _step(scheduler, 201)
    assert aged.rank == 0
    _add(scheduler, "i2", 5, "interactive", 202)
    assert "i2" not in _step(scheduler, 203)


def test_an_interactive_prompt_takes_the_blocks_of_batch_work() -> None:
    scheduler = Scheduler(blocks=4, block_tokens=4, budget_tokens=50, slots=4, context_tokens=100)
    _add(scheduler, "b", 13, "batch")
    _step(scheduler)
    _add(scheduler, "i", 6, "interactive")
    assert _step(scheduler) == {"i": (0, 6)}


def test_without_blocks_the_latest_gives_way_and_is_computed_again_from_prompt_and_output() -> None:
    scheduler = Scheduler(blocks=4, block_tokens=4, budget_tokens=50, slots=4, context_tokens=16)
    _add(scheduler, "first", 7, max_tokens=6)
    second = _add(scheduler, "second", 7)
    for _ in range(2):
        _step(scheduler)  # 7 known, then 8: both fill two blocks
    assert _step(scheduler) == {"first": (8, 9)}
    assert (second.preemptions, second.preemptions_by_class, second.tokens_computed) == (1, 0, 0)
    scheduler.cancel("first")
    assert _step(scheduler) == {"second": (4, 9)}  # the first of its blocks was still cached, the last one was not
    assert second.tokens_recomputed == 4
    assert second.known(5, 9) == (5, 6, 7, 7)


def test_the_last_in_order_stands_still_and_keeps_its_blocks_when_nobody_needs_them() -> None:
    scheduler = Scheduler(blocks=4, block_tokens=4, budget_tokens=50, slots=4, context_tokens=16)
    _add(scheduler, "first", 9)
    second = _add(scheduler, "second", 3)
    for _ in range(2):
        _step(scheduler)
    assert _step(scheduler) == {"first": (10, 11)}
    assert (second.preemptions, second.tokens_computed) == (0, 4)


def test_the_blocks_that_a_victim_was_promised_count_as_won() -> None:
    scheduler = Scheduler(blocks=4, block_tokens=4, budget_tokens=4, slots=4, context_tokens=16)
    _add(scheduler, "b", 14, "batch")
    assert _step(scheduler) == {"b": (0, 4)}  # owns one block, is promised all four
    _add(scheduler, "i", 14, "interactive")
    assert _step(scheduler) == {"i": (0, 4)}


def test_a_prompt_first_in_order_takes_blocks_back_from_a_decode_already_in_the_step() -> None:
    scheduler = Scheduler(blocks=9, block_tokens=2, budget_tokens=4, slots=3, context_tokens=100)
    for name in ["b1", "b2"]:
        _add(scheduler, name, 2, "batch")
    _step(scheduler)
    _add(scheduler, "i", 8, "interactive")
    for end in (3, 4, 5):  # the decodes grow into blocks that were free when the prompt was let in
        assert _step(scheduler) == {"b1": (end - 1, end), "b2": (end - 1, end), "i": (2 * end - 6, 2 * end - 4)}
    assert _step(scheduler) == {"b1": (5, 6), "i": (6, 8)}


def test_a_chunk_is_cut_to_the_blocks_that_are_free() -> None:
    scheduler = Scheduler(blocks=9, block_tokens=1, budget_tokens=3, slots=3, context_tokens=100)
    _add(scheduler, "b", 1, "batch")
    _step(scheduler)
    _add(scheduler, "i", 6, "interactive")
    assert _step(scheduler) == {"b": (1, 2), "i": (0, 2)}
    assert _step(scheduler) == {"b": (2, 3), "i": (2, 4)}
    assert _step(scheduler) == {"b": (3, 4), "i": (4, 5)}
    assert _step(scheduler) == {"i": (5, 6)}


def test_a_run_that_brought_no_token_counts_as_waiting() -> None:
    scheduler = Scheduler(100, 4, budget_tokens=4, slots=1, context_tokens=200, age_us=100)
    batch = _add(scheduler, "b", 50, "batch")
    _step(scheduler, 10)
    _add(scheduler, "i", 2, "interactive", 60)
    _step(scheduler, 60)
    assert batch.waited_us == 60
    _step(scheduler, 99)
    assert batch.rank == 2
    _step(scheduler, 100)
    assert batch.rank == 1


def test_known_tokens_are_prompt_and_output_at_every_range() -> None:
    sequence = Sequence("a", "tenant", "batch", (0, 1, 2), sampling(), 0, 0, output_ids=[3, 4, 5, 6])
    for start in range(8):
        for end in range(start, 8):
            assert sequence.known(start, end) == tuple(range(start, end))


def test_a_cancel_in_each_state_brings_the_blocks_home() -> None:
    scheduler = Scheduler(blocks=8, block_tokens=4, budget_tokens=6, slots=2, context_tokens=32)
    _add(scheduler, "decoding", 2)
    _step(scheduler)
    _add(scheduler, "prefilling", 12)
    _add(scheduler, "waiting", 3)
    _step(scheduler)
    plan = scheduler.plan(0)
    assert plan is not None
    for name in ["waiting", "prefilling", "decoding"]:
        assert scheduler.cancel(name)
        assert not scheduler.cancel(name)
        scheduler.check()
    _add(scheduler, "decoding", 2)  # of the same name, and not in that plan
    assert scheduler.commit(plan, StepResult({"decoding": 1}), 0) == []
    assert scheduler.statistics().blocks_owned == 0
    scheduler.cancel("decoding")
    assert scheduler.plan(0) is None


def test_a_passed_deadline_takes_out_waiting_and_running_sequences_before_they_cost_a_step() -> None:
    scheduler = Scheduler(blocks=8, block_tokens=4, budget_tokens=6, slots=1, context_tokens=32)
    for name, deadline_us in [("a", 100), ("b", 50), ("c", 200)]:
        scheduler.add(Sequence(name, "tenant", "standard", (1, 2), sampling(), 0, deadline_us))
    _step(scheduler)
    assert [sequence.request for sequence in scheduler.expire(99)] == ["b"]
    assert [sequence.request for sequence in scheduler.expire(100)] == ["a"]
    assert _step(scheduler, 101) == {"c": (0, 2)}
    scheduler.cancel("c")
    _add(scheduler, "c", 2)  # comes again, with more time
    assert scheduler.expire(300) == []


def test_instants_are_those_of_the_steps() -> None:
    scheduler = Scheduler(blocks=8, block_tokens=4, budget_tokens=4, slots=1, context_tokens=32)
    sequence = _add(scheduler, "a", 6, now_us=5)
    for now_us in (10, 20, 30):
        _step(scheduler, now_us)
    assert (sequence.queued_us, sequence.scheduled_us, sequence.first_token_us) == (5, 10, 20)


def test_ended_sequences_leave_nothing_behind() -> None:
    """Deadlines are minutes away; what has ended must not be kept until then."""
    scheduler = Scheduler(blocks=8, block_tokens=4, budget_tokens=8, slots=2, context_tokens=32)
    for number in range(1000):
        scheduler.add(
            Sequence(f"r{number}", "t", "standard", (1, 2), sampling(), queued_us=number, deadline_us=10**15), "prompt"
        )
        scheduler.cancel(f"r{number}")
    assert len(scheduler._deadlines) <= 2 * DEADLINES_SPARE


def _of_tenant(scheduler: Scheduler, name: str, tenant: str, prompt: range, priority: Priority = "standard") -> Sequence:
    sequence = Sequence(name, tenant, priority, tuple(prompt), sampling(), 0, 10**12)
    scheduler.add(sequence)
    return sequence


def test_a_prefix_is_found_by_its_tenant_alone_and_one_row_is_always_computed() -> None:
    scheduler = Scheduler(100, 4, budget_tokens=50, slots=4, context_tokens=100)
    _of_tenant(scheduler, "first", "t", range(8))
    assert _step(scheduler) == {"first": (0, 8)}
    _of_tenant(scheduler, "same", "t", range(8))
    _of_tenant(scheduler, "longer", "t", range(11))
    _of_tenant(scheduler, "stranger", "other", range(8))
    assert _step(scheduler) == {"first": (8, 9), "same": (4, 8), "longer": (8, 11), "stranger": (0, 8)}
    statistics = scheduler.statistics()
    assert (statistics.prefix_hits, statistics.prefix_tokens) == (2, 12)


def test_what_is_planned_but_not_computed_is_found_by_nobody() -> None:
    scheduler = Scheduler(100, 4, budget_tokens=50, slots=4, context_tokens=100)
    _of_tenant(scheduler, "failed", "t", range(8))
    assert scheduler.plan(0) is not None  # and the runner fails: nothing is committed
    scheduler.cancel("failed")
    _of_tenant(scheduler, "next", "t", range(9))
    assert _step(scheduler) == {"next": (0, 9)}


def test_a_cancelled_sequence_leaves_its_computed_full_blocks_to_others() -> None:
    scheduler = Scheduler(100, 4, budget_tokens=6, slots=4, context_tokens=100)
    _of_tenant(scheduler, "cancelled", "t", range(12))
    _step(scheduler)
    scheduler.cancel("cancelled")
    scheduler.check()
    assert scheduler.statistics().blocks_cached == 1
    sequence = _of_tenant(scheduler, "next", "t", range(9))
    assert _step(scheduler) == {"next": (4, 9)}
    assert sequence.cached_tokens == 4


def test_an_interactive_request_among_slots_full_of_batch_work_is_in_the_next_step() -> None:
    scheduler = Scheduler(100, 4, budget_tokens=16, slots=4, context_tokens=100)
    for number in range(6):
        _add(scheduler, f"b{number}", 8, "batch")
    for _ in range(4):
        _step(scheduler)
    interactive = _add(scheduler, "i", 10, "interactive", 50)
    assert _step(scheduler, 60)["i"] == (0, 10)
    assert interactive.first_token_us == 60


def test_who_made_room_for_a_higher_class_so_often_is_left_alone() -> None:
    scheduler = Scheduler(100, 4, budget_tokens=50, slots=1, context_tokens=100)
    batch = _add(scheduler, "b", 5, "batch")
    for number in range(PREEMPTIONS_BY_CLASS_MAX):
        _step(scheduler)
        _add(scheduler, f"i{number}", 5, "interactive")
        assert "b" not in _step(scheduler)
        scheduler.cancel(f"i{number}")
    _step(scheduler)
    _add(scheduler, "late", 5, "interactive")
    assert _step(scheduler).keys() == {"b"}
    assert (batch.preemptions, batch.preemptions_by_class) == (PREEMPTIONS_BY_CLASS_MAX, PREEMPTIONS_BY_CLASS_MAX)


def test_a_prompt_of_3000_tokens_stops_none_of_eight_streams() -> None:
    scheduler = Scheduler(400, 16, budget_tokens=512, slots=16, context_tokens=4096)
    streams = {f"s{number}" for number in range(8)}
    for name in sorted(streams):
        _add(scheduler, name, 20)
    _step(scheduler)
    long = _add(scheduler, "long", 3000)
    for _ in range(6):  # 504 tokens a step are left for it
        plan = scheduler.plan(0)
        assert plan is not None
        assert plan.tokens <= 512
        assert {chunk.request for chunk in plan.chunks if chunk.samples} >= streams
        _commit(scheduler, plan)
    assert len(long.output_ids) == 1
