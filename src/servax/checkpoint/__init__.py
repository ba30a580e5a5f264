"""From bytes on storage to a tree of parameters on the device: Orbax, safetensors and GGUF, local or behind a URL.

`restore` brings the selected subtree onto a device, `save` writes one.
"""

from typing import TYPE_CHECKING

from servax.core.lazy import exports

if TYPE_CHECKING:
    from servax.checkpoint.restoring import Provenance, Restored, restore
    from servax.checkpoint.saving import save
    from servax.checkpoint.steps import Step, parse_step

__all__ = ["Provenance", "Restored", "Step", "parse_step", "restore", "save"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "Provenance": "restoring",
        "Restored": "restoring",
        "Step": "steps",
        "parse_step": "steps",
        "restore": "restoring",
        "save": "saving",
    },
)
