"""Stop strings: cut at the first occurrence, also across tokens; what was given out never changes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft_jax.text import RowText


class Letters:
    """A tokenizer whose tokens are short pieces of text."""

    pieces = ("a", "b", "ab", "ba", "c", "bc")

    def stream(self):
        return self

    def push(self, ids):
        return "".join(self.pieces[i] for i in ids)

    def flush(self):
        return ""


@given(
    ids=st.lists(st.integers(0, 5), max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_text_is_cut_at_the_first_stop(ids, stops, cuts):
    row, given_out = RowText(Letters(), stops), ""
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for start, end in zip(edges, edges[1:]):
        given_out += row.push(ids[start:end])
    given_out += row.flush()
    # The oracle adds token by token until a stop stands in the text.
    text, count = "", 0
    for token in ids:
        text, count = text + Letters.pieces[token], count + 1
        hits = [text.find(stop) for stop in stops if stop in text]
        if hits:
            text = text[: min(hits)]
            break
    assert given_out == row.text == text
    assert row.count == count
    assert row.stopped == any(stop in "".join(Letters.pieces[t] for t in ids) for stop in stops)


@pytest.mark.parametrize("stop", ["", ["a", ""], [1]])
def test_bad_stops_are_refused(stop):
    from graft_jax.session import Request

    with pytest.raises(ValueError, match="stop="):
        _ = Request(stop=stop).stop_strings
