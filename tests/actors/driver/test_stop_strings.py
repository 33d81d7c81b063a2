"""Stop strings: found in any split of the text, held back while they may begin, never shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.actors.driver.stop_strings import StopStrings

words = st.text("ab", min_size=1, max_size=4)


@given(text=st.text("abc", max_size=24), stops=st.lists(words, min_size=1, max_size=3))
def test_text_ends_before_the_stop_string_that_is_complete_first(text: str, stops: list[str]):
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    out, stopper = "", StopStrings(stops)
    for position, letter in enumerate(text, 1):
        stopped = stopper.feed(letter)
        out += stopper.take()
        assert stopped == (bool(ends) and min(ends)[0] == position)
        if stopped:
            assert out == text[: min(start for end, start in ends if end == position)]
            assert stopper.found == text[len(out) : position]
            return
        assert stopper.found is None
        held = text[len(out) : position]
        assert out + held == text[:position]
        assert not held or any(s.startswith(held) for s in stops)
    stopper.end()
    assert out + stopper.take() == text


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(words, min_size=1, max_size=3),
    at=st.integers(0, 20),
)
def test_what_ends_before_it_is_armed_never_stops(text: str, stops: list[str], at: int):
    stopper, out = StopStrings(stops), ""
    for position, letter in enumerate(text, 1):
        if stopper.feed(letter, armed=position >= at):
            assert position >= at
            assert any(text[:position].endswith(s) for s in stops)
            return
        out += stopper.take()
        assert position < at or not any(text[:position].endswith(s) for s in stops)
    stopper.end()
    assert out + stopper.take() == text
