"""Against NumPy's arithmetic in float64, written from the papers and the API's documents, not from the source."""

import jax
import numpy as np
import pytest

from servax.model.sampling import ROW_INPUTS, STOPS, TOP, Rows, draw, noise

VOCABULARY = 300
DEFAULTS = {"top_p": 1.0, "repetition": 1.0}


def threefry(key, counter):
    """Threefry 2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""
    mask = 0xFFFFFFFF
    keys = [int(key[0]), int(key[1]), int(key[0]) ^ int(key[1]) ^ 0x1BD11BDA]
    x0, x1 = (int(counter[0]) + keys[0]) & mask, (int(counter[1]) + keys[1]) & mask
    rotations = [[13, 15, 26, 6], [17, 29, 16, 24]]
    for group in range(5):
        for turn in rotations[group % 2]:
            x0 = (x0 + x1) & mask
            x1 = ((x1 << turn | x1 >> (32 - turn)) & mask) ^ x0
        x0 = (x0 + keys[(group + 1) % 3]) & mask
        x1 = (x1 + keys[(group + 2) % 3] + group + 1) & mask
    return x0, x1


def gumbel(seed, position, token):
    bits, _ = threefry((seed, position), (token, ~token & 0xFFFFFFFF))
    return -np.log(-np.log((bits >> 8) * 2.0**-24 + 2.0**-25))


def rows_of(batch, **given):
    """Rows with everything off but what is given, each a value or one a row."""
    values = {
        name: np.full(batch, DEFAULTS.get(name, 0), dtype if dtype != "bool" else bool)
        for name, dtype in ROW_INPUTS.items()
    }
    values |= {
        "stops": np.full((batch, STOPS), -1, np.int32),
        "forced": np.full(batch, -1, np.int32),
        "mask": np.zeros((batch, -(-VOCABULARY // 32)), np.uint32),
        "bias": np.zeros((batch, VOCABULARY), np.float32),
        "counts": np.zeros((batch, VOCABULARY), np.int32),
        "positions": np.arange(batch, dtype=np.int32),
    }
    for name, value in given.items():
        values[name] = np.broadcast_to(np.asarray(value, values[name].dtype), values[name].shape)
    return Rows(**values)


def expected(logits, rows, row):
    """Every token's score with its noise, minus infinity for those that may not be drawn, in float64."""
    scores = logits[row].astype(np.float64)
    times = rows.counts[row] >> 1
    seen = rows.counts[row] > 0
    repetition = float(rows.repetition[row])
    scores = np.where(seen, np.where(scores > 0, scores / repetition, scores * repetition), scores)
    scores = scores - rows.frequency[row] * times - rows.presence[row] * (times > 0)
    if rows.positions[row] < rows.minimum[row]:
        for stop in rows.stops[row]:
            if stop >= 0:
                scores[stop] = -np.inf
    if rows.biased[row]:
        scores = scores + rows.bias[row]
    if rows.constrained[row]:
        allowed = [(int(rows.mask[row][token // 32]) >> token % 32) & 1 for token in range(len(scores))]
        scores = np.where(allowed, scores, -np.inf)
    if rows.temperature[row] <= 0:
        return scores
    scores = scores / float(rows.temperature[row])
    probabilities = np.exp(scores - scores.max())
    order = np.argsort(-probabilities, kind="stable")
    kept = np.ones(len(scores), bool)
    if rows.top_k[row] > 0:
        kept[order[rows.top_k[row] :]] = False
    if rows.top_p[row] < 1:
        inside = np.where(kept, probabilities, 0)[order]
        before = np.cumsum(inside) - inside
        kept[order[before >= float(rows.top_p[row]) * inside.sum()]] = False
    kept &= probabilities >= rows.min_p[row]
    perturbed = [gumbel(int(rows.seeds[row]), int(rows.positions[row]), token) for token in range(len(scores))]
    return np.where(kept, scores + np.array(perturbed), -np.inf)


def logits_of(batch, spread=2.5, seed=0):
    return (np.random.default_rng(seed).normal(size=(batch, VOCABULARY)) * spread).astype(np.float32)


@pytest.fixture(scope="module")
def drawn():
    return jax.jit(draw)


def agree(drawn, logits, rows):
    tokens = np.asarray(drawn(logits, rows).tokens)
    for row, token in enumerate(tokens.tolist()):
        scores = expected(logits, rows, row)
        best = int(np.argmax(scores))
        # A different token only where rounding in float32 may decide.
        assert token == best or scores[best] - scores[token] < 1e-3 * max(1.0, abs(scores[best])), (row, token, best)
    return tokens


def test_threefry_is_that_of_its_authors():
    """The known answers that Random123 comes with."""
    assert threefry((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    assert threefry((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF)) == (0x1CB996FC, 0xBB002BE7)
    assert threefry((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)) == (0xC4923A9C, 0x483DF7A0)


def test_noise_is_gumbels_of_seed_position_and_token():
    seeds, positions = np.array([7, 4_000_000_000], np.uint32), np.array([3, 2000], np.int32)
    tokens = np.array([[0, 5, 299], [49151, 1, 7]], np.int32)
    found = np.asarray(jax.jit(noise)(seeds, positions, tokens))
    right = [
        [gumbel(int(seed), int(position), int(token)) for token in row]
        for seed, position, row in zip(seeds, positions, tokens, strict=True)
    ]
    np.testing.assert_allclose(found, right, rtol=1e-5)


def test_noise_is_the_same_to_the_bit_whatever_is_beside_it():
    run = jax.jit(noise)
    ids = np.broadcast_to(np.arange(5000, dtype=np.int32), (16, 5000))
    whole = np.asarray(run(np.arange(16, dtype=np.uint32), np.arange(16, dtype=np.int32), ids))
    for batch, count in ((1, 64), (3, 7), (16, 64), (5, 5000)):
        part = run(np.arange(batch, dtype=np.uint32), np.arange(batch, dtype=np.int32), ids[:batch, :count])
        np.testing.assert_array_equal(part, whole[:batch, :count])


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.0, "top_k": 64},
        {"temperature": 1.5, "top_k": 65},
        {"temperature": 2.0, "top_k": 100, "top_p": 0.9},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 5.0, "top_p": 0.95},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 8.0, "min_p": 0.3, "top_p": 0.99},
        {"temperature": 3.0, "top_k": 200, "top_p": 0.97, "min_p": 0.01},
        {"temperature": 1e-6},
        {"temperature": 1e-30},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "top_k": 100_000, "top_p": 0.5},
        {"temperature": [0.0, 1.0] * 32, "top_k": [0, 3, 0, 80] * 16, "top_p": [1.0, 0.9, 0.5, 0.95] * 16},
    ],
    ids=str,
)
def test_the_token_is_the_likeliest_with_its_noise_among_those_that_may_be_drawn(drawn, given):
    batch = 64
    agree(drawn, logits_of(batch), rows_of(batch, seeds=np.arange(batch) * 977, **given))


