"""The manifest, `bundle.json`: everything a reader must know before it opens another file of the bundle.

`python -m servax.targets.manifest` prints its JSON Schema; `docs/schema/bundle-1.schema.json` holds the same text.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from servax.core.tensors import Scalar, Signature, TensorSpec, dtype_of
from servax.core.trees import path_of, unflatten
from servax.stages.buckets import Bucket, BucketGrid

FORMAT = 1
"""Version of the manifest's format. A reader refuses a higher one."""

SYMBOLIC = "symbolic"
"""In place of a bucket's label: the export whose dimensions are symbols."""

TargetName = Literal["jit", "aot", "export", "saved_model"]

TARGETS: tuple[TargetName, ...] = ("jit", "aot", "export", "saved_model")
"""Every wrapper, in the order in which they are listed everywhere."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorRecord(_Record):
    """A `TensorSpec`."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    pad: Scalar = 0
    default: Scalar | None = None

    @classmethod
    def of(cls, spec: TensorSpec) -> TensorRecord:
        return cls(name=spec.name, dtype=spec.dtype, shape=spec.shape, pad=spec.pad, default=spec.default)

    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape, self.pad, self.default)


class ProcessorRecord(_Record):
    """A processor: its kind, the input it produces, the file in the bundle and its options."""

    kind: Literal["text"]
    input: str
    name: str
    file: str
    max_length: int


class FunctionRecord(_Record):
    """A function: its signature and its buckets, by label."""

    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    batch: str | None
    lengths: dict[str, str] = {}
    stateful: bool = False
    processors: tuple[ProcessorRecord, ...] = ()
    buckets: tuple[str, ...]

    @classmethod
    def of(
        cls, signature: Signature, *, stateful: bool, buckets: tuple[str, ...], processors: tuple[ProcessorRecord, ...]
    ) -> FunctionRecord:
        return cls(
            inputs=tuple(map(TensorRecord.of, signature.inputs)),
            outputs=tuple(map(TensorRecord.of, signature.outputs)),
            batch=signature.batch,
            lengths=dict(signature.lengths),
            stateful=stateful,
            processors=processors,
            buckets=buckets,
        )

    def signature(self) -> Signature:
        return Signature(
            inputs=tuple(record.spec() for record in self.inputs),
            outputs=tuple(record.spec() for record in self.outputs),
            batch=self.batch,
            lengths=dict(self.lengths),
        )


class ParameterRecord(_Record):
    """One leaf of the parameters, in leaf order; `origin` says whether the checkpoint or the definition gave it."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    origin: Literal["checkpoint", "model"] = "checkpoint"


class ProvenanceRecord(_Record):
    """Where the parameters and the functions came from."""

    checkpoint: str | None = None
    layout: str | None = None
    step: int | None = None
    item: str | None = None
    select: str | None = None
    source: str | None = None
    """`MODEL.py:NAME` or `package.module:NAME`; None for a model made in a notebook or in the caller's process."""
    source_digest: str | None = None
    """SHA-256 over the sources of the model's package, for the `jit` wrapper."""


class ProgramRecord(_Record):
    """One export: a function at one bucket, or at symbolic dimensions (`bucket` is `symbolic`)."""

    function: str
    bucket: str
    fixed: dict[str, int] = {}
    """Of a symbolic export: the dimensions that had to keep a size, the other ones being free."""
    file: str
    platforms: tuple[str, ...]
    calling_convention: int
    stablehlo_digest: str
    seconds: dict[str, float] = {}
    """Of the build: `trace` and `lower`."""
    cost: dict[str, float] = {}
    memory: dict[str, int] = {}
    constant_bytes: int = 0
    operations: dict[str, int] = {}
    """Histogram of StableHLO operations."""


class FingerprintRecord(_Record):
    """A machine and a setting that an executable was compiled for; `id` is a digest over the fields."""

    id: str
    fields: dict[str, str]


class ExecutableRecord(_Record):
    """One serialized executable."""

    fingerprint: str
    function: str
    bucket: str
    file: str
    stablehlo_digest: str
    """Of the export it was compiled from."""
    compile_options: dict[str, str] = {}
    """XLA's options for this executable beyond the flags in its fingerprint."""
    donated_state: bool = False
    custom_calls: tuple[str, ...] = ()
    """Native functions it calls, e.g. `lapack_sgetrf_ffi`: their libraries must be there before it runs."""
    seconds: float = 0.0


class SavedModelRecord(_Record):
    """The TensorFlow SavedModel."""

    tensorflow: str
    """The version of TensorFlow it was made for."""
    stablehlo: str
    """The version of StableHLO its modules were serialized for."""
    signatures: dict[str, str]
    """Name of the signature -> `FUNCTION` (polymorphic) or `FUNCTION@BUCKET`."""
    left_out: dict[str, str] = {}
    """Functions that cannot be signatures -> why."""


