"""all-MiniLM-L6-v2 as servax takes it: `examples/minilm.py:model`. Text in, embedding out.

python examples/minilm.py minilm.checkpoint      # once: the published weights as an Orbax checkpoint
servax build examples/minilm.py:model --checkpoint minilm.checkpoint -t aot -o minilm.bundle
servax predict minilm.bundle -i text='["Cats sit on warm laptops."]'
"""

import sys

from servax.zoo import minilm

model = minilm.model

if __name__ == "__main__":
    minilm.convert(minilm.package_file("model.safetensors"), sys.argv[1])