def test_penalties(drawn):
    batch = 48
    counts = np.random.default_rng(1).integers(0, 7, (batch, VOCABULARY))
    for temperature in (0.0, 1.0):
        rows = rows_of(
            batch,
            temperature=temperature,
            presence=np.linspace(-2, 2, batch),
            frequency=np.linspace(2, -2, batch),
            repetition=np.linspace(0.5, 1.9, batch),
            counts=counts,
            seeds=np.arange(batch),
        )
        agree(drawn, logits_of(batch), rows)


def test_bias_also_where_it_leaves_one_token(drawn):
    bias = np.full((2, VOCABULARY), -1e30)
    bias[:, 77] = 0
    for temperature in (0.0, 1.0, 1e-6):
        rows = rows_of(2, temperature=temperature, biased=[True, False], bias=bias)
        tokens = agree(drawn, logits_of(2), rows)
        assert tokens[0] == 77


def test_a_mask_leaves_what_it_allows(drawn):
    allowed = np.zeros((3, 320), bool)
    allowed[0, [5, 31, 32, 299]] = True
    allowed[1, 64] = True
    mask = np.packbits(allowed, axis=1, bitorder="little").view("<u4")
    rows = rows_of(3, temperature=1.0, constrained=[True, True, False], mask=mask, seeds=[3, 4, 5])
    tokens = agree(drawn, logits_of(3), rows)
    assert tokens[0] in (5, 31, 32, 299)
    assert tokens[1] == 64


