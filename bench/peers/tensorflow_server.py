"""TensorFlow on the SavedModel that servax writes, behind FastAPI (the binary of TF Serving is not on PyPI)."""

import arguments
import numpy as np
import tensorflow as tf
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

options = arguments.parse()
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
loaded = tf.saved_model.load(options.parameters)
function = loaded.signatures["serving_default"]
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
        return {"output": function(x=tf.constant(request.x, tf.float32))["output"].numpy().tolist()}

else:

    @app.post("/predict")
    def predict(request: Texts) -> dict[str, list[list[float]]]:
        tokens = np.array(request.tokens, np.int32)
        n = np.full(len(tokens), tokens.shape[1], np.int32)
        return {"output": function(tokens=tf.constant(tokens), n=tf.constant(n))["output"].numpy().tolist()}


uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)
