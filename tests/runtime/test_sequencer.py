"""Each token once, in order, whatever the live messages do, as long as the log has them."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.bus import Message
from runtime.sequencer import Deliver, Diverged, End, Hole, Ignore, Sequencer, emitted_before
from schemas import events
from schemas.events import Event, Failed, Finished, Tokens, Usage
from schemas.timeline import Timeline


def tokens(index: int, *texts: str, epoch: int = 1) -> Tokens:
    return Tokens(epoch, index, tuple(range(index, index + len(texts))), texts)


def finished(index: int, epoch: int = 1) -> Finished:
    return Finished(epoch, index, "stop", Usage(1, index), Timeline(0))


def test_tokens_in_order_are_delivered_and_then_the_end() -> None:
    sequencer = Sequencer()
    assert sequencer.offer(tokens(0, "a", "b")) == Deliver(tokens(0, "a", "b"))
    assert sequencer.offer(tokens(2, "c")) == Deliver(tokens(2, "c"))
    assert sequencer.offer(finished(3)) == End(finished(3))
    assert sequencer.offer(finished(3)) == Ignore()
    assert sequencer.offer(tokens(3, "d")) == Ignore()


def test_a_duplicate_is_ignored_and_an_overlap_is_cut() -> None:
    sequencer = Sequencer()
    sequencer.offer(tokens(0, "a", "b"))
    assert sequencer.offer(tokens(0, "a", "b")) == Ignore()
    assert sequencer.offer(tokens(1, "b", "c")) == Deliver(tokens(2, "c"))


def test_a_hole_changes_nothing_and_names_the_missing_index() -> None:
    sequencer = Sequencer()
    sequencer.offer(tokens(0, "a"))
    before = (sequencer.epoch, list(sequencer.ids), list(sequencer.texts), sequencer.ended)
    assert sequencer.offer(tokens(2, "c", epoch=3)) == Hole(1)
    assert sequencer.offer(finished(2)) == Hole(1)
    assert (sequencer.epoch, sequencer.ids, sequencer.texts, sequencer.ended) == before


def test_a_stale_holder_changes_nothing() -> None:
    sequencer = Sequencer()
    sequencer.offer(tokens(0, "a", epoch=2))
    assert sequencer.offer(tokens(1, "x", epoch=1)) == Ignore()
    assert sequencer.offer(finished(1, epoch=1)) == Ignore()
    assert sequencer.offer(tokens(1, "b", epoch=2)) == Deliver(tokens(1, "b", epoch=2))


def test_a_replay_that_differs_is_told_not_spliced() -> None:
    sequencer = Sequencer()
    sequencer.offer(tokens(0, "a", "b"))
    assert sequencer.offer(tokens(0, "a", "x", "c", epoch=2)) == Diverged(1)
    assert sequencer.offer(finished(1, epoch=2)) == Diverged(1)


def test_a_failure_ends_a_stream_also_below_its_next_index() -> None:
    sequencer = Sequencer()
    sequencer.offer(tokens(0, "a", "b"))
    failed = Failed(2, 0, "cancelled", "the request was cancelled", Timeline(0))
    assert sequencer.offer(failed) == End(failed)


def test_a_resumed_reader_gets_tokens_from_its_start_on() -> None:
    sequencer = Sequencer(start=2)
    assert sequencer.offer(tokens(0, "a", "b")) == Ignore()
    assert sequencer.offer(tokens(1, "b", "c", "d")) == Deliver(tokens(2, "c", "d"))
    assert sequencer.offer(finished(4)) == End(finished(4))


@st.composite
def _published(draw: st.DrawFn) -> tuple[list[Event], list[Event]]:
    """A log of two attempts over ten tokens, and a live view of it with drops, doubles and swaps."""
    texts = [chr(97 + i) for i in range(10)]
    cuts = sorted(draw(st.sets(st.integers(1, 9))))
    log: list[Event] = []
    epoch, died = 1, draw(st.integers(0, 10))
    for begin, end in zip([0, *cuts], [*cuts, 10], strict=True):
        if begin >= died and epoch == 1:
            epoch = 2
            begin = draw(st.integers(0, begin))
        log.append(tokens(begin, *texts[begin:end], epoch=epoch))
    log.append(finished(10, epoch))
    live = [event for event in log if draw(st.booleans())]
    live += draw(st.lists(st.sampled_from(log), max_size=4))
    return log, draw(st.permutations(live))


@given(_published())
def test_any_mixture_of_live_and_log_gives_each_token_once(published: tuple[list[Event], list[Event]]) -> None:
    log, live = published
    sequencer, text, ends = Sequencer(), "", 0
    for event in [*live, log[-1]]:
        answer = sequencer.offer(event)
        queue = [*log, event] if isinstance(answer, Hole) else []
        answers = [answer, *(sequencer.offer(again) for again in queue)]
        for given_answer in answers:
            assert not isinstance(given_answer, Diverged)
            if isinstance(given_answer, Deliver):
                text += given_answer.tokens.text
            ends += isinstance(given_answer, End)
    assert text == "abcdefghij"
    assert ends == 1


def test_what_was_emitted_before_is_read_up_to_the_first_hole() -> None:
    log = [Message("s", events.encode(e)) for e in (tokens(0, "a", "b"), tokens(3, "d", epoch=2))]
    before = emitted_before(log)
    assert (before.ids, before.epoch, before.ended) == ((0, 1), 2, False)
