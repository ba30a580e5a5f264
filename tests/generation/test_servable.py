import pytest

import language_toys as toys
from servax.core.errors import UsageError
from servax.generation.sequence import Finish
from servax.runtime.request import InferRequest


def ids(answer):
    return [token.id for token, _, _ in answer.tokens]


@pytest.mark.parametrize("length", [1, 2, 8, 9, 33, 60])
def test_the_greedy_answer_is_the_networks_own(servable, length):
    """Against the network's plain call, which knows no cache, chunks or bursts."""
    prompt = toys.prompt(length, length)
    answer = servable.generate(prompt, temperature=0, max_tokens=20, ignore_eos=True)
    assert answer.finish is Finish.LENGTH
    assert toys.agrees(ids(answer), *toys.greedy(toys.llama().net, prompt, 20))


def test_raw_functions_are_the_engines(servable):
    with pytest.raises(UsageError, match="/v1/completions"):
        servable.infer(InferRequest("decode", {}))
