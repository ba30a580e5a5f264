"""KServe's SDK; it has no batching of its own."""

import arguments
from kserve import InferRequest, InferResponse, Model, ModelServer
from kserve.utils.utils import get_predict_response

from network import Jitted


class Network(Model):
    def __init__(self, model: str, parameters: str, warm: bool) -> None:
        super().__init__(model)
        self.network = Jitted(model, parameters)
        if warm:
            self.network.warm(model, 8 if model == "encoder" else 1)
        self.ready = True

    def predict(self, payload: InferRequest, headers: object = None, response_headers: object = None) -> InferResponse:
        given = payload.inputs[0].as_numpy()
        result = self.network.mlp(given) if self.name == "mlp" else self.network.encoder(list(given))
        return get_predict_response(payload, result, self.name)


options = arguments.parse()
server = ModelServer(
    http_port=options.port, grpc_port=options.grpc_port, workers=1, enable_docs_url=False, access_log_format=None
)
server.start([Network(options.model, options.parameters, options.warm)])
