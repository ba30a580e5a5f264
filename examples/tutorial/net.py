"""The tutorial's model, as every verb of servax takes it: `net.py:model`."""

from flax import nnx

import servax
from servax.zoo.gpt import GPT, GPTConfig

CONFIG = GPTConfig(context=128, width=128, layers=4, heads=4)


def network() -> GPT:
    """The network, its weights random."""
    return GPT(CONFIG, rngs=nnx.Rngs(0))


model = servax.Model(
    network,
    name="gpt",
    inputs={"tokens": "int32[batch, length]"},
    buckets={"batch": [1, 4], "length": [32, 64, 128]},
    pad={"tokens": 0},
)
