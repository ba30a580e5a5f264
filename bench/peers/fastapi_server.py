"""FastAPI and `jax.jit`, one request at a time: what one writes first."""

import arguments
import numpy as np
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from network import Jitted

options = arguments.parse()
network = Jitted(options.model, options.parameters)
if options.warm:
    network.warm(options.model, 8 if options.model == "encoder" else 1)
app = FastAPI()


class Images(BaseModel):
    x: list[list[float]]


class Texts(BaseModel):
    tokens: list[list[int]]


@app.get("/health")
def health() -> dict[str, bool]:
    return {"ready": True}


if options.model == "mlp":

    @app.post("/predict")
    def predict(request: Images) -> dict[str, list[list[float]]]:
        return {"output": network.mlp(np.array(request.x, np.float32)).tolist()}

else:

    @app.post("/predict")
    def predict(request: Texts) -> dict[str, list[list[float]]]:
        return {"output": network.encoder(request.tokens).tolist()}


uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)
