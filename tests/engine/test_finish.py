"""When an answer ends and what of it is shown, at every split of the text into tokens."""

from itertools import pairwise, product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from schemas.events import Likely, Logprob
from tests.engine.fakes import sampling
from workers.engine.detokenizer import Detokenizer
from workers.engine.finish import Emission, Emitter, StopMatcher

EOS = 0


class _Logged(Emitter):
    """An emitter that keeps its emissions."""

    def __init__(self, pieces: list[bytes], limit: int, emitted: int, options: dict[str, Any]) -> None:
        self.log: list[Emission] = []
        detokenizer = Detokenizer([b"", *pieces])
        super().__init__(sampling(**options), frozenset({EOS}), limit, detokenizer, range(1, emitted + 1))


def _run(pieces: list[bytes], limit: int = 99, emitted: int = 0, eos_at: int | None = None, **options: Any) -> _Logged:
    """An emitter after its answer's tokens, number i with the bytes pieces[i]; the first emitted ones came before."""
    emitter = _Logged(pieces, limit, emitted, options)
    for number in range(emitted, len(pieces)):
        if emitter.ended is None:
            emitter.log.append(emitter.push(EOS if number == eos_at else number + 1))
    return emitter


def _texts(emitter: _Logged) -> list[tuple[str, ...]]:
    return [emission.texts for emission in emitter.log]


def _shown(emitter: _Logged) -> str:
    return "".join(text for texts in _texts(emitter) for text in texts)


def _first_stop(text: str, stops: list[str]) -> int | None:
    """By brute force: where the stop string begins that ends first, the longest of those."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return min(begins)
    return None


def _longest_open_end(text: str, stops: list[str]) -> int:
    """By brute force: the longest end of text that is a proper beginning of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def test_tokens_are_shown_at_once_without_stop_strings() -> None:
    assert _texts(_run([b"a", b"b"])) == [("a",), ("b",)]


def test_a_possible_beginning_of_a_stop_string_is_held_and_then_shown() -> None:
    assert _texts(_run([b"a", b" ST", b"ART"], stop=["STOP"])) == [("a",), (), (" ST", "ART")]


def test_the_token_across_the_cut_is_trimmed_and_later_ones_are_dropped() -> None:
    emitter = _run([b"a", b"b ST", b"O", b"P c"], stop=["STOP"])
    assert emitter.log[-1] == Emission((2,), ("b ",), "stop")
    assert (emitter.drawn, emitter.shown) == (4, 2)


def test_a_stop_string_inside_one_token_trims_it() -> None:
    assert _run([b"oneSTOPtwo"], stop=["STOP"]).log == [Emission((1,), ("one",), "stop")]


def test_eos_ends_the_answer_counts_and_is_not_shown() -> None:
    emitter = _run([b"a", b"", b"c"], eos_at=1)
    assert emitter.log == [Emission((1,), ("a",)), Emission((), (), "stop")]
    assert emitter.drawn == 2


def test_eos_is_a_token_without_text_when_ignored_or_before_min_tokens() -> None:
    assert _run([b"a", b"", b"c"], eos_at=1, ignore_eos=True).log[1] == Emission((EOS,), ("",))
    assert _run([b"a", b"", b"c"], eos_at=1, min_tokens=2).log[1] == Emission((EOS,), ("",))
    assert _run([b"a", b"", b"c"], eos_at=1, min_tokens=1).log[1] == Emission((), (), "stop")


def test_a_stop_token_id_ends_the_answer_even_when_eos_is_ignored() -> None:
    assert _run([b"a", b"b"], stop_token_ids=[2], ignore_eos=True).log[-1] == Emission((), (), "stop")


def test_stop_strings_count_only_after_min_tokens() -> None:
    assert _shown(_run([b"STOP", b"a", b"STOP"], stop=["STOP"], min_tokens=2)) == "STOPa"
    assert _shown(_run([b"STOP", b"STOP", b"a"], stop=["STOP"], min_tokens=1)) == "STOP"


def test_the_last_token_allowed_shows_all_that_was_held() -> None:
    emitter = _run([b"a", b"ST"], limit=2, stop=["STOP"])
    assert emitter.log[-1] == Emission((2,), ("ST",), "length")


def test_eos_as_the_last_token_allowed_is_a_stop() -> None:
    assert _run([b"a", b""], limit=2, eos_at=1).log[-1] == Emission((), (), "stop")


def test_a_character_cut_off_at_the_end_is_shown_with_its_last_token() -> None:
    assert _texts(_run([b"a\xf0", b"\x9f"], limit=2)) == [(), ("a", "\ufffd")]
    assert _texts(_run([b"a\xf0", b"\x9f", b""], eos_at=2)) == [(), (), ("a", "\ufffd")]


def test_tokens_of_a_character_that_begins_a_stop_string_are_dropped_together() -> None:
    emitter = _run([b"a", b"\xf0\x9f", b"\x98", b"\x80!"], stop=["😀!"])
    assert _texts(emitter) == [("a",), (), (), ()]
    assert emitter.shown == 1


