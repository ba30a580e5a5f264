import asyncio
import json
import re
import threading

import numpy as np
import pytest

import text_toys as toys
from servax.core.errors import InvalidInput
from servax.generation.constraints import (
    LONGEST,
    GrammarConstraint,
    Grammars,
    choice_grammar,
    json_grammar,
    regex_grammar,
)
from servax.generation.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def grammars():
    return Grammars(Vocabulary(toys.tokenizer(), 290, (toys.END,)))


def allowed(constraint):
    mask = constraint.mask()
    assert (mask.dtype, mask.shape) == (np.dtype(np.uint32), (10,)), "290 tokens: ten words of 32"
    return {index for index in range(290) if mask[index // 32] >> (index % 32) & 1}


def drawn(constraint, seed, most=400):
    """A random text of the grammar, by bytes; None where it does not end."""
    random, text = np.random.default_rng(seed), b""
    for _ in range(most):
        token = int(random.choice(sorted(allowed(constraint))))
        text += toys.content(token)
        if constraint.accept(token):
            return text.decode()
    return None


def test_the_mask_of_a_regular_expression(grammars):
    constraint = grammars.constraint(regex_grammar("ab?"))
    assert allowed(constraint) == {ord("a")}
    assert not constraint.accept(ord("a"))
    assert allowed(constraint) == {ord("b"), toys.END}, "it may end here, and not before"
    assert constraint.accept(ord("b")), "nothing can follow"
    assert constraint.broken is None


def test_the_end_is_a_token_like_another(grammars):
    constraint = grammars.constraint(regex_grammar("a+"))
    assert not constraint.accept(ord("a"))
    assert constraint.accept(toys.END)
    assert constraint.broken is None


@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_give_what_the_expression_matches(grammars, seed):
    text = drawn(grammars.constraint(regex_grammar("(the|[a-c]{2}|€)( [0-9]){1,3}")), seed)
    assert re.fullmatch("(the|[a-c]{2}|€)( [0-9]){1,3}", text)


@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_give_json_of_the_schema(grammars, seed):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 12}, "kind": {"enum": ["red", "blue"]}},
        "required": ["n", "kind"],
        "additionalProperties": False,
    }
    value = json.loads(drawn(grammars.constraint(json_grammar(schema)), seed))
    assert set(value) == {"n", "kind"}
    assert 1 <= value["n"] <= 12
    assert value["kind"] in ("red", "blue")


def test_a_choice(grammars):
    texts = {drawn(grammars.constraint(choice_grammar(["yes", "no", 'say "maybe"'])), seed) for seed in range(20)}
    assert texts == {"yes", "no", 'say "maybe"'}


def test_one_request_does_not_move_another(grammars):
    first, second = (grammars.constraint(regex_grammar("xyz")) for _ in range(2))
    first.accept(ord("x"))
    assert allowed(first) == {ord("y")}
    assert allowed(second) == {ord("x")}


def test_a_token_that_is_not_allowed_ends_it_and_says_so(grammars):
    constraint = grammars.constraint(regex_grammar("abc"))
    assert constraint.accept(ord("x"))
    assert constraint.broken is not None


@pytest.mark.parametrize("where", ["compute_bitmask", "consume_token"])
def test_a_library_that_raises_ends_the_answer_and_nothing_else(where):
    class Raising:
        def compute_bitmask(self):
            return self.fail("compute_bitmask") or bytes(40)

        def consume_token(self, token):
            return self.fail("consume_token") or False

        def stop_reason(self):
            return "InternalError"

        def fail(self, name):
            if name == where:
                raise RuntimeError("poisoned")

    constraint = GrammarConstraint(Raising(), 10, ())
    assert constraint.mask().shape == (10,)
    assert constraint.accept(1)
    assert constraint.broken == "RuntimeError: poisoned"


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (regex_grammar("("), "unclosed group"),
        (regex_grammar("a(?=b)"), "look-around"),
        (json_grammar({"type": "nothing"}), "Invalid type"),
        (json_grammar({"type": "string", "format": "nothing"}), "Unknown format"),
        (json_grammar({"$ref": "http://example.com/x"}), "not present"),
    ],
)
def test_what_cannot_be_read_is_refused(grammars, grammar, said):
    with pytest.raises(InvalidInput, match=said) as caught:
        grammars.constraint(grammar)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "grammar",
    [
        regex_grammar(r"[^\s\S]"),
        json_grammar({"type": "object", "properties": {"a": False}, "required": ["a"]}),
        json_grammar({"type": "integer", "minimum": 5, "maximum": 2}),
        json_grammar({"enum": []}),
    ],
)
def test_what_no_text_meets_is_refused(grammars, grammar):
    with pytest.raises(InvalidInput, match=r"meets|Unsatisfiable|cannot be followed"):
        grammars.constraint(grammar)


def test_bounds_of_size():
    with pytest.raises(InvalidInput, match="too long"):
        regex_grammar("a" * (LONGEST + 1))
    with pytest.raises(InvalidInput, match="too long"):
        json_grammar({"enum": ["a" * LONGEST]})
    with pytest.raises(InvalidInput, match="nothing to choose from"):
        choice_grammar([])


def test_compiling_has_a_timeout_and_holds_no_loop(monkeypatch):
    grammars = Grammars(Vocabulary(toys.tokenizer(), 290, (toys.END,)), seconds=0.05)
    release = threading.Event()
    monkeypatch.setattr(grammars, "_compile", lambda grammar: release.wait(60))
    try:
        with pytest.raises(InvalidInput, match="too long to compile"):
            asyncio.run(grammars.constraint_async(regex_grammar("a")))
    finally:
        release.set()


def test_a_model_without_an_end_id_goes_on_until_nothing_can_follow():
    grammars = Grammars(Vocabulary(toys.tokenizer(), 290, ()))
    constraint = grammars.constraint(regex_grammar("ab?"))
    assert not constraint.accept(ord("a"))
    assert allowed(constraint) == {ord("b")}


def test_tokens_that_are_no_bytes_follow_no_grammar():
    class Words:
        definition = '{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}'

        def text(self, token):
            return "a"

    vocabulary = Vocabulary(Words(), 1, ())
    assert vocabulary.bytes(0) == b"a"
    with pytest.raises(InvalidInput, match="cannot follow a grammar"):
        Grammars(vocabulary).constraint(regex_grammar("a"))


def test_bytes_of_tokens():
    vocabulary = Vocabulary(toys.tokenizer(), 290, (toys.END,))
    known = [each for each in range(266) if each != 0xFF]  # a byte that no UTF-8 has; the library marks names with it
    assert [vocabulary.bytes(each) for each in known] == [toys.content(each) for each in known]
    assert vocabulary.bytes(toys.END) == b"<end>"
    assert vocabulary.bytes(1000) == b""
