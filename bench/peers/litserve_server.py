"""LitServe, with its batching."""

import arguments
import litserve as ls
import numpy as np

from network import Jitted

LARGEST = {"mlp": 64, "encoder": 16}


class Network(ls.LitAPI):
    def __init__(self, model: str, parameters: str, warm: bool) -> None:
        super().__init__(max_batch_size=LARGEST[model], batch_timeout=0.002)
        self.model = model
        self.parameters = parameters
        self.warmed = warm

    def setup(self, device: str) -> None:
        self.network = Jitted(self.model, self.parameters)
        if self.warmed:
            self.network.warm(self.model, LARGEST[self.model])

    def decode_request(self, request: dict) -> list:
        return request["x" if self.model == "mlp" else "tokens"]

    def batch(self, inputs: list) -> tuple[list, list[int]]:
        return [row for rows in inputs for row in rows], [len(rows) for rows in inputs]

    def predict(self, batch: tuple[list, list[int]]) -> list[np.ndarray]:
        rows, counts = batch
        run = self.network.mlp if self.model == "mlp" else self.network.encoder
        output = run(np.array(rows, np.float32) if self.model == "mlp" else rows)
        return np.split(output, np.cumsum(counts)[:-1])

    def unbatch(self, output: list[np.ndarray]) -> list[np.ndarray]:
        return output

    def encode_response(self, output: np.ndarray) -> dict:
        return {"output": output.tolist()}


if __name__ == "__main__":
    options = arguments.parse()
    api = Network(options.model, options.parameters, options.warm)
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=120)
    server.run(
        host="127.0.0.1",
        port=options.port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
