"""The sequencer's table, row by row, and its promise under any interleaving: each token once, in order, one end."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.sequencer import Action, Deliver, End, FillGap, Ignore, Sequencer
from schemas.errors import HeadraceError
from schemas.events import Event, Failed, Finished, Tokens, Usage
from schemas.timeline import Timeline

T = Timeline(0)


def tokens(epoch: int, index: int, *texts: str) -> Tokens:
    return Tokens(epoch, index, tuple(range(len(texts))), texts)


def finished(epoch: int, index: int) -> Finished:
    return Finished(epoch, index, "stop", Usage(1, index), T)


def failed(epoch: int, index: int, code: str = "internal") -> Failed:
    return Failed(epoch, index, code, "it went wrong", T)


def code_of(action: Action) -> str:
    assert isinstance(action, End)
    assert isinstance(action.outcome, HeadraceError)
    return action.outcome.code


def test_tokens_in_order_are_delivered_and_the_end_ends() -> None:
    sequencer = Sequencer()
    assert sequencer.take(tokens(1, 0, "a", "b")) == [Deliver(tokens(1, 0, "a", "b"))]
    assert sequencer.take(tokens(1, 2, "c")) == [Deliver(tokens(1, 2, "c"))]
    assert sequencer.take(finished(1, 3)) == [End(finished(1, 3))]
    assert sequencer.take(tokens(1, 3, "d")) == [Ignore()]
    assert sequencer.take(finished(1, 3)) == [Ignore()]


def test_a_duplicate_is_ignored_and_an_overlap_is_cut() -> None:
    sequencer = Sequencer()
    sequencer.take(tokens(1, 0, "a", "b"))
    assert sequencer.take(tokens(1, 1, "b")) == [Ignore()]
    assert sequencer.take(tokens(1, 1, "b", "c")) == [Deliver(Tokens(1, 2, (1,), ("c",)))]


def test_what_came_again_live_is_counted_and_what_the_log_repeats_is_not() -> None:
    sequencer = Sequencer()
    sequencer.take(tokens(1, 0, "a", "b"))
    sequencer.take(tokens(2, 1, "b", "c"))
    sequencer.take(tokens(1, 2, "c", "d"))
    sequencer.take_log(tokens(2, 0, "a", "b", "c"))
    assert (sequencer.index, sequencer.repeated) == (3, 3)


def test_an_older_epoch_is_fenced() -> None:
    sequencer = Sequencer()
    sequencer.take(tokens(2, 0, "a"))
    assert sequencer.take(tokens(1, 1, "b")) == [Ignore()]
    assert sequencer.take(failed(1, 1)) == [Ignore()]
    assert sequencer.take(tokens(2, 1, "b")) == [Deliver(tokens(2, 1, "b"))]


def test_a_newer_epoch_may_repeat_what_was_sent_but_not_change_it() -> None:
    same, other = Sequencer(), Sequencer()
    for sequencer in (same, other):
        sequencer.take(tokens(1, 0, "a", "b"))
    assert same.take(tokens(2, 0, "a", "b", "c")) == [Deliver(Tokens(2, 2, (2,), ("c",)))]
    [end] = other.take(tokens(2, 0, "a", "X", "c"))
    assert code_of(end) == "replay_diverged"
    assert other.take(tokens(2, 3, "d")) == [Ignore()]


def test_an_answer_that_ends_before_what_was_sent_diverged() -> None:
    sequencer = Sequencer()
    sequencer.take(tokens(1, 0, "a", "b"))
    [end] = sequencer.take(finished(2, 1))
    assert code_of(end) == "replay_diverged"


def test_a_failure_ends_at_any_index_at_or_below_ours() -> None:
    sequencer = Sequencer()
    sequencer.take(tokens(1, 0, "a", "b"))
    assert sequencer.take(failed(6, 0)) == [End(failed(6, 0))]


def test_a_hole_is_filled_from_the_log_and_what_waited_behind_it_follows() -> None:
    sequencer = Sequencer()
    assert sequencer.take(tokens(1, 2, "c")) == [FillGap(0)]
    assert sequencer.hole
    assert sequencer.take_log(tokens(1, 0, "a")) == [Deliver(tokens(1, 0, "a")), FillGap(1)]
    assert sequencer.take_log(tokens(1, 1, "b")) == [Deliver(tokens(1, 1, "b")), Deliver(tokens(1, 2, "c"))]
    assert not sequencer.hole


def test_an_end_beyond_a_hole_waits_for_the_tokens_before_it() -> None:
    sequencer = Sequencer()
    assert sequencer.take(finished(1, 2)) == [FillGap(0)]
    assert sequencer.take_log(tokens(1, 0, "a", "b")) == [Deliver(tokens(1, 0, "a", "b")), End(finished(1, 2))]


def test_tokens_of_an_older_epoch_still_count_when_the_log_has_them_before_the_newer_ones() -> None:
    sequencer = Sequencer()
    assert sequencer.take(tokens(2, 1, "b")) == [FillGap(0)]
    assert sequencer.take_log(tokens(1, 0, "a")) == [Deliver(tokens(1, 0, "a")), Deliver(tokens(2, 1, "b"))]


def test_the_log_fences_too() -> None:
    sequencer = Sequencer()
    sequencer.take_log(tokens(2, 0, "a"))
    assert sequencer.take_log(tokens(1, 1, "zombie")) == [Ignore()]
    assert sequencer.take(tokens(1, 1, "zombie")) == [Ignore()]


def test_a_reader_from_the_middle_needs_nothing_before_it() -> None:
    sequencer = Sequencer(start=2)
    assert sequencer.take_log(tokens(1, 0, "a")) == [Ignore()]
    assert sequencer.take_log(tokens(1, 1, "b", "c")) == [Deliver(Tokens(1, 2, (1,), ("c",)))]
    assert sequencer.take_log(finished(1, 3)) == [End(finished(1, 3))]


def test_giving_up_ends_with_the_failure_that_waited_or_as_internal() -> None:
    lost, broken = Sequencer(), Sequencer()
    lost.take(finished(1, 2))
    broken.take(failed(1, 2, "attempts_exhausted"))
    assert code_of(lost.give_up()) == "internal"
    assert broken.give_up() == End(failed(1, 2, "attempts_exhausted"))
    assert lost.take(tokens(1, 0, "a")) == [Ignore()]


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[str], list[Event]]:
    """A request's texts and its log: each attempt goes on from, or repeats from, what those before it logged."""
    texts = draw(st.lists(st.text(max_size=3), max_size=24))
    log: list[Event] = []
    reached = 0
    attempts = draw(st.integers(1, 3))
    for epoch in range(1, attempts + 1):
        index = draw(st.integers(0, reached))
        stop = len(texts) if epoch == attempts else draw(st.integers(index, len(texts)))
        while index < stop:
            end = draw(st.integers(index + 1, stop))
            log.append(tokens(epoch, index, *texts[index:end]))
            index = end
        reached = max(reached, index)
    log.append(finished(attempts, len(texts)))
    # A zombie of the first attempt speaks after the last: fenced, and harmless even where it is not.
    if attempts > 1 and texts and draw(st.booleans()):
        log.insert(draw(st.integers(0, len(log))), tokens(1, 0, texts[0]))
    return texts, log


