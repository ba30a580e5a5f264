import pytest

import text_toys as toys
from servax.generation.sequence import Finish, Token
from servax.generation.text import Detokenizer, TextStream

THE, SPACE_THE, GRIN, NING, A_EU, RO_B, _, STOP, OP, ST = range(256, 266)
"""The pieces of `text_toys`: two halves of an emoji, two of a euro sign."""


def tokens(*ids):
    return [Token(each, -float(each)) for each in ids]


def stream(*stop):
    return TextStream(toys.tokenizer().decode, stop)


def test_a_split_emoji_is_shown_when_it_is_whole():
    text = stream()
    assert text.add(tokens(GRIN)).text == ""
    piece = text.add(tokens(NING))
    assert piece.text == "😀"
    assert [(token.id, start, own) for token, start, own in piece.tokens] == [(GRIN, 0, ""), (NING, 0, "😀")]


def test_a_character_in_single_bytes():
    detokenizer = Detokenizer(toys.tokenizer().decode)
    assert [detokenizer.add(byte) for byte in "é€😀".encode()] == ["", "é", "", "", "€", "", "", "", "😀"]


def test_what_ends_within_a_character_is_shown_broken_at_the_end():
    text = stream()
    assert text.add(tokens(A_EU)).text == "a"
    piece = text.add((), Finish.LENGTH)
    assert piece.text == "�"
    assert piece.tokens == ((Token(A_EU, -260.0), 0, "a�"),)


def test_a_stop_string_across_three_tokens():
    text = stream("STOP!")
    assert text.add(tokens(THE, ST)).text == "the"
    held = text.add(tokens(OP))
    assert (held.text, held.tokens) == ("", ())
    piece = text.add(tokens(ord("!"), THE))
    assert text.stopped
    assert (piece.text, piece.tokens) == ("", ())
    assert text.count == 4, "the token after the stop string is not taken in"


def test_what_only_began_a_stop_string_is_shown_with_its_tokens():
    text = stream("STOP!")
    text.add(tokens(ST, OP))
    piece = text.add(tokens(ord("?")))
    assert piece.text == "STOP?"
    assert [(token.id, start, own) for token, start, own in piece.tokens] == [
        (ST, 0, "ST"),
        (OP, 2, "OP"),
        (ord("?"), 4, "?"),
    ]


def test_a_token_is_cut_where_the_stop_string_begins_in_it():
    text = stream("€")
    piece = text.add(tokens(A_EU, RO_B))
    assert piece.text == "a"
    assert [(token.id, start, own) for token, start, own in piece.tokens] == [(A_EU, 0, "a")]


def test_the_end_shows_what_was_held():
    text = stream("STOP!")
    assert text.add(tokens(STOP)).text == ""
    piece = text.add(tokens(toys.END), Finish.STOP)
    assert piece.text == "STOP"
    assert [own for _, _, own in piece.tokens] == ["STOP", ""]


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (("bcd", "c"), "ab"),  # the one that is complete first, though another began before it
        (("bc", "c"), "a"),  # both at once: the longer
        (("aba", "bab"), ""),
    ],
)
def test_the_first_stop_string_that_is_complete_wins(stop, shown):
    whole = {"bcd": "abcd", "bc": "abcd", "aba": "abab"}[stop[0]]
    assert stream(*stop).add(tokens(*whole.encode())).text == shown


def test_spaces_between_words_survive_decoders_that_take_the_first_away():
    """As SentencePiece's do: `_Hello` at the beginning of a text is `Hello`."""
    words = ["▁Hello", "▁big", "▁", "world", "▁again", "▁and", "▁again", "▁so"]

    def decode(ids):
        return "".join(words[index] for index in ids).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(decode)
    assert "".join(map(detokenizer.add, range(len(words)))) == "Hello big world again and again so"
