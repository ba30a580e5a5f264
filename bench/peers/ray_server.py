"""Ray Serve, with its batching."""

import signal

import arguments
import numpy as np
import ray
from ray import serve
from starlette.requests import Request

from network import Jitted

LARGEST = {"mlp": 64, "encoder": 16}
options = arguments.parse()


@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0})
class Network:
    def __init__(self, model: str, parameters: str, warm: bool) -> None:
        self.model = model
        self.network = Jitted(model, parameters)
        if warm:
            self.network.warm(model, LARGEST[model])

    @serve.batch(max_batch_size=LARGEST[options.model], batch_wait_timeout_s=0.002)
    async def batched(self, requests: list[list]) -> list[np.ndarray]:
        rows = [row for rows in requests for row in rows]
        run = self.network.mlp if self.model == "mlp" else self.network.encoder
        output = run(np.array(rows, np.float32) if self.model == "mlp" else rows)
        return np.split(output, np.cumsum([len(rows) for rows in requests])[:-1])

    async def __call__(self, request: Request) -> dict:
        if request.method == "GET":
            return {"ready": True}
        body = await request.json()
        output = await self.batched(body["x" if self.model == "mlp" else "tokens"])
        return {"output": output.tolist()}


if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": options.port}, logging_config={"enable_access_log": False})
    serve.run(
        Network.bind(options.model, options.parameters, options.warm),
        route_prefix="/predict",
        logging_config={"enable_access_log": False},
    )
    signal.sigwait({signal.SIGTERM})
    serve.shutdown()
    ray.shutdown()
