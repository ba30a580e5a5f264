"""PyTriton: the Triton server, which batches, with the Python function called in this process."""

import arguments
import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from network import Jitted

LARGEST = {"mlp": 64, "encoder": 16}

options = arguments.parse()
network = Jitted(options.model, options.parameters)
if options.warm:
    network.warm(options.model, LARGEST[options.model])


@batch
def mlp(x: np.ndarray) -> dict[str, np.ndarray]:
    return {"output": network.mlp(x)}


@batch
def encoder(tokens: np.ndarray) -> dict[str, np.ndarray]:
    return {"output": network.encoder(list(tokens))}


if options.model == "mlp":
    function, given, size = mlp, Tensor(name="x", dtype=np.float32, shape=(784,)), 10
else:
    function, given, size = encoder, Tensor(name="tokens", dtype=np.int32, shape=(-1,)), 256

config = TritonConfig(
    http_address="127.0.0.1",
    http_port=options.port,
    grpc_address="127.0.0.1",
    grpc_port=options.grpc_port,
    allow_metrics=False,
    log_verbose=0,
)
with Triton(config=config) as triton:
    triton.bind(
        model_name=options.model,
        infer_func=function,
        inputs=[given],
        outputs=[Tensor(name="output", dtype=np.float32, shape=(size,))],
        config=ModelConfig(
            max_batch_size=LARGEST[options.model], batcher=DynamicBatcher(max_queue_delay_microseconds=500)
        ),
        strict=False,
    )
    triton.serve()
