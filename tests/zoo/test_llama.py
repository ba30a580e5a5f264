import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from servax.checkpoint.quantized import quantize
from servax.zoo.llama import BLOCK, Llama, LlamaConfig, RopeScaling, attend, product, quantized_product, rotation

CONFIG = LlamaConfig(
    vocabulary=48,
    width=32,
    layers=2,
    heads=4,
    key_value_heads=2,
    head_size=8,
    feed_forward=48,
    context=256,
    cache_dtype="float32",
)


def test_llama_3_s_scaling_slows_low_frequencies_and_keeps_high_ones() -> None:
    # Of a head of 4 at base 10,000 the frequencies are 1 and 0.01, the waves 2 pi and 628.3 positions long. Of a first
    # context of 100: waves under 100 / 4 = 25 are kept, those over 100 / 1 = 100 are slowed 8 times.
    config = dataclasses.replace(CONFIG, head_size=4, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 100))
    cosine, sine = rotation(config, jnp.array([3]))
    np.testing.assert_allclose(cosine[0], [math.cos(3), math.cos(3 * 0.01 / 8)], rtol=1e-6)
    np.testing.assert_allclose(sine[0], [math.sin(3), math.sin(3 * 0.01 / 8)], rtol=1e-5)


def test_between_the_two_llama_3_s_scaling_blends() -> None:
    # A first context of 1,256.637 = 400 pi is 2 waves of 200 pi: half way, (2 - 1) / (3 - 1), from slowed to kept.
    config = dataclasses.replace(CONFIG, head_size=4, rope_scaling=RopeScaling(8.0, 1.0, 3.0, 1257))
    share = (1257 / (200 * math.pi) - 1) / 2
    angle = 5 * 0.01 * (share + (1 - share) / 8)
    np.testing.assert_allclose(rotation(config, jnp.array([5]))[1][0, 1], math.sin(angle), rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_product_in_bfloat16_is_summed_in_float32(rows: int) -> None:
    stream = np.random.default_rng(0)
    left = jnp.asarray(stream.normal(size=(rows, 300)), jnp.bfloat16)
    right = jnp.asarray(stream.normal(size=(7, 300)), jnp.bfloat16)
    exact = np.asarray(left, np.float64) @ np.asarray(right, np.float64).T
    found = product(left, right)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-4)


def test_a_product_of_8_bits_by_hand() -> None:
    # The row [1, -0.5, 0.25] has a step of 1/127: 127, -63.5 -> -64, 31.75 -> 32.
    left = jnp.array([[1.0, -0.5, 0.25]])
    right = jnp.array([[1, 2, 3], [-4, 5, 6]], jnp.int8)
    scale = jnp.array([0.5, 0.1])
    expected = [(127 - 128 + 96) / 127 * 0.5, (-508 - 320 + 192) / 127 * 0.1]
    np.testing.assert_allclose(quantized_product(left, right, scale)[0], expected, rtol=1e-6)


def test_rows_of_zeros_give_zeros_in_8_bits() -> None:
    assert not np.any(quantized_product(jnp.zeros((2, 4)), jnp.ones((3, 4), jnp.int8), jnp.ones(3)))


def test_8_bits_come_within_a_hundredth_of_the_product() -> None:
    stream = np.random.default_rng(0)
    left, right = stream.normal(size=(8, 512)).astype(np.float32), stream.normal(size=(64, 512)).astype(np.float32)
    found = quantized_product(jnp.asarray(left), *map(jnp.asarray, quantize(right)))
    exact = left @ right.T
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.02


@pytest.mark.parametrize("batch", [1, 3])
def test_attention_to_a_cache_is_softmax_over_what_each_row_sees(batch: int) -> None:
    stream = np.random.default_rng(1)
    slots, groups, heads, size, length = 4, 2, 6, 8, 3 * BLOCK
    keys, values = (stream.normal(size=(slots, groups, length, size)).astype(np.float32) for _ in range(2))
    query = stream.normal(size=(batch, 1, heads, size)).astype(np.float32)
    positions = np.array([5, BLOCK - 1, 2 * BLOCK + 3][:batch])
    blocks = positions.max() // BLOCK + 1
    found = attend(jnp.asarray(query), keys, values, jnp.asarray(positions)[:, None], jnp.int32(blocks))
    for row in range(batch):
        seen = positions[row] + 1
        for head in range(heads):
            scores = keys[row, head // 3, :seen] @ query[row, 0, head] / np.sqrt(size)
            shares = np.exp(scores - scores.max())
            expected = shares / shares.sum() @ values[row, head // 3, :seen]
            np.testing.assert_allclose(found[row, 0, head * size : (head + 1) * size], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", ["tied", "untied", "qwen2", "qwen3", "int8"])
def test_prefill_and_decode_give_the_plain_call_s_logits(variant: str) -> None:
    config = dataclasses.replace(
        CONFIG,
        tied=variant == "tied",
        attention_bias=variant == "qwen2",
        query_key_norm=variant == "qwen3",
        weights="int8" if variant == "int8" else "float",
    )
    net = Llama(config, rngs=nnx.Rngs(0))
    if variant == "qwen2":
        for block in net.blocks:
            for each in (block.attention.query, block.attention.key, block.attention.value):
                each.bias[...] = jax.random.normal(jax.random.key(1), each.bias.shape)
    tokens = np.random.default_rng(2).integers(0, 48, 21)
    expected = np.asarray(net(tokens[None].astype(np.int32))[0])
    cache = {
        name: jnp.zeros([int(size) for size in spec[spec.index("[") + 1 : -1].split(",")], jnp.float32)
        for name, spec in net.cache(3, 64).items()
    }
    for start in (0, 8):
        cache = net.prefill(cache, jnp.asarray(tokens[start : start + 8], jnp.int32), jnp.int32(1), jnp.int32(start))
    for at in (16, 17, 18):
        every = jnp.array([0, tokens[at]], jnp.int32)
        cache, logits = net.decode(cache, every, jnp.array([0, at]), jnp.array([False, True]))
        # In 8 bits a rounding before a value's step may decide the step.
        close = 0.05 * np.abs(expected).max() if variant == "int8" else 2e-5
        np.testing.assert_allclose(logits[1], expected[at], rtol=0, atol=close)
    assert not np.any(cache["key00"][0])
