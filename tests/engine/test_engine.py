"""The engine as its shell sees it: add, step, cancel, faults and resumption."""

from typing import Any

import pytest

from schemas.errors import HeadraceError
from schemas.events import Usage
from tests.engine.fakes import EOS, FakeRunner, FakeVocabulary, reference, sampling
from workers.engine.engine import Engine, EngineFault, Finish, GenerationRequest, Output
from workers.engine.scheduler import Scheduler


class _Bench:
    """An engine over a fake runner, with a clock that moves a millisecond a reading."""

    def __init__(self, blocks: int = 16, slots: int = 4, waiting_max: int = 9) -> None:
        self.now_us = 0
        self.scheduler = Scheduler(blocks, 4, 8, slots, 48, waiting_max=waiting_max)
        self.runner = FakeRunner(4, 8, blocks)
        self.engine = Engine(self.runner, FakeVocabulary(), self.scheduler, self._clock)

    def _clock(self) -> int:
        self.now_us += 1000
        return self.now_us

    def run(self) -> list[Output]:
        outputs = []
        while not self.engine.idle:
            outputs += self.engine.step()
            self.scheduler.check()
        assert self.scheduler.statistics().blocks_owned == 0
        return outputs


def _request(name: str = "a", prompt: tuple[int, ...] = (3, 4, 5), **options: Any) -> GenerationRequest:
    emitted = options.pop("emitted_ids", ())
    deadline_us = options.pop("deadline_us", 10**12)
    return GenerationRequest(name, "tenant", "standard", prompt, sampling(**options), deadline_us, emitted)


def test_an_answer_comes_token_by_token_and_ends_with_usage_and_instants() -> None:
    bench = _Bench()
    request = _request(max_tokens=5, ignore_eos=True, seed=4)
    bench.engine.add(request)
    outputs = bench.run()
    ids, texts, reason, drawn = reference(request, 48)
    assert [token for output in outputs for token in output.ids] == ids
    assert [text for output in outputs for text in output.texts] == texts
    assert [output.index for output in outputs] == [sum(len(o.ids) for o in outputs[:n]) for n in range(len(outputs))]
    assert outputs[-1].finish == Finish("length", Usage(3, 5))
    assert (reason, drawn) == ("length", 5)
    assert [output.account for output in outputs[:-1]] == [None] * 4
    account = outputs[-1].account
    assert account is not None
    assert account.scheduled_us is not None
    assert account.first_token_us is not None
    assert account.queued_us < account.scheduled_us < account.first_token_us < bench.now_us


def test_a_resumed_answer_is_the_rest_from_every_point() -> None:
    whole = _request(max_tokens=12, seed=7, stop=["STOP", "\n"])
    ids, texts, reason, drawn = reference(whole, 48)
    for kept in range(len(ids) + 1):
        bench = _Bench()
        bench.engine.add(_request(max_tokens=12, seed=7, stop=["STOP", "\n"], emitted_ids=tuple(ids[:kept])))
        outputs = bench.run()
        assert [token for output in outputs for token in output.ids] == ids[kept:]
        assert [text for output in outputs for text in output.texts] == texts[kept:]
        assert outputs[0].index == kept
        assert outputs[-1].finish == Finish(reason, Usage(3, drawn))  # type: ignore[arg-type]


def test_a_resumed_answer_that_was_all_sent_ends_without_a_step() -> None:
    bench = _Bench()
    bench.engine.add(_request(max_tokens=2, emitted_ids=(1, 2)))
    assert not bench.engine.idle
    (output,) = bench.run()
    assert (output.index, output.ids, output.finish) == (2, (), Finish("length", Usage(3, 2)))
    assert bench.runner.plans == []


