"""servax: from a trained JAX model and its Orbax checkpoint to production, with no compilation left for a request.

```python
model = servax.Model(lambda: Net(cfg, rngs=nnx.Rngs(0)), inputs={"tokens": "int32[batch, length]"},
                     buckets={"batch": [1, 8], "length": [32, 128]})
bundle = servax.build(model, checkpoint="runs/gpt", targets=["aot", "export", "saved_model"], output="net.bundle")
servable = servax.load("net.bundle", require="aot")
servable.predict(tokens=ids)["output"]
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from servax.core.lazy import exports

if TYPE_CHECKING:
    from servax.api.load import load as load
    from servax.api.serve import serve as serve
    from servax.core.errors import ServaxError as ServaxError
    from servax.generation.params import SamplingParams as SamplingParams
    from servax.model.language import LanguageModel as LanguageModel
    from servax.model.model import Model as Model
    from servax.model.processors import Text as Text
    from servax.targets.bundle import Bundle as Bundle
    from servax.workflow.build import build as build
    from servax.workflow.refresh import refresh as refresh

__version__ = "0.1.0"

__getattr__, __dir__ = exports(
    __name__,
    {
        "Bundle": "targets.bundle",
        "LanguageModel": "model.language",
        "Model": "model.model",
        "SamplingParams": "generation.params",
        "ServaxError": "core.errors",
        "Text": "model.processors",
        "build": "workflow.build",
        "load": "api.load",
        "refresh": "workflow.refresh",
        "serve": "api.serve",
    },
)
