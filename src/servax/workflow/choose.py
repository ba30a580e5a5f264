"""Which wrapper for which deployment: the choice, why, and what stands in its way on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from servax.core.device import platform_of
from servax.core.errors import UsageError
from servax.targets.bundle import Bundle, is_bundle
from servax.targets.manifest import TargetName
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
    target, use, reason = _DEPLOYMENTS[deployment]
    manifest = bundle.manifest
    obstacles: list[str] = []
    root = str(bundle.root)
    command = f"servax serve {root} --require {target}"
    if target == "jit":
        if target not in manifest.targets:
            obstacles.append("the bundle has no jit part; build with -t jit from a model in a file")
        elif manifest.provenance.source is None:
            obstacles.append("the model was defined in a notebook; put it into a file and build again")
        command = f"servax serve {root} --require jit --model {manifest.provenance.source or 'MODEL.py:NAME'}"
    elif target == "aot":
        obstacles += _aot_obstacles(bundle)
    elif target == "export":
        obstacles += _export_obstacles(bundle)
    else:
        command = f"servax build --from {root} -t saved_model"
        if manifest.saved_model is not None:
            command = f"cp -r {root}/saved_model MODELS/{manifest.name}/1"
        obstacles += _tensorflow_obstacles(bundle)
    notes = _notes(target, tuple(name for name, record in manifest.functions.items() if record.stateful))
    return Choice(deployment, target, use, reason, tuple(obstacles), notes, command)


def _aot_obstacles(bundle: Bundle) -> list[str]:
    from servax.stages import fingerprint

    if not bundle.manifest.executables:
        return [f"the bundle has no executables; run servax compile {bundle.root} here"]
    here = fingerprint.current([pick_device()])
    known = [fingerprint.Fingerprint(record.fields) for record in bundle.manifest.fingerprints]
    if any(each.id == here.id for each in known):
        return []
    fewest = min((fingerprint.differences(each, here) for each in known), key=len)
    fields = ", ".join(f"{field}: {theirs} in the bundle, {ours} here" for field, theirs, ours in fewest)
    return [f"executables are for another machine ({fields}); run servax compile {bundle.root} here"]


def _export_obstacles(bundle: Bundle) -> list[str]:
    manifest = bundle.manifest
    if not manifest.programs:
        return ["the bundle has no exports (built with --no-fallback); build with -t export"]
    here = platform_of(pick_device())
    if here not in manifest.platforms:
        return [f"exported for {', '.join(manifest.platforms)}, not for {here}; build with --platform {here}"]
    return []


def _tensorflow_obstacles(bundle: Bundle) -> list[str]:
    manifest = bundle.manifest
    obstacles: list[str] = []
    if importlib.util.find_spec("tensorflow") is None:
        obstacles.append("TensorFlow is not installed here; pip install 'servax[tensorflow]', or build it elsewhere")
    elif manifest.saved_model is not None:
        installed = importlib.metadata.version("tensorflow-cpu" if _has("tensorflow-cpu") else "tensorflow")
        if installed.split(".")[:2] != manifest.saved_model.tensorflow.split(".")[:2]:
            obstacles.append(
                f"made for TensorFlow {manifest.saved_model.tensorflow}, {installed} is installed; "
                f"servax build --from {bundle.root} -t saved_model --tensorflow {installed}"
            )
    stateful = [name for name, record in manifest.functions.items() if record.stateful]
    if stateful:
        obstacles.append(f"stateful functions stay out of a SavedModel: {', '.join(stateful)}")
    return obstacles


def _for_model(reference: str, deployment: str) -> Choice:
    from servax.model.reference import load_model

    target, use, reason = _DEPLOYMENTS[deployment]
    model = load_model(reference)
    stateful = tuple(name for name, function in model.functions.items() if function.state is not None)
    obstacles: list[str] = []
    if target == "saved_model":
        if importlib.util.find_spec("tensorflow") is None:
            obstacles.append("TensorFlow is not installed here; pip install 'servax[tensorflow]'")
        if stateful:
            obstacles.append(f"stateful functions stay out of a SavedModel: {', '.join(stateful)}")
    flags = " --platform cpu --platform cuda" if target == "export" else ""
    command = f"servax build {reference} --checkpoint CHECKPOINT -t {target}{flags} -o {model.name}.bundle"
    if target == "jit":
        command = f"servax serve {reference} --checkpoint CHECKPOINT"
    return Choice(deployment, target, use, reason, tuple(obstacles), _notes(target, stateful), command)


def _notes(target: TargetName, stateful: Sequence[str]) -> tuple[str, ...]:
    if target == "saved_model":
        return (
            "XLA is off in TensorFlow Serving unless it runs with --xla_cpu_compilation_enabled; its GPU build "
            "reports no compiler for CUDA (tensorflow/serving#2214)",
            "tensors only: a tokenizer stays outside",
        )
    if target == "aot":
        return ("an executable runs on the exact machine it was compiled for; elsewhere the exports take over",)
    if target == "export":
        return ("jax.export promises six months: see the expiry in servax inspect",)
    return (f"stateful: {', '.join(stateful)}",) if stateful else ()


def _has(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
