from hypothesis import example, given, settings
from hypothesis import strategies as st

import text_toys as toys
from servax.generation.sequence import Finish, Token
from servax.generation.text import TextStream

CHARACTERS = [*"é€😀".encode(), *b"STOP the\n\n", *range(0x80, 0x90), 0xF0, 0xE2]
IDS = st.lists(st.one_of(st.sampled_from(CHARACTERS), st.integers(0, toys.VOCABULARY - 1)), max_size=40)
STOPS = st.lists(
    st.one_of(
        st.sampled_from(["STOP", "TO", "the", "€", "😀", "\n\n", "�", "é", "��"]), st.text(min_size=1, max_size=3)
    ),
    max_size=4,
)


def expected(ids, stop):
    """The whole, decoded by Python, cut before the first stop string to be complete, the longest of several."""
    whole = b"".join(map(toys.content, ids)).decode("utf-8", "replace")
    for end in range(len(whole) + 1):
        for text in sorted(stop, key=len, reverse=True):
            if whole[:end].endswith(text):
                return whole[: end - len(text)], True
    return whole, False


@settings(max_examples=400, deadline=None)
@given(ids=IDS, stop=STOPS, cuts=st.lists(st.integers(1, 8), max_size=40), late=st.booleans())
@example(ids=[0xE2, 0xE2, 0xE2, 0xE2, 0x82, 0xAC], stop=[], cuts=[], late=True)
@example(ids=[260, 261], stop=["€"], cuts=[1], late=False)
def test_any_chunks_give_the_text_of_the_whole(ids, stop, cuts, late):
    stream = TextStream(toys.tokenizer().decode, stop)
    left, pieces = [Token(each, 0.0) for each in ids], []
    for size in cuts:
        if len(left) > size:
            pieces.append(stream.add(left[:size]))
            left = left[size:]
    if late:
        pieces.append(stream.add(left))
        left = []
    pieces.append(stream.add(left, Finish.LENGTH))
    shown = "".join(piece.text for piece in pieces)
    assert (shown, stream.stopped) == expected(ids, stop)
    given_back = [each for piece in pieces for each in piece.tokens]
    assert "".join(own for _, _, own in given_back) == shown
    assert [token.id for token, _, _ in given_back] == ids[: len(given_back)]
    assert all(shown[start : start + len(own)] == own for _, start, own in given_back)
    if not stream.stopped:
        assert len(given_back) == len(ids) == stream.count
