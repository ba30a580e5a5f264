"""Parity, here and now: every wrapper of a bundle proved on this machine's device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from servax.core.errors import ParityError, UsageError
from servax.core.events import StepAdvanced, emit
from servax.core.events import step as named_step
from servax.stages.buckets import Bucket
from servax.targets import parity as proofs
from servax.targets.bundle import Bundle, amend
from servax.targets.manifest import TARGETS, Manifest, TargetName, VerdictRecord
from servax.targets.parity import Proof
from servax.targets.table import target
from servax.workflow.device import platform_here

PARITY = "parity.json"


def verify(
    path: str | os.PathLike[str],
    *,
    targets: Sequence[str] | None = None,
    platform: str | None = None,
    parity: str = "corners",
    model: str | None = None,
    max_precision_error: float | None = None,
) -> Bundle:
    """Proves a bundle's wrappers again on this machine and records the verdicts in it.

    `jit` imports the model's source, so it is proved only where the operator names it (contract 11): as one of
    `targets`, which trusts the reference in the bundle, or by `model`.

    Args:
      path: the bundle.
      targets: only these wrappers; None: all that the bundle has.
      platform: the device to prove on; None: JAX's default.
      parity: `corners`, or `full` for every bucket of every target.
      model: `MODEL.py:NAME`, the source for `jit`; None: the one the bundle was built from, if `jit` is in `targets`.
      max_precision_error: largest accepted difference to float32, relative to the output's scale.

    Raises:
      UsageError: a target that the bundle does not have.
      BundleError: golden samples are missing or damaged.
      PlatformError: the platform asked for is not here.
    """
    full = is_full(parity)
    bundle = Bundle.open(path)
    chosen = check_targets(targets or bundle.manifest.targets)
    if absent := [name for name in chosen if name not in bundle.manifest.targets]:
        raise UsageError(
            f"the bundle has no {', '.join(absent)}",
            where=str(bundle.root),
            expected=", ".join(bundle.manifest.targets),
        )
    if targets:
        model = model or bundle.manifest.provenance.source
    here = platform_here(platform)
    found = prove(
        bundle,
        chosen,
        (here,),
        here,
        full=full,
        max_precision_error=max_precision_error,
        unavailable="unproven",
        model=model,
    )
    return amend(bundle, {PARITY: proofs.report(found)}, lambda manifest: with_verdicts(manifest, found))


def is_full(parity: str) -> bool:
    """Whether parity covers every bucket of every target.

    Raises:
      UsageError: neither `corners` nor `full`.
    """
    if parity not in ("corners", "full"):
        raise UsageError("no such parity", seen=parity, expected="corners or full")
    return parity == "full"


def prove(
    bundle: Bundle,
    targets: Sequence[TargetName],
    platforms: Sequence[str],
    here: str,
    *,
    full: bool,
    unavailable: Literal["failed", "unproven"],
    max_precision_error: float | None = None,
    model: str | None = None,
) -> list[Proof]:
    """Every target on every platform: in a child where this machine has the platform, `unproven` elsewhere.

    A target whose part is for one machine has nothing to say of other platforms. Without `model` no source is
    imported: `jit` stays `unproven`.
    """
    plans: list[tuple[TargetName, str, Mapping[str, Sequence[Bucket]]]] = []
    for name in targets:
        wrapper = target(name)
        buckets = _with_samples(bundle, wrapper.buckets(bundle, full=full))
        for platform in platforms if wrapper.PORTABLE else (here,):
            plans.append((name, platform, buckets))
    found: list[Proof] = []
    with named_step("parity", total=len(plans)):
        for name, platform, buckets in plans:
            if platform != here:
                proof = _unproven(name, platform, buckets, f"unproven on {platform}: run servax verify there")
            elif name == "jit" and model is None:
                proof = _unproven(name, platform, buckets, "it would import the model's source: pass --model or -t jit")
            else:
                proof = proofs.prove(
                    bundle,
                    name,
                    platform,
                    buckets,
                    model=model,
                    max_precision_error=max_precision_error,
                    unavailable=unavailable,
                )
            found.append(proof)
            emit(StepAdvanced("parity", f"{name} on {platform}", sum(proof.seconds.values())))
    return found


def with_verdicts(manifest: Manifest, found: Sequence[Proof]) -> Manifest:
    """The manifest with new verdicts in place of those on the same target, platform, function and bucket."""
    verdicts = {_key(verdict): verdict for verdict in manifest.verdicts}
    verdicts |= {_key(verdict): verdict for proof in found for verdict in proof.verdicts}
    return manifest.model_copy(update={"verdicts": tuple(verdicts.values())})


def refuse_failures(manifest: Manifest) -> None:
    """Raises ParityError where a verdict is a failure; every failure is listed."""
    failed = [verdict for verdict in manifest.verdicts if verdict.verdict == "failed"]
    if failed:
        raise ParityError(
            f"{len(failed)} programs do not give the numbers of the source",
            where="; ".join(f"{v.target} on {v.platform}: {v.function}@{v.bucket}" for v in failed),
            seen="; ".join(dict.fromkeys(v.reason or f"error {v.error}" for v in failed)),
            expected="the outputs of the function run op by op, within the tolerance of its dtype and depth",
            remedy="see what differs: servax inspect --stablehlo; a larger float dtype brings the numbers closer",
        )


def check_targets(names: Sequence[str]) -> tuple[TargetName, ...]:
    """The targets of these names, in the order of `TARGETS`, each once.

    Raises:
      UsageError: a name is not a target.
    """
    if unknown := [name for name in names if name not in TARGETS]:
        raise UsageError("no such target", seen=", ".join(unknown), expected=", ".join(TARGETS))
    return tuple(target for target in TARGETS if target in names)


def _with_samples(bundle: Bundle, buckets: Mapping[str, Sequence[Bucket]]) -> Mapping[str, Sequence[Bucket]]:
    golden = bundle.manifest.golden
    return {
        name: [bucket for bucket in chosen if f"{name}@{bucket.label}" in golden] for name, chosen in buckets.items()
    }


def _unproven(name: TargetName, platform: str, buckets: Mapping[str, Sequence[Bucket]], reason: str) -> Proof:
    verdicts = [
        VerdictRecord(
            target=name,
            platform=platform,
            function=function,
            bucket=bucket.label,
            verdict="unproven",
            reason=reason,
        )
        for function, chosen in buckets.items()
        for bucket in chosen
    ]
    return Proof(name, platform, tuple(verdicts))


def _key(verdict: VerdictRecord) -> tuple[str, str, str, str]:
    return verdict.target, verdict.platform, verdict.function, verdict.bucket
