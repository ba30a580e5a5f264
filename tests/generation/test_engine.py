import asyncio
import itertools
import random
import time

import numpy as np
import pytest

import language_toys as toys
from servax.core.errors import (
    DeadlineExceeded,
    ExecutionError,
    InvalidInput,
    NotReady,
    Overloaded,
    TooLarge,
)
from servax.core.events import BurstDone, PromptDone, SequenceDone, listening
from servax.generation.entrance import EngineLimits
from servax.generation.sequence import Finish

LIMIT = 96
"""The context of the toy."""


@pytest.fixture
def loop():
    return toys.Loop(toys.llama())


def loop_of(**options):
    return toys.Loop(toys.llama(), **options)


def sampled(seed, **options):
    return {"temperature": 1.0, "seed": seed, "max_tokens": 12, "ignore_eos": True} | options


KINDS = {
    "greedy": {"temperature": 0},
    "drawn": sampled(7),
    "top": sampled(8, top_k=20, top_p=0.9, min_p=0.01),
    "penalised": sampled(9, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_alone_and_in_a_full_batch_overlapped_or_not(kind):
    """Also one after the other in the same row, and whatever the rows beside it are doing."""
    prompt, options = toys.prompt(1, 20), KINDS[kind]
    alone = loop_of().answer(prompt, **options)
    assert len(alone) == 12
    assert loop_of(overlap=False).answer(prompt, **options) == alone
    for overlap in (True, False):
        full = loop_of(overlap=overlap)
        others = [
            full.ask(toys.prompt(10 + row, 5 + 9 * row), **sampled(row, max_tokens=3 + 8 * row)) for row in range(3)
        ]
        full.step()
        asked = full.ask(prompt, **options)
        full.run()
        assert asked.ids == alone
        assert [len(other.ids) for other in others] == [3, 11, 19]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("common", [16, 33, 60])
def test_the_same_tokens_with_a_prefix_hit_and_without(kind, common):
    """From a finished answer, from one that still runs, and from one that was aborted."""
    prompt, options = toys.prompt(2, 70), KINDS[kind]
    fresh = loop_of().answer(prompt, **options)
    other = prompt[:common] + toys.prompt(3, 5)
    loop = loop_of()
    loop.answer(other, max_tokens=4)
    hit = loop.ask(prompt, **options)
    loop.run()
    assert (hit.ids, hit.sequence.reused) == (fresh, common)
    loop = loop_of()
    running = loop.ask(other, max_tokens=20)
    while not running.ids:
        loop.step()
    hit = loop.ask(prompt, **options)
    loop.engine.abort(running.sequence)
    loop.run()
    assert (hit.ids, hit.sequence.reused) == (fresh, common)


def test_the_same_tokens_in_one_chunk_and_in_many():
    prompt = toys.prompt(4, 60)
    expected, margins = toys.greedy(toys.network(), prompt, 12)
    for chunks in ((8,), (64,)):
        toy = toys.compiled(toys.network(), chunks=chunks, batches=(1,), slots=1)
        assert toys.agrees(toys.Loop(toy).answer(prompt), expected, margins)


def test_a_sequence_moves_down_when_rows_below_are_free(loop):
    """While a burst is in flight; its tokens are those it would have had anyway."""
    prompt = toys.prompt(5, 10)
    alone = loop_of().answer(prompt, max_tokens=60, temperature=1.0, seed=3)
    short = [loop.ask(toys.prompt(row, 4), max_tokens=6) for row in range(3)]
    last = loop.ask(prompt, max_tokens=60, temperature=1.0, seed=3)
    loop.run()
    assert last.ids == alone
    assert all(each.finish is Finish.LENGTH for each in short)
    assert loop.calls.count("copy@static") >= 1
    assert loop.calls[-1] == "decode@batch=1"


def test_what_a_shorter_prompt_left_is_gone_on_from(loop):
    first = loop.answer(prompt := toys.prompt(6, 30), max_tokens=5)
    again = loop.ask([*prompt, *first, 7, 8])
    loop.run()
    assert again.sequence.reused == 30 + 4  # the keys of the last token are written with the next one
    assert again.ids == loop_of().answer([*prompt, *first, 7, 8])


def test_the_same_prompt_several_times_is_written_once(loop):
    asked = [loop.ask(toys.prompt(7, 60), **sampled(seed)) for seed in range(4)]
    loop.run()
    assert [each.sequence.reused for each in asked] == [0, 59, 59, 59]
    assert sum(call.startswith("prefill") for call in loop.calls) == 2  # 32 and 27
    assert len({tuple(each.ids) for each in asked}) > 1
    assert [each.ids for each in asked] == [loop_of().answer(toys.prompt(7, 60), **sampled(seed)) for seed in range(4)]


def test_the_gap_between_tokens_is_at_most_one_chunk_and_one_burst(loop):
    """While others write long prompts: between two bursts there is one chunk, and never a second."""
    stream = loop.ask(toys.prompt(1, 3), max_tokens=80)
    while not stream.ids:
        loop.step()
    seen = len(loop.calls)
    others = [loop.ask(toys.prompt(20 + row, 90), max_tokens=2) for row in range(3)]
    deltas = len(stream.deltas)
    for _ in range(8):
        loop.step()
        assert len(stream.deltas) == deltas + 1, "every step gives it tokens"
        deltas += 1
    big = [call.partition("@")[0] for call in loop.calls[seen:] if not call.startswith(("begin", "copy"))]
    assert "prefill" in big
    assert all(not (first == second == "prefill") for first, second in itertools.pairwise(big))
    loop.run()
    assert all(other.finish is Finish.LENGTH for other in others)


def test_an_answer_ends_at_an_end_a_stop_id_or_its_length():
    prompt = toys.prompt(8, 12)
    tokens = loop_of().answer(prompt, max_tokens=30)
    stop = tokens[9]
    at = tokens.index(stop)
    loop = loop_of()
    asked = loop.ask(prompt, max_tokens=30, stop_token_ids=(stop,))
    loop.run()
    assert (asked.ids, asked.finish) == (tokens[: at + 1], Finish.STOP)
    late = loop.ask(prompt, max_tokens=30, stop_token_ids=(stop,), min_tokens=at + 1)
    loop.run()
    assert stop not in late.ids[: at + 1]
    ends = loop.ask(prompt, max_tokens=3, logit_bias={0: 100.0}, ignore_eos=False)
    loop.run()
    assert (ends.ids, ends.finish) == ([0], Finish.STOP)
    ignores = loop.ask(prompt, max_tokens=3, logit_bias={0: 100.0})
    loop.run()
    assert (ignores.ids, ignores.finish) == ([0, 0, 0], Finish.LENGTH)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_limits_of_the_context(overlap):
    loop = loop_of(overlap=overlap)
    at_limit = loop.ask(toys.prompt(1, LIMIT - 1), max_tokens=None)
    one = loop.ask(toys.prompt(2, 10), max_tokens=1)
    shortest = loop.ask([5], max_tokens=None)
    exact = loop.ask(toys.prompt(3, LIMIT - 8), max_tokens=8)
    loop.run()
    assert [len(each.ids) for each in (at_limit, one, shortest, exact)] == [1, 1, LIMIT - 1, 8]
    assert {each.finish for each in (at_limit, one, shortest, exact)} == {Finish.LENGTH}
    for prompt, options, error in (
        (toys.prompt(1, LIMIT), {"max_tokens": None}, TooLarge),
        (toys.prompt(1, LIMIT - 8), {"max_tokens": 9}, TooLarge),
        ([], {}, InvalidInput),
        ([1, 320], {}, InvalidInput),
        ([-1], {}, InvalidInput),
        ([1], {"logit_bias": {400: 1.0}}, InvalidInput),
        ([1], {"stop_token_ids": (-3,)}, InvalidInput),
        ([1], {"stop_token_ids": tuple(range(1, 9)), "ignore_eos": False}, InvalidInput),
    ):
        with pytest.raises(error):
            loop.ask(prompt, **options)
    assert loop.idle


def test_bias_that_leaves_one_token_and_a_temperature_close_to_zero(loop):
    only = loop.ask(
        toys.prompt(1, 5), temperature=1.0, logit_bias={17: 100.0} | dict.fromkeys(range(20, 300), float("-inf"))
    )
    cold = loop.ask(toys.prompt(1, 5), temperature=1e-6, seed=1)
    loop.run()
    assert only.ids == [17] * 12
    assert cold.ids == loop_of().answer(toys.prompt(1, 5))


def test_log_probabilities_with_alternatives(loop):
    prompt = toys.prompt(9, 11)
    asked = loop.ask(prompt, max_tokens=5, logprobs=20)
    beside = loop.ask(prompt, max_tokens=5)
    loop.run()
    ids = list(prompt)
    for token in (token for delta in asked.deltas for token in delta.tokens):
        scores = toys.logits(toys.llama().net, ids).astype(np.float64)
        right = scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
        assert token.logprob == pytest.approx(right[token.id], abs=1e-3)
        assert [value for _, value in token.top] == pytest.approx(sorted(right, reverse=True)[:20], abs=1e-3)
        assert token.top[0][0] == token.id
        ids.append(token.id)
    assert all(not token.top for delta in beside.deltas for token in delta.tokens)


def test_aborts_while_queued_in_prefill_and_in_decode(loop):
    """Within one step; what was computed is kept."""
    decoding = loop.ask(prompt := toys.prompt(1, 40), max_tokens=50)
    while len(decoding.ids) < 5:
        loop.step()
    filling = loop.ask(toys.prompt(2, 90), max_tokens=2)
    loop.step()
    others = [loop.ask(toys.prompt(30 + row, 3), max_tokens=9) for row in range(2)]
    loop.step()
    queued = loop.ask(toys.prompt(3, 5))
    assert 0 < filling.sequence.done < 89
    loop.step()
    assert loop.engine.status.waiting == 1
    for asked in (queued, filling, decoding):
        loop.engine.abort(asked.sequence)
        told = len(asked.deltas)
        loop.step()
        assert asked.sequence.over
        assert asked.sequence.slot is None
        assert len(asked.deltas) == told, "nothing more is delivered"
    assert loop.engine.status.waiting == 0
    loop.run()
    assert all(other.finish is Finish.LENGTH for other in others)
    again = loop.ask([*prompt, *decoding.ids[:3]], max_tokens=2)
    loop.run()
    assert again.sequence.reused == 42
    kept = loop.ask(toys.prompt(2, 90), max_tokens=2)
    loop.run()
    assert kept.sequence.reused >= 32


def test_an_abort_of_what_is_over_is_nothing(loop):
    asked = loop.ask(toys.prompt(1, 4), max_tokens=2)
    loop.run()
    loop.engine.abort(asked.sequence)
    assert loop.idle
    assert asked.sequence.finish is Finish.LENGTH


@pytest.mark.parametrize("function", ["prefill", "begin", "decode", "copy"])
def test_a_step_that_fails_costs_its_sequences_an_error_and_no_more(loop, function):
    alone = loop.answer(toys.prompt(1, 40), **sampled(1))
    running = [loop.ask(toys.prompt(40 + row, 6), max_tokens=30) for row in range(2)]
    while not running[-1].ids:
        loop.step()
    waiting = [loop.ask([*toys.prompt(1, 40), 50 + row, 7], max_tokens=3) for row in range(3)]
    loop.fails = function
    loop.run()
    failed = [each for each in (*running, *waiting) if each.error is not None]
    assert loop.fails is None
    assert failed
    assert all(isinstance(each.error, ExecutionError) for each in failed)
    assert all(each.finish is Finish.LENGTH for each in (*running, *waiting) if each not in failed)
    assert loop.idle
    # Nothing is reused of a state that is lost.
    again = loop.ask(toys.prompt(1, 40), **sampled(1))
    loop.run()
    assert again.ids == alone


def test_a_program_that_fails_on_the_device_is_found_when_it_is_read(loop, monkeypatch):
    asked = loop.ask(toys.prompt(1, 4))
    loop.step()

    def fetch(outputs):
        monkeypatch.undo()
        loop.runner.reset_state()
        raise ExecutionError("it failed on the device")

    monkeypatch.setattr(loop, "fetch", fetch)
    after = loop.ask(toys.prompt(2, 4))
    loop.run()
    assert isinstance(asked.error, ExecutionError)
    assert isinstance(after.error, ExecutionError), "it had a row too"
    assert loop.answer(toys.prompt(2, 4)) == loop_of().answer(toys.prompt(2, 4))


def test_an_error_of_our_own_does_not_end_the_loop(loop, monkeypatch):
    asked = loop.ask(toys.prompt(1, 4))
    loop.step()
    monkeypatch.setattr(loop, "fetch", lambda outputs: 1 / 0)
    loop.run()
    assert "ZeroDivisionError" in asked.error.sentence()
    monkeypatch.undo()
    assert len(loop.answer(toys.prompt(2, 4))) == 12


def test_a_device_that_runs_nothing_any_more_is_told_of_once(monkeypatch):
    told = []
    loop = loop_of(on_broken=told.append)
    for seed in range(2):
        loop.ask(toys.prompt(seed, 4))
        loop.fails = "decode"
        loop.run()
    assert not told
    loop.answer(toys.prompt(3, 4))

    def dispatch(*call):
        raise ExecutionError("out of order")

    monkeypatch.setattr(loop, "dispatch", dispatch)
    for seed in range(3):
        loop.ask(toys.prompt(seed, 4))
        loop.run()
    assert len(told) == 1
    assert "out of order" in told[0]


def test_a_burst_that_gives_a_row_nothing_ends_it(loop, monkeypatch):
    """Whatever the programs do, no request hangs the loop."""
    asked = loop.ask(toys.prompt(1, 4))
    fetch = loop.fetch
    monkeypatch.setattr(loop, "fetch", lambda outputs: [np.full_like(each, -1) for each in fetch(outputs)])
    loop.run(most=10)
    assert isinstance(asked.error, ExecutionError)


def test_logits_that_are_no_numbers_are_an_error(loop, monkeypatch):
    asked = loop.ask(toys.prompt(1, 4))
    fetch = loop.fetch

    def spoiled(outputs):
        return [np.full_like(each, np.nan) if each.dtype == np.float32 else each for each in fetch(outputs)]

    monkeypatch.setattr(loop, "fetch", spoiled)
    loop.run()
    assert isinstance(asked.error, ExecutionError)


def test_too_much_that_waits_is_refused_with_the_time_until_another_try():
    loop = loop_of(limits=EngineLimits(requests=6, tokens=100))
    asked = [loop.ask(toys.prompt(1, 90), max_tokens=2)]
    with pytest.raises(Overloaded, match="too many prompts wait"):
        loop.ask(toys.prompt(2, 11))
    asked += [loop.ask(toys.prompt(row, 2), max_tokens=2) for row in range(5)]
    with pytest.raises(Overloaded) as refused:
        loop.ask([1])
    assert refused.value.retry_after >= 1.0
    loop.run()
    assert all(each.finish is Finish.LENGTH for each in asked)
    assert loop.idle
    longer_than_the_limit = loop_of(limits=EngineLimits(tokens=10))
    assert len(longer_than_the_limit.answer(toys.prompt(1, 50))) == 12


def test_higher_priority_first_then_who_came_first():
    loop = loop_of()
    running = [loop.ask(toys.prompt(row, 3), max_tokens=4) for row in range(4)]
    loop.step()
    later = {}
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", -1), ("e", 5)):
        later[name] = loop.ask(toys.prompt(5, 3), max_tokens=1, priority=priority)
    loop.run()
    admitted = sorted(later, key=lambda name: later[name].sequence.admitted)
    assert admitted == ["c", "e", "a", "b", "d"]
    assert all(each.finish for each in running)


def test_a_deadline_ends_a_sequence_wherever_it_is(loop, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    running = [loop.ask(toys.prompt(row, 3), max_tokens=60, deadline=1010.0 if row else None) for row in range(4)]
    waiting = loop.ask(toys.prompt(9, 3), deadline=1005.0)
    loop.step()
    now[0] = 1006.0
    loop.step()
    assert isinstance(waiting.error, DeadlineExceeded)
    assert not any(each.error for each in running)
    now[0] = 1011.0
    loop.step()
    assert [isinstance(each.error, DeadlineExceeded) for each in running] == [False, True, True, True]
    loop.run()
    assert len(running[0].ids) == 60


class Only:
    """A constraint: the given tokens, in order."""

    def __init__(self, *tokens):
        self.left = list(tokens)

    def mask(self):
        mask = np.zeros(10, np.uint32)
        if self.left:
            mask[self.left[0] // 32] = 1 << self.left[0] % 32
        return mask

    def accept(self, token):
        assert token == self.left.pop(0)
        return not self.left


def test_constrained_rows_take_what_they_may_and_others_are_not_affected(loop):
    free = [loop.ask(toys.prompt(row, 8), **sampled(row, max_tokens=40)) for row in range(2)]
    tied = loop.ask(toys.prompt(3, 8), constraint=Only(5, 300, 31, 32), max_tokens=30)
    drawn = loop.ask(toys.prompt(4, 8), constraint=Only(1, 2, 3), **sampled(5))
    loop.run()
    assert (tied.ids, tied.finish) == ([5, 300, 31, 32], Finish.STOP)
    assert (drawn.ids, drawn.finish) == ([1, 2, 3], Finish.STOP)
    assert [each.ids for each in free] == [
        loop_of().answer(toys.prompt(row, 8), **sampled(row, max_tokens=40)) for row in range(2)
    ]
    # The row of a constrained sequence is free of it afterwards.
    assert loop.answer(toys.prompt(3, 8)) == loop_of().answer(toys.prompt(3, 8))


def test_a_constraint_that_breaks_or_can_not_be_met_costs_its_own_request_alone(loop):
    class Broken(Only):
        def accept(self, token):
            raise RuntimeError("lost the thread")

    free = loop.ask(toys.prompt(1, 8))
    broken = loop.ask(toys.prompt(2, 8), constraint=Broken(3, 4))
    unmet = loop.ask(toys.prompt(3, 8), constraint=Only())
    loop.run()
    assert "lost the thread" in broken.error.sentence()
    assert isinstance(unmet.error, InvalidInput)
    assert free.finish is Finish.LENGTH
    assert loop.idle


def test_close_answers_everyone_and_lets_nobody_in(loop):
    asked = [loop.ask(toys.prompt(row, 40), max_tokens=20) for row in range(7)]
    for _ in range(3):
        loop.step()
    loop.engine.close()
    assert all(isinstance(each.error, NotReady) for each in asked)
    assert not loop.engine.busy
    with pytest.raises(NotReady):
        loop.ask([1])
    loop.step()
    loop.engine.close()
    assert all(len([delta for delta in each.deltas if delta.error]) == 1 for each in asked)


def test_a_closed_event_loop_ends_its_sequences(loop):
    gone = asyncio.new_event_loop()
    lost = loop.ask(toys.prompt(1, 4), max_tokens=80, loop=gone)
    gone.close()
    stays = loop.ask(toys.prompt(2, 4))
    loop.run(most=30)
    assert lost.sequence.finish is Finish.ABORT
    assert stays.finish is Finish.LENGTH


def test_a_receiver_that_raises_disturbs_nobody(loop):
    bad = loop.ask(toys.prompt(1, 4))
    bad.sequence.receive = lambda delta: 1 / 0
    good = loop.ask(toys.prompt(2, 4))
    loop.run()
    assert good.finish is bad.sequence.finish is Finish.LENGTH


def test_a_request_that_nobody_will_run_is_refused_and_not_kept(loop):
    def wake():
        raise NotReady("the thread has ended")

    loop.engine._wake = wake
    with pytest.raises(NotReady):
        loop.ask([1])
    assert loop.idle


def test_random_requests_with_aborts_at_random_moments():
    """1,000 of them: every one ends once, no row or memory is kept, and each abort takes one step."""
    rng = random.Random(5)
    loop = loop_of(limits=EngineLimits(requests=8))
    ended = []
    asked, live = [], []
    prompts = [toys.prompt(seed, 90) for seed in range(6)]
    with listening(lambda event: ended.append(event) if isinstance(event, SequenceDone) else None):
        while len(asked) < 1000:
            for _ in range(rng.randrange(3)):
                prompt = rng.choice(prompts)[: rng.randrange(1, 80)] + toys.prompt(rng.randrange(50), rng.randrange(6))
                try:
                    one = loop.ask(
                        prompt, **sampled(rng.randrange(9), max_tokens=rng.randrange(1, 10), top_k=rng.randrange(9))
                    )
                except Overloaded:
                    continue
                asked.append(one)
                live.append(one)
            gone = [each for each in live if rng.random() < 0.12]
            for each in gone:
                loop.engine.abort(each.sequence)
            loop.step()
            assert all(each.sequence.over and each.sequence.slot is None for each in gone)
            live = [each for each in live if not each.sequence.over]
            owners = [id(owner) for owner in loop.engine._slots.owners]
            assert sorted(owners) == sorted(id(each.sequence) for each in live if each.sequence.slot is not None)
        loop.run()
    assert loop.idle
    assert len(ended) == len(asked)
    assert {event.status for event in ended} == {"length", "abort"}
    assert all(each.finish is Finish.LENGTH for each in asked if each.sequence.finish is Finish.LENGTH)
    assert loop.engine._slots.free == 4
    assert loop.engine.status.held <= loop.engine.status.capacity
    assert len(loop.engine._chunks) <= 2
    assert loop.answer(prompts[0][:50]) == loop_of().answer(prompts[0][:50])


def test_other_parameters_between_sequences(loop):
    """Those that run finish on the old ones, those that wait begin on the new ones, and no old cache is reused."""
    import threading

    from servax.core import trees

    prompt = toys.prompt(1, 40)
    other = toys.llama().over(toys.network(seed=9))
    old, new = loop.answer(prompt), toys.Loop(other).answer(prompt)
    assert old != new
    running = loop.ask(prompt)
    while not running.ids:
        loop.step()
    fresh = loop.runner.fit(trees.flatten(other.source.params))
    sizes = []
    thread = threading.Thread(
        target=lambda: sizes.append(loop.engine.replace_parameters(lambda: loop.runner.replace(fresh)))
    )
    thread.start()
    while loop.engine._replacement is None:
        pass
    waiting = loop.ask(prompt)
    loop.run()
    thread.join()
    assert (running.ids, waiting.ids, waiting.sequence.reused) == (old, new, 0)
    assert sizes == [loop.runner.parameter_bytes]


def test_events_count_what_happened(loop):
    events = []
    with listening(events.append):
        loop.answer(prompt := toys.prompt(1, 40), max_tokens=10)
        loop.answer(prompt, max_tokens=10)
    bursts = [event for event in events if isinstance(event, BurstDone)]
    assert sum(event.tokens for event in bursts) == 20
    assert sum(len(event.firsts) for event in bursts) == 2
    assert sum(len(event.firsts) for event in bursts) + sum(n for event in bursts for _, n in event.gaps) <= 20
    prompts = [event for event in events if isinstance(event, PromptDone)]
    assert [(event.tokens, event.reused) for event in prompts] == [(40, 0), (40, 39)]
    done = [event for event in events if isinstance(event, SequenceDone)]
    assert [(event.status, event.prompt, event.tokens) for event in done] == [("length", 40, 10)] * 2
    for event in done:
        assert event.came <= event.admitted <= event.prefilled <= event.first <= event.last <= event.over


def test_a_sign_of_life(loop, monkeypatch):
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert loop.engine.status.silent == 0
    now[0] = 500.0
    loop.ask([1])
    assert loop.engine.status.silent == 0, "it was idle until now"
    now[0] = 530.0
    assert loop.engine.status.silent == 30.0
    loop.step()
    assert loop.engine.status.silent == 0