class VerdictRecord(_Record):
    """What parity found for one target, platform, function and bucket.

    `error` is the absolute difference to the function run op by op at highest matmul precision, where it exceeds
    `tolerance`, absolute too, most or comes closest; `precision` is the largest difference to the same function in
    float32, relative to the output's scale.
    """

    target: TargetName
    platform: str
    function: str
    bucket: str
    verdict: Literal["proved", "unproven", "failed"]
    error: float | None = None
    tolerance: float | None = None
    precision: float | None = None
    reason: str | None = None


class ExpiryRecord(_Record):
    """How long an artifact lives: until a day, or as long as a version or fingerprint stays."""

    target: TargetName
    until: str | None = None
    bound_to: str | None = None


class RefreshRecord(_Record):
    """Of a bundle whose parameters are newer than its programs: what `servax refresh` made it from, and how it differs.

    Verdicts are those of the programs, proved with the parameters of an earlier version.
    """

    version: str
    """Name of the directory it was made from, with the same programs and other parameters."""
    built: str
    """When the programs were built; UTC, ISO 8601."""
    finite: bool
    """Whether the parameters hold neither NaN nor infinity."""
    drift: dict[str, float | None] = {}
    """By function, the largest difference of its answers to the golden samples of that version, over their largest
    absolute value; null: only one of the two is finite. Functions that could not run on the machine are not listed."""
    left_out: dict[str, str] = {}
    """Parts that the new parameters do not have -> why."""


class FileRecord(_Record):
    """Digest and size in bytes of one file of the bundle."""

    sha256: str
    bytes: int


class LanguageRecord(_Record):
    """Of a language model: what the engine must know beside its functions, and the files between text and tokens."""

    slots: int
    """Sequences that the cache holds."""
    context: int
    """Longest sequence, prompt and answer, in tokens."""
    burst: int
    """Most tokens a row gets in one call of `decode`."""
    vocabulary: int
    end: tuple[int, ...] = ()
    """Ids that end an answer."""
    recomputes: bool = False
    """Whether every token costs the whole sequence, because the network has no cache."""
    weights: Literal["float32", "bfloat16", "int8"] | None = None
    """How its parameters are kept, where that was said; of `int8`, a checkpoint's floating matrices are quantized."""
    tokenizer: str | None = None
    """File with `tokenizer.json`."""
    template: str | None = None
    """File with the chat template."""
    special: dict[str, str] = {}
    """Tokens that the template may name, such as `bos_token`."""


class Manifest(_Record):
    """`bundle.json`."""

    format: int = FORMAT
    name: str
    created: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    """Of servax, python, jax, jaxlib, orbax-checkpoint and what else was installed and used at build."""
    platforms: tuple[str, ...]
    targets: tuple[TargetName, ...]
    dtype: str | None = None
    provenance: ProvenanceRecord
    parameters: tuple[ParameterRecord, ...]
    state: tuple[TensorRecord, ...] = ()
    functions: dict[str, FunctionRecord]
    language: LanguageRecord | None = None
    programs: tuple[ProgramRecord, ...] = ()
    fingerprints: tuple[FingerprintRecord, ...] = ()
    executables: tuple[ExecutableRecord, ...] = ()
    saved_model: SavedModelRecord | None = None
    golden: dict[str, str] = {}
    """`FUNCTION@BUCKET` -> file with its samples."""
    verdicts: tuple[VerdictRecord, ...] = ()
    expiry: tuple[ExpiryRecord, ...] = ()
    refresh: RefreshRecord | None = None
    files: dict[str, FileRecord] = Field(default_factory=dict[str, FileRecord])

    def program(self, function: str, bucket: str) -> ProgramRecord | None:
        """The export of a function at one bucket's label, or at `symbolic`."""
        return next((each for each in self.programs if (each.function, each.bucket) == (function, bucket)), None)

    def executable(self, fingerprint: str, function: str, bucket: str) -> ExecutableRecord | None:
        """The executable of a function at one bucket's label for the fingerprint of this id."""
        key = (fingerprint, function, bucket)
        return next((each for each in self.executables if (each.fingerprint, each.function, each.bucket) == key), None)

    @property
    def is_int8(self) -> bool:
        """Whether a language model's matrices are kept in 8 bits."""
        return self.language is not None and self.language.weights == "int8"

    def grid(self) -> BucketGrid:
        """The buckets of every function."""
        return BucketGrid({name: tuple(map(Bucket.parse, record.buckets)) for name, record in self.functions.items()})

    def abstract_params(self) -> dict[str, Any]:
        """Shapes and dtypes of the parameters, a nested dictionary of `jax.ShapeDtypeStruct`."""
        import jax  # what calls a SavedModel reads the manifest too, and has no JAX

        return unflatten(
            {path_of(each.path): jax.ShapeDtypeStruct(each.shape, dtype_of(each.dtype)) for each in self.parameters}
        )

    def with_target(self, name: TargetName, **update: Any) -> Manifest:
        """The manifest of a bundle that has this wrapper too, and these fields besides."""
        targets = tuple(each for each in TARGETS if each == name or each in self.targets)
        return self.model_copy(update={"targets": targets, **update})


def schema_text() -> str:
    """The JSON Schema of `bundle.json`, as published: sorted keys, one trailing newline."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Manifest.model_json_schema()}
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