def test_what_ends_a_row_is_not_drawn_before_its_minimum(drawn):
    logits = np.zeros((3, VOCABULARY), np.float32)
    logits[:, 9], logits[:, 10], logits[:, 11] = 30, 20, 10
    stops = np.full((3, STOPS), -1)
    stops[:, 0], stops[:, 3] = 9, 10
    rows = rows_of(3, stops=stops, minimum=[5, 5, 5], positions=[4, 5, 6])
    assert agree(drawn, logits, rows).tolist() == [11, 9, 9]


def test_probabilities_are_those_asked_for(drawn):
    """Tokens of 8,192 seeds against the softmax of the temperature, top-k and top-p: chi-squared, 5 sigma."""
    batch = 8192
    logits = np.zeros((batch, VOCABULARY), np.float32) - 40
    logits[:, :6] = [2.0, 1.5, 1.0, 0.0, -1.0, -4.0]
    for given, kept in (({}, 6), ({"top_k": 3}, 3), ({"top_p": 0.95}, 4), ({"min_p": 0.3}, 3)):
        rows = rows_of(batch, temperature=1.0, seeds=np.arange(batch), positions=np.arange(batch) % 17, **given)
        weights = np.exp(logits[0, :kept].astype(np.float64))
        wanted = batch * weights / weights.sum()
        found = np.bincount(np.asarray(drawn(logits, rows).tokens), minlength=VOCABULARY)
        assert found[kept:].sum() == 0
        statistic = ((found[:kept] - wanted) ** 2 / wanted).sum()
        assert statistic < (kept - 1) + 5 * np.sqrt(2 * (kept - 1)), (given, found[:6], wanted)


def test_log_probabilities_are_the_models_own(drawn):
    """Whatever the parameters change, and for whichever token is taken."""
    logits = logits_of(4)
    right = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    rows = rows_of(4, temperature=0.5, ranked=[True, False, True, True], forced=[-1, -1, -1, 12], top_k=3)
    found = drawn(logits, rows)
    tokens = np.asarray(found.tokens)
    assert tokens[3] == 12
    np.testing.assert_allclose(found.logprobs, right[np.arange(4), tokens], rtol=1e-5)
    order = np.argsort(-right, axis=1)[:, :TOP]
    for row in (0, 2):
        np.testing.assert_array_equal(found.top_tokens[row], order[row])
        np.testing.assert_allclose(found.top_logprobs[row], right[row, order[row]], rtol=1e-5)
    assert not np.asarray(found.top_tokens)[[1, 3]].any()


def test_a_row_does_not_depend_on_what_is_beside_it(drawn):
    """The plainest row alone, and among rows that take every other path."""
    logits = logits_of(16)
    mixed = rows_of(
        16,
        temperature=[1.0, 0.0, 2.0, 9.0] * 4,
        top_k=[0, 0, 5, 90] * 4,
        top_p=[1, 1, 1, 0.99] * 4,
        presence=[0, 1, 0, 0] * 4,
        seeds=np.arange(16),
    )
    together = np.asarray(drawn(logits, mixed).tokens)
    for row in range(16):
        alone = Rows(*(np.asarray(field)[row : row + 1] for field in mixed))
        assert np.asarray(drawn(logits[row : row + 1], alone).tokens)[0] == together[row]
