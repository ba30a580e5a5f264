"""What is in a bundle, read from its manifest; nothing is loaded onto a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from servax.core.errors import NotFound
from servax.core.table import Table, bytes_text, seconds_text
from servax.core.tensors import TensorSpec, dtype_of
from servax.targets.bundle import Bundle
from servax.targets.manifest import RefreshRecord, SavedModelRecord


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that two bundles do not share."""

    what: str
    here: str
    other: str


def report(path: str) -> list[Table]:
    """The tables that `servax inspect` prints: bundle, functions, programs, executables, parity, expiry."""
    bundle = Bundle.open(path)
    manifest = bundle.manifest
    parameter_bytes = _parameter_bytes(bundle)
    facts = [
        ("name", manifest.name),
        ("created", manifest.created),
        ("targets", ", ".join(manifest.targets)),
        ("platforms", ", ".join(manifest.platforms)),
        ("parameters", f"{len(manifest.parameters)} leaves, {bytes_text(parameter_bytes)}"),
        ("checkpoint", manifest.provenance.checkpoint),
        ("step", manifest.provenance.step),
        ("select", manifest.provenance.select),
        ("source", manifest.provenance.source),
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ("size on disk", bytes_text(sum(record.bytes for record in manifest.files.values()))),
    ]
    functions = [
        (name, direction, spec.name, TensorSpec.text(spec.spec()), _role(record.lengths, spec.name))
        for name, record in manifest.functions.items()
        for direction, specs in (("in", record.inputs), ("out", record.outputs))
        for spec in specs
    ]
    programs = [
        (
            f"{program.function}@{program.bucket}",
            ", ".join(program.platforms),
            seconds_text(program.seconds.get("trace")),
            seconds_text(program.seconds.get("lower")),
            seconds_text(_compile_seconds(bundle, program.function, program.bucket)),
            f"{program.cost['flops']:.3g}" if "flops" in program.cost else "",
            bytes_text(program.memory["temp"]) if "temp" in program.memory else "",
            bytes_text(program.constant_bytes),
            sum(program.operations.values()),
        )
        for program in manifest.programs
    ]
    executables = [
        (
            record.id,
            count,
            ", ".join(f"{key}={value}" for key, value in sorted(record.fields.items()) if not key.startswith("jax_")),
        )
        for record in manifest.fingerprints
        if (count := sum(executable.fingerprint == record.id for executable in manifest.executables))
    ]
    expiry = [(record.target, record.until, record.bound_to) for record in manifest.expiry]
    tables = [
        Table.of(f"bundle {bundle.root}", ("", ""), [fact for fact in facts if fact[1] is not None]),
        Table.of("functions", ("function", "", "tensor", "spec", "role"), functions),
        Table.of(
            "programs",
            ("program", "platforms", ">trace", ">lower", ">compile", ">flops", ">temp", ">constants", ">operations"),
            programs,
        ),
    ]
    if manifest.saved_model is not None:
        tables.append(_saved_model(manifest.saved_model))
    if manifest.refresh is not None:
        tables.append(_refresh(manifest.refresh))
    if executables:
        tables.append(
            Table.of("executables", ("fingerprint", ">programs", "fields (and JAX's settings: --json)"), executables)
        )
    tables.append(bundle.parity.table())
    tables.append(Table.of("how long they live", ("target", "until", "bound to"), expiry))
    return tables


def manifest_json(path: str) -> dict[str, Any]:
    """The manifest as JSON values."""
    return Bundle.open(path).manifest.model_dump(mode="json")


def stablehlo(path: str, program: str) -> str:
    """The StableHLO text of `FUNCTION@BUCKET`.

    Raises:
      NotFound: no such program; the message lists those that are there.
    """
    from servax.targets import exported

    bundle = Bundle.open(path)
    for record in bundle.manifest.programs:
        if f"{record.function}@{record.bucket}" == program:
            return exported.stablehlo_text(bundle.read(record.file))
    there = ", ".join(f"{record.function}@{record.bucket}" for record in bundle.manifest.programs)
    raise NotFound("no such program in the bundle", where=str(bundle.root), seen=program, expected=there or "none")


def diff(path: str, other: str) -> list[Difference]:
    """What differs between two bundles: versions, signatures, grid, parameters, programs, fingerprints, verdicts."""
    here, there = (_facts(Bundle.open(each)) for each in (path, other))
    return [
        Difference(key, here.get(key, "absent"), there.get(key, "absent"))
        for key in sorted(here.keys() | there.keys())
        if here.get(key) != there.get(key)
    ]


def difference_table(differences: Sequence[Difference]) -> Table:
    """Differences as a table."""
    return Table.of("differences", ("what", "here", "other"), [(d.what, d.here, d.other) for d in differences])


def _facts(bundle: Bundle) -> dict[str, str]:
    manifest = bundle.manifest
    facts = {
        "name": manifest.name,
        "targets": ", ".join(manifest.targets),
        "platforms": ", ".join(manifest.platforms),
        "checkpoint": str(manifest.provenance.checkpoint),
        "step": str(manifest.provenance.step),
        "fingerprints": ", ".join(record.id for record in manifest.fingerprints),
    }
    facts |= {f"version of {name}": version for name, version in manifest.versions.items()}
    for name, record in manifest.functions.items():
        facts |= {f"{name} in {spec.name}": spec.spec().text() for spec in record.inputs}
        facts |= {f"{name} out {spec.name}": spec.spec().text() for spec in record.outputs}
        facts[f"{name} buckets"] = " ".join(record.buckets)
    facts |= {f"parameter {p.path}": f"{p.dtype}{list(p.shape)}" for p in manifest.parameters}
    facts |= {f"program {p.function}@{p.bucket}": p.stablehlo_digest for p in manifest.programs}
    facts |= {
        f"file {name}": f.sha256 for name, f in manifest.files.items() if name.startswith(("params/", "processors/"))
    }
    return facts


def _saved_model(record: SavedModelRecord) -> Table:
    rows = [(name, f"signature of {origin}") for name, origin in record.signatures.items()]
    rows += [(name, f"left out: {reason}") for name, reason in record.left_out.items()]
    return Table.of(f"saved_model for TensorFlow {record.tensorflow}", ("name", ""), rows)


def _refresh(record: RefreshRecord) -> Table:
    rows = [
        ("programs of", f"version {record.version}, built {record.built}: proved with earlier parameters"),
        ("parameters", "all finite" if record.finite else "not all finite"),
    ]
    rows += [
        (f"drift of {name}", "not finite" if drift is None else f"{drift:.3g}") for name, drift in record.drift.items()
    ]
    rows += [(part, f"left out: {reason}") for part, reason in record.left_out.items()]
    return Table.of("refreshed", ("", ""), rows)


def _role(lengths: dict[str, str], name: str) -> str:
    return f"true {lengths[name]}, filled in" if name in lengths else ""


def _compile_seconds(bundle: Bundle, function: str, bucket: str) -> float | None:
    times = [e.seconds for e in bundle.manifest.executables if (e.function, e.bucket) == (function, bucket)]
    return times[-1] if times else None


def _parameter_bytes(bundle: Bundle) -> int:
    total = 0
    for record in bundle.manifest.parameters:
        size = dtype_of(record.dtype).itemsize
        for dim in record.shape:
            size *= dim
        total += size
    return total
