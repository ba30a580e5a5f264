import importlib
import io
import json
import os
import sys

import pytest
from typer.testing import CliRunner

import text_toys as toys
from servax.cli import chat
from servax.cli.app import app
from servax.core.errors import InvalidInput, NotReady, UsageError
from servax.generation.template import ChatTemplate
from servax.server.background import serve


@pytest.fixture(scope="module")
def servable():
    template = ChatTemplate(toys.TEMPLATE, {})
    with toys.speller().servable(name="speller", tokenizer=toys.tokenizer(), template=template) as servable:
        yield servable


@pytest.fixture(scope="module")
def url(servable):
    with serve(servable, port=0) as server:
        yield server.url


def run(*arguments, lines="one\n\ntwo\n"):
    return CliRunner().invoke(app, ["chat", *arguments], input=lines)


@pytest.mark.parametrize("end", ["", "/", "/v1"])
def test_each_line_is_a_message_where_there_is_no_terminal(url, end):
    done = run(url + end, "--temperature", "0")
    assert (done.exit_code, done.stdout) == (0, "Hi 😀!\nHi 😀!\n")


def test_json(url):
    done = run(url, "--temperature", "0", "--max-tokens", "1", "--json", "--system", "spell")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"role": "assistant", "content": "H", "complete": True}
    ] * 2


def test_a_bundle_in_this_process(monkeypatch):
    template = ChatTemplate(toys.TEMPLATE, {})
    servable = toys.speller().servable(tokenizer=toys.tokenizer(), template=template)
    module = importlib.import_module("servax.api.load")
    monkeypatch.setattr(module, "load", lambda target, **options: servable)
    assert run("speller.bundle", "--temperature", "0", "--seed", "1").stdout == "Hi 😀!\nHi 😀!\n"


def test_the_conversation_goes_on_and_begins_anew():
    heard = []

    class Echo:
        def say(self, messages, sampling):
            heard.append([message["content"] for message in messages])
            yield "so "
            yield messages[-1]["content"]

    chat._answer(Echo(), [{"role": "user", "content": "x"}], {}, shown=False)
    assert talk(Echo(), ["a", "b", "/reset", "c", "/exit", "d"]) == "so a\nso b\nso c\n"
    assert heard[1:] == [["be", *each] for each in (["a"], ["a", "so a", "b"], ["c"])]


def test_ctrl_c_stops_the_answer_and_what_was_said_stays_said():
    heard, closed = [], []

    class Interrupted:
        def say(self, messages, sampling):
            heard.append([message["content"] for message in messages])
            try:
                yield "half"
                if len(heard) == 1:
                    raise KeyboardInterrupt
            finally:
                closed.append(True)

    assert talk(Interrupted(), ["a", "b"]) == "half\nhalf\n\n"
    assert heard == [["be", "a"], ["be", "a", "half", "b"]]
    assert len(closed) == 2


def test_an_error_at_a_terminal_ends_the_answer_alone(capsys):
    class Failing:
        def say(self, messages, sampling):
            if messages[-1]["content"] == "a":
                raise InvalidInput("too long")
            yield str(len(messages))

    assert talk(Failing(), ["a", "b"]) == "2\n\n"


def talk(speaker, typed):
    """What stands on standard output after a conversation at a terminal."""
    lines = iter(typed)

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.input", read)
        patch.setattr(sys, "stdin", Terminal())
        patch.setattr(sys, "stdout", out)
        chat._converse(speaker, [{"role": "system", "content": "be"}], {}, as_json=False)
    return out.getvalue()


def test_what_cannot_be_done(url):
    assert isinstance(run("http://127.0.0.1:9").exception, NotReady)
    assert isinstance(run(url, "--platform", "cpu").exception, UsageError)
    assert isinstance(run("x.bundle", "--model", "m").exception, UsageError)
    assert run(url, "--model", "nobody").exit_code == 1
    assert isinstance(run(url, "--top-p", "0").exception, InvalidInput)
    assert os.environ.get("SERVAX_API_KEY") is None


def test_a_server_of_several_models_must_be_told_which(servable):
    template = ChatTemplate(toys.TEMPLATE, {})
    other = toys.speller().servable(name="other", tokenizer=toys.tokenizer(), template=template)
    with other, serve([servable, other], port=0) as server:
        error = run(server.url).exception
        assert isinstance(error, UsageError)
        assert "other, speller" in str(error)
        assert run(server.url, "--model", "other", "--temperature", "0").stdout.startswith("Hi")