@given(runs(), st.data())
def test_any_interleaving_of_live_and_log_gives_each_token_once_in_order_and_one_end(
    run: tuple[list[str], list[Event]], data: st.DataObject
) -> None:
    """Live messages are dropped, doubled and reordered; the log is read at any moment, as far as it has come."""
    texts, log = run
    live = data.draw(st.lists(st.sampled_from(log), max_size=2 * len(log)), label="live")
    if data.draw(st.booleans(), label="live mostly in order"):
        live = sorted(live, key=log.index)
    start = data.draw(st.integers(0, len(texts)), label="start")
    sequencer = Sequencer(start)
    actions: list[Action] = []
    read = 0
    for event in live:
        actions += sequencer.take(event)
        if data.draw(st.booleans(), label="read the log"):
            upto = data.draw(st.integers(read, len(log)), label="as far as")
            for logged in log[read:upto]:
                actions += sequencer.take_log(logged)
            read = upto
    for logged in log[read:]:
        actions += sequencer.take_log(logged)
    delivered = [action.tokens for action in actions if isinstance(action, Deliver)]
    assert [text for event in delivered for text in event.texts] == texts[start:]
    assert [event.index for event in delivered] == [
        start + sum(len(before.ids) for before in delivered[:place]) for place in range(len(delivered))
    ]
    [end] = [action for action in actions if isinstance(action, End)]
    assert isinstance(end.outcome, Finished)
    assert not sequencer.hole


@given(runs(), st.data())
def test_a_changed_text_is_never_spliced(run: tuple[list[str], list[Event]], data: st.DataObject) -> None:
    """Whatever a diverging replay says, what was delivered is a prefix of the first answer."""
    texts, log = run
    place = data.draw(st.integers(0, len(log) - 1))
    event = log[place]
    sequencer = Sequencer()
    actions: list[Action] = []
    for logged in log:
        actions += sequencer.take(logged)
        if logged is event and isinstance(event, Tokens):
            changed = tokens(9, event.index, *(text + "!" for text in event.texts))
            actions += sequencer.take(changed)
            assert sequencer.ended
    said = [text for action in actions if isinstance(action, Deliver) for text in action.tokens.texts]
    assert said == texts[: len(said)]
    assert sum(isinstance(action, End) for action in actions) <= 1


def test_the_table_is_total() -> None:
    """Nothing that a worker can publish makes the sequencer raise."""
    for event in (tokens(1, 0), tokens(1, 5), finished(0, 0), failed(9, 9)):
        assert Sequencer().take(event)


def test_a_start_beyond_the_end_is_the_askers_error() -> None:
    sequencer = Sequencer(start=9)
    assert code_of(sequencer.take_log(finished(1, 3))[0]) == "invalid_value"  # type: ignore[arg-type]