def test_a_token_without_text_right_before_the_cut_is_kept() -> None:
    assert _run([b"ab", b"", b"Y"], stop=["abX", "Y"]).log[-1] == Emission((1, 2), ("ab", ""), "stop")


def test_of_two_stop_strings_the_one_that_ends_first_counts() -> None:
    assert _shown(_run([b"xabcd"], stop=["abcd", "bc"])) == "xa"
    assert _shown(_run([b"xabc"], stop=["bc", "abc"])) == "x"


def test_an_answer_that_was_all_sent_is_over_at_once() -> None:
    assert _run([b"a", b"b"], limit=2, emitted=2).ended == "length"
    assert _run([b"a", b"xSTOP"], emitted=2, stop=["STOP"]).ended == "stop"


def test_a_stop_string_across_the_point_of_resumption_is_found_and_nothing_is_shown_twice() -> None:
    emitter = _run([b"b ST", b"OP"], emitted=1, stop=["STOP"])
    assert emitter.log == [Emission((), (), "stop")]


_ALPHABET = st.sampled_from(["a", "b", "ab", "é", "😀", "ba"])
_TEXT = st.lists(_ALPHABET, max_size=14).map("".join)
_STOPS = st.lists(st.lists(_ALPHABET, min_size=1, max_size=4).map("".join), max_size=3)


def _split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


@given(_TEXT, _STOPS, st.lists(st.integers(0, 40), max_size=10))
def test_the_answer_is_the_text_up_to_the_first_stop_string_at_every_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    pieces = _split(text.encode(), cuts)
    emitter = _run([*pieces, b""], eos_at=len(pieces), stop=stops)
    assert emitter.ended == "stop"
    assert _shown(emitter) == text[: _first_stop(text, stops)]


@given(_TEXT, _STOPS, st.lists(st.integers(0, 40), max_size=10))
def test_what_is_held_is_the_longest_open_end_and_no_token_more(text: str, stops: list[str], cuts: list[int]) -> None:
    pieces = _split(text.encode(), cuts)
    for count in range(1, len(pieces) + 1):
        emitter = _run(pieces[:count], stop=stops)
        if emitter.ended:
            return
        whole = b"".join(pieces[:count])
        decoded = whole.decode(errors="ignore")
        safe = decoded[: len(decoded) - _longest_open_end(decoded, stops)].encode()
        ends = [len(b"".join(pieces[:number])) for number in range(count + 1)]
        assert emitter.shown == max(number for number in range(count + 1) if ends[number] <= len(safe))


@given(_TEXT, _STOPS, st.lists(st.integers(0, 40), max_size=10), st.integers(1, 12), st.data())
def test_a_resumed_answer_shows_exactly_the_rest(
    text: str, stops: list[str], cuts: list[int], limit: int, data: st.DataObject
) -> None:
    pieces = [*_split(text.encode(), cuts), b""]
    whole = _run(pieces, limit, eos_at=len(pieces) - 1, stop=stops)
    emitted = data.draw(st.integers(0, whole.shown))
    rest = _run(pieces, limit, emitted=emitted, eos_at=len(pieces) - 1, stop=stops)
    shown = [text for texts in _texts(whole) for text in texts]
    assert [text for texts in _texts(rest) for text in texts] == shown[emitted:]
    assert (rest.ended, rest.drawn, rest.shown) == (whole.ended, whole.drawn, whole.shown)


def test_the_matcher_finds_every_short_stop_string_in_every_short_text() -> None:
    words = ["".join(letters) for size in range(1, 8) for letters in product("ab", repeat=size)]
    for stop in words[:30]:
        for text in words:
            assert StopMatcher([stop]).feed(text) == _first_stop(text, [stop]), (stop, text)


def test_the_matcher_finds_a_stop_string_behind_a_false_start() -> None:
    for stop in map("".join, product("ab", repeat=8)):
        for false_start in range(8):
            text = stop[:false_start] + stop
            assert StopMatcher([stop]).feed(text) == _first_stop(text, [stop]), (stop, text)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), max_size=3))
def test_the_matcher_agrees_with_brute_force_at_every_character(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    for end in range(1, len(text) + 1):
        cut = matcher.feed(text[end - 1])
        assert cut == _first_stop(text[:end], stops)
        if cut is not None:
            return
        assert matcher.safe == end - _longest_open_end(text[:end], stops)


def test_a_token_cut_at_a_stop_string_loses_its_logprob_and_dropped_ones_take_theirs_along() -> None:
    """Its bytes would show what was cut off."""
    emitter = Emitter(sampling(stop=("STOP",), top_logprobs=0), frozenset(), 9, Detokenizer([b"a", b"bST", b"OP"]))
    of = [Logprob(Likely(number, b"?", -1.0)) for number in range(3)]
    emissions = [emitter.push(number, of[number]) for number in range(3)]
    assert [(e.ids, e.texts, e.logprobs) for e in emissions if e.ids] == [((0,), ("a",), (of[0],)), ((1,), ("b",), (None,))]
