"""Ready-made models, written as any user of servax would write them: `minilm`, and the tutorial's `gpt`.

Import the module you want (`from servax.zoo import minilm`); each brings in Flax.
"""
