"""Which wrapper for which deployment: the choice, why, and what stands in its way on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from servax.core.errors import UsageError
from servax.targets.bundle import Bundle, is_bundle
from servax.targets.manifest import TargetName
from servax.targets.savedmodel import STATEFUL, copy_command
from servax.targets.savedmodel_tensorflow import installed_tensorflow
from servax.targets.table import target
from servax.workflow.device import pick_device

_DEPLOYMENTS: dict[str, tuple[TargetName, str, str]] = {
    "python": (
        "jit",
        "a Python service of your own, or a notebook",
        "the model's source is there anyway; every bucket is traced, lowered and compiled before ready, "
        "and the persistent cache makes the next start fast",
    ),
    "startup": (
        "aot",
        "a server with predictable start-up",
        "executables are loaded, nothing is traced, lowered or compiled; needs neither Flax nor the source",
    ),
    "platform": (
        "export",
        "another platform, or a reader years from now",
        "StableHLO is portable: one artifact runs on cpu, cuda and tpu; it compiles at start, without tracing",
    ),
    "tensorflow": (
        "saved_model",
        "TensorFlow Serving, or a TensorFlow program",
        "a standard SavedModel with native serialization; TensorFlow compiles it",
    ),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One deployment and its wrapper.

    Attributes:
      deployment: `python`, `startup`, `platform` or `tensorflow`.
      target: the wrapper.
      use: what the deployment is, in words.
      reason: why this wrapper.
      obstacles: what stands in the way here, each with its remedy; empty when it works as it is.
      notes: what to know beforehand.
      command: what to type next.
    """

    deployment: str
    target: TargetName
    use: str
    reason: str
    obstacles: tuple[str, ...]
    notes: tuple[str, ...]
    command: str

    def as_json(self) -> dict[str, Any]:
        """The choice as JSON values."""
        return asdict(self)


def choose(subject: str, deployment: str | None = None) -> list[Choice]:
    """The wrapper for one deployment, or for all four.

    Args:
      subject: path of a bundle, or `MODEL.py:NAME`.
      deployment: `python`, `startup`, `platform`, `tensorflow`; None: all.

    Raises:
      UsageError: no such deployment.
      BundleError, ModelError: the subject cannot be read.
    """
    if deployment is not None and deployment not in _DEPLOYMENTS:
        raise UsageError("no such deployment", seen=deployment, expected=", ".join(_DEPLOYMENTS))
    wanted = list(_DEPLOYMENTS) if deployment is None else [deployment]
    if is_bundle(subject):
        bundle = Bundle.open(subject)
        return [_for_bundle(bundle, name) for name in wanted]
    return [_for_model(subject, name) for name in wanted]


def text(choices: Sequence[Choice]) -> str:
    """The choices for people: a paragraph each."""
    paragraphs: list[str] = []
    for choice in choices:
        lines = [f"{choice.use}: {choice.target}", f"  why:         {choice.reason}"]
        lines += [f"  in the way:  {obstacle}" for obstacle in choice.obstacles] or [
            "  in the way:  nothing on this machine"
        ]
        lines += [f"  note:        {note}" for note in choice.notes]
        lines += [f"  next:        {choice.command}"]
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def _for_bundle(bundle: Bundle, deployment: str) -> Choice:
    name, use, reason = _DEPLOYMENTS[deployment]
    manifest = bundle.manifest
    notes = _notes(name, tuple(each for each, record in manifest.functions.items() if record.stateful))
    command = _command(bundle, name)
    return Choice(deployment, name, use, reason, target(name).obstacles(bundle, pick_device()), notes, command)


def _command(bundle: Bundle, name: TargetName) -> str:
    root = str(bundle.root)
    if name != "saved_model":
        serve = f"servax serve {shlex.quote(root)} --require {name}"
        source = bundle.manifest.provenance.source or "MODEL.py:NAME"
        return f"{serve} --model {source}" if name == "jit" else serve
    if bundle.manifest.saved_model is None:
        return f"servax build --from {shlex.quote(root)} -t saved_model"
    return copy_command(root, bundle.manifest.name)


def _for_model(reference: str, deployment: str) -> Choice:
    from servax.model.reference import load_model

    name, use, reason = _DEPLOYMENTS[deployment]
    model = load_model(reference)
    stateful = tuple(each for each, function in model.functions.items() if function.state is not None)
    obstacles: list[str] = []
    if name == "saved_model":
        if installed_tensorflow() is None:
            obstacles.append("TensorFlow is not installed here; pip install 'servax[tensorflow]'")
        obstacles += [f"it leaves out {each}: {STATEFUL}" for each in stateful]
    flags = " --platform cpu --platform cuda" if name == "export" else ""
    command = f"servax build {reference} --checkpoint CHECKPOINT -t {name}{flags} -o {model.name}.bundle"
    if name == "jit":
        command = f"servax serve {reference} --checkpoint CHECKPOINT"
    return Choice(deployment, name, use, reason, tuple(obstacles), _notes(name, stateful), command)


def _notes(name: TargetName, stateful: Sequence[str]) -> tuple[str, ...]:
    if name == "saved_model":
        return (
            "XLA is off in TensorFlow Serving unless it runs with --xla_cpu_compilation_enabled; its GPU build "
            "reports no compiler for CUDA (tensorflow/serving#2214)",
            "tensors only: a tokenizer stays outside",
        )
    if name == "aot":
        return ("an executable runs on the exact machine it was compiled for; elsewhere the exports take over",)
    if name == "export":
        return ("jax.export promises six months: see the expiry in servax inspect",)
    return (f"stateful: {', '.join(stateful)}",) if stateful else ()