@pytest.mark.parametrize(
    ("changes", "code", "param", "words"),
    [
        ({"prompt": ()}, "invalid_value", "messages", "no tokens"),
        ({"prompt": (1, 16)}, "invalid_value", "messages", "token id 16 is not in this model's vocabulary, 0 to 15"),
        ({"prompt": (1, -1)}, "invalid_value", "messages", "token id -1"),
        ({"prompt": (1,) * 48}, "context_length_exceeded", "messages", "48 tokens, this model's context holds 48"),
        ({"stop": [""]}, "invalid_value", "stop", "empty"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_by_name(
    changes: dict[str, Any], code: str, param: str, words: str
) -> None:
    bench = _Bench()
    with pytest.raises(HeadraceError, match=words) as refused:
        bench.engine.add(_request(**changes))
    assert (refused.value.code, refused.value.param) == (code, param)
    assert bench.engine.idle
    assert "a" not in bench.engine


def test_a_full_queue_refuses_and_keeps_nothing() -> None:
    bench = _Bench(waiting_max=1)
    bench.engine.add(_request("a"))
    with pytest.raises(HeadraceError) as refused:
        bench.engine.add(_request("b"))
    assert refused.value.code == "overloaded"
    assert "b" not in bench.engine
    assert {output.request for output in bench.run()} == {"a"}


def test_a_cancelled_request_says_so_once_and_what_it_took() -> None:
    bench = _Bench()
    bench.engine.add(_request(ignore_eos=True))
    for _ in range(3):
        bench.engine.step()
    last = bench.engine.cancel("a")
    assert last is not None
    assert last.failure is not None
    assert last.account is not None
    assert (last.failure.code, last.account.usage) == ("cancelled", Usage(3, 3))
    assert bench.engine.cancel("a") is None
    assert bench.run() == []


def test_an_expired_request_fails_by_name_and_costs_no_step() -> None:
    bench = _Bench()
    bench.engine.add(_request(deadline_us=1500))
    (output,) = bench.run()
    assert output.failure is not None
    assert output.failure.code == "deadline_exceeded"
    assert output.account is not None
    assert output.account.scheduled_us is None
    assert bench.runner.plans == []


def test_after_a_fault_the_step_can_be_tried_again_and_no_output_is_lost() -> None:
    bench = _Bench()
    bench.engine.add(_request("late", deadline_us=1))
    bench.engine.add(request := _request("a", max_tokens=4))
    bench.runner.fault = RuntimeError("out of memory")
    with pytest.raises(EngineFault, match="3 tokens for 1 requests failed: RuntimeError"):
        bench.engine.step()
    bench.runner.fault = None
    outputs = bench.run()
    assert [output.request for output in outputs if output.failure] == ["late"]
    assert [token for output in outputs if output.request == "a" for token in output.ids] == reference(request, 48)[0]


def test_drain_all_hands_every_request_back_and_frees_all_blocks() -> None:
    bench = _Bench(slots=1)
    for name in ["a", "b", "c"]:
        bench.engine.add(_request(name))
    bench.engine.step()
    assert bench.engine.drain_all() == ["a", "b", "c"]
    assert bench.engine.idle
    assert bench.run() == []


def test_a_decode_step_carries_one_id_a_sequence() -> None:
    bench = _Bench()
    bench.engine.add(_request(ignore_eos=True, max_tokens=9))
    bench.run()
    assert [plan.tokens for plan in bench.runner.plans] == [3] + [1] * 8


def test_eos_is_counted_and_not_shown() -> None:
    seed = next(seed for seed in range(999) if reference(_request(seed=seed), 48)[2] == "stop")
    bench = _Bench()
    bench.engine.add(request := _request(seed=seed))
    outputs = bench.run()
    ids = [token for output in outputs for token in output.ids]
    assert EOS not in ids
    assert outputs[-1].finish == Finish("stop", Usage(3, len(ids) + 1))
    assert ids == reference(request, 48)[0]


def _counted(bench: _Bench, request: GenerationRequest) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """What the runner is told to count, by the position that it draws for."""
    bench.engine.add(request)
    bench.run()
    chunks = [chunk for plan in bench.runner.plans for chunk in plan.chunks if chunk.samples]
    return {chunk.end: (chunk.prompt_ids, chunk.output_ids) for chunk in chunks}


def test_a_penalty_counts_the_same_tokens_wherever_an_answer_is_resumed() -> None:
    options: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "frequency_penalty": 0.5}
    whole = _counted(_Bench(), _request(**options))
    ids = reference(_request(**options), 48)[0]
    assert whole == {3 + n: ((3, 4, 5), tuple(ids[:n])) for n in range(9)}
    for kept in range(1, 9):
        resumed = _counted(_Bench(), _request(**options, emitted_ids=tuple(ids[:kept])))
        assert resumed == {position: whole[position] for position in range(3 + kept, 12)}


def test_an_answer_without_penalties_costs_no_copy_of_its_tokens() -> None:
    counted = _counted(_Bench(), _request(max_tokens=4, ignore_eos=True, logit_bias=((3, 1.0),)))
    assert set(counted.values()) == {((), ())}


def test_a_bias_for_a_token_outside_the_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(HeadraceError, match="0 to 15") as caught:
        _Bench().engine.add(_request(logit_bias=((16, 1.0),)))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "logit_bias")
