"""BentoML, with its adaptive batching. `bentoml serve` imports this file; run as a script it starts that."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    import arguments

    options = arguments.parse()
    os.environ["NETWORK"] = json.dumps([options.model, options.parameters, options.warm])
    os.chdir(Path(__file__).parent)
    serve = ["-m", "bentoml", "serve", "bentoml_server:Network", "--host", "127.0.0.1", "--port", str(options.port)]
    os.execv(sys.executable, [sys.executable, *serve])

import bentoml

from network import Jitted

MODEL, PARAMETERS, WARM = json.loads(os.environ["NETWORK"])
LARGEST = {"mlp": 64, "encoder": 16}[MODEL]


@bentoml.service(workers=1, traffic={"timeout": 120, "max_concurrency": 1024}, logging={"access": {"enabled": False}})
class Network:
    def __init__(self) -> None:
        self.network = Jitted(MODEL, PARAMETERS)
        if WARM:
            self.network.warm(MODEL, LARGEST)

    if MODEL == "mlp":

        @bentoml.api(batchable=True, max_batch_size=LARGEST, max_latency_ms=60000)
        def predict(self, x: np.ndarray) -> np.ndarray:
            return self.network.mlp(x.astype(np.float32))

    else:

        @bentoml.api(batchable=True, max_batch_size=LARGEST, max_latency_ms=60000)
        def predict(self, tokens: list[list[int]]) -> list[Any]:
            return self.network.encoder(tokens).tolist()
