"""FastAPI and `jax.jit`, one request at a time: what one writes first.

What blocks is an ordinary function, as FastAPI advises, and runs in a thread. With --inline it runs on the event loop:
nothing else is answered meanwhile, but a network of 50 microseconds is answered sooner.
"""

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


def mlp(request: Images) -> dict[str, list[list[float]]]:
    return {"output": network.mlp(np.array(request.x, np.float32)).tolist()}


def encoder(request: Texts) -> dict[str, list[list[float]]]:
    return {"output": network.encoder(request.tokens).tolist()}


async def mlp_inline(request: Images) -> dict[str, list[list[float]]]:
    return mlp(request)


async def encoder_inline(request: Texts) -> dict[str, list[list[float]]]:
    return encoder(request)


plain = {"mlp": mlp, "encoder": encoder}
inline = {"mlp": mlp_inline, "encoder": encoder_inline}
app.post("/predict")((inline if options.inline else plain)[options.model])
uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)
