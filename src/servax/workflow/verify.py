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
from servax.workflow.device import platform_here

PARITY = "parity.json"


def verify(
    path: str | os.PathLike[str],
    *,
    targets: Sequence[str] | None = None,
    platform: str | None = None,
    full: bool = False,
    max_precision_error: float | None = None,
) -> Bundle:
    """Proves a bundle's wrappers again on this machine and records the verdicts in it.

    Args:
      path: the bundle.
      targets: only these wrappers; None: all that the bundle has.
      platform: the device to prove on; None: JAX's default.
      full: every bucket of every target, instead of the corners where each bucket would compile.
      max_precision_error: largest accepted difference to float32, relative to the output's scale.

    Raises:
      UsageError: a target that the bundle does not have.
      BundleError: golden samples are missing or damaged.
      PlatformError: the platform asked for is not here.
    """
    bundle = Bundle.open(path)
    chosen = check_targets(targets or bundle.manifest.targets)
    if absent := [target for target in chosen if target not in bundle.manifest.targets]:
        raise UsageError(
            f"the bundle has no {', '.join(absent)}",
            where=str(bundle.root),
            expected=", ".join(bundle.manifest.targets),
        )
    here = platform_here(platform)
    found = prove(
        bundle,
        chosen,
        (here,),
        here,
        full=full,
        max_precision_error=max_precision_error,
        unavailable="unproven",
    )
    return amend(bundle, {PARITY: proofs.report(found)}, lambda manifest: with_verdicts(manifest, found))


def prove(
    bundle: Bundle,
    targets: Sequence[TargetName],
    platforms: Sequence[str],
    here: str,
    *,
    full: bool,
    max_precision_error: float | None,
    unavailable: Literal["failed", "unproven"],
    model: str | None = None,
) -> list[Proof]:
    """Every target on every platform: in a child where this machine has the platform, `unproven` elsewhere.

    Executables exist for this machine alone, and `jit` has no part of its own on another.
    """
    plans: list[tuple[TargetName, str, Mapping[str, Sequence[Bucket]]]] = []
    for target in targets:
        buckets = _buckets(bundle, target, full=full)
        for platform in (here,) if target in ("jit", "aot", "saved_model") else platforms:
            plans.append((target, platform, buckets))
    found: list[Proof] = []
    with named_step("parity", total=len(plans)):
        for target, platform, buckets in plans:
            if platform == here:
                proof = proofs.prove(
                    bundle,
                    target,
                    platform,
                    buckets,
                    model=model or bundle.manifest.provenance.source,
                    max_precision_error=max_precision_error,
                    unavailable=unavailable,
                )
            else:
                proof = _unproven(target, platform, buckets)
            found.append(proof)
            emit(StepAdvanced("parity", f"{target} on {platform}", sum(proof.seconds.values())))
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


def _buckets(bundle: Bundle, target: TargetName, *, full: bool) -> Mapping[str, Sequence[Bucket]]:
    golden = bundle.manifest.golden
    chosen = proofs.buckets_to_prove(target, bundle.manifest.grid(), full=full)
    if target == "saved_model" and bundle.manifest.saved_model is not None:
        from servax.targets.savedmodel import functions_of

        written = functions_of(bundle.manifest.saved_model)
        chosen = {name: buckets for name, buckets in chosen.items() if name in written}
    return {
        name: [bucket for bucket in buckets if f"{name}@{bucket.label}" in golden] for name, buckets in chosen.items()
    }


def _unproven(target: TargetName, platform: str, buckets: Mapping[str, Sequence[Bucket]]) -> Proof:
    reason = f"unproven on {platform}: run servax verify there"
    return Proof(
        target,
        platform,
        tuple(
            VerdictRecord(
                target=target,
                platform=platform,
                function=name,
                bucket=bucket.label,
                verdict="unproven",
                reason=reason,
            )
            for name, chosen in buckets.items()
            for bucket in chosen
        ),
    )


def _key(verdict: VerdictRecord) -> tuple[str, str, str, str]:
    return verdict.target, verdict.platform, verdict.function, verdict.bucket
