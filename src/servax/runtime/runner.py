"""What a servable keeps on its device, and the one way to run a program with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from servax.core.device import Device
from servax.core.errors import CheckpointError, ExecutionError, NotReady, first_line
from servax.core.tensors import Signature, TensorSpec
from servax.core.trees import KeyPath, path_text
from servax.model.processors import Processor
from servax.runtime.guard import ON_HOST, Aval, differences, explain, placement_of
from servax.stages.buckets import Bucket
from servax.targets.target import FlatArrays, ProgramTable

Buffers = Sequence[np.ndarray[Any, Any]]
"""Host arrays of a bucket's shapes, in order of input name."""


@dataclass(frozen=True, slots=True)
class ServedFunction:
    """One function as the runtime needs it.

    Attributes:
      signature: the program's tensors.
      stateful: whether it takes and returns the servable's state.
      processors: by name of the input that each one produces; paths are absolute or resolvable from here.
    """

    signature: Signature
    stateful: bool = False
    processors: Mapping[str, Processor] = field(default_factory=dict[str, Processor])


class Runner:
    """Parameters and state on one device, and the programs that take them.

    `run` is for the device's thread alone; `fit`, `replace` and `drop` may be called from any thread.

    Attributes:
      paths: of the parameters, in sorted order.
    """

    def __init__(
        self,
        table: ProgramTable,
        functions: Mapping[str, ServedFunction],
        params: Mapping[KeyPath, Any],
        state: Sequence[TensorSpec],
        device: Device,
    ) -> None:
        self._table = table
        self._functions = functions
        self._state_specs = sorted(state, key=lambda spec: spec.name)
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self._placement = placement_of(device)
        # On a CPU the compiled call takes NumPy arrays as they are, at a fifth of the cost of putting them there first.
        self._on_host = device.platform == "cpu"
        self.paths = tuple(params)
        self._params = self._commit(params)
        self._expected = self._avals(self._params)
        self._state = self.zeros()
        self._keeping = threading.Lock()
        self._dropped = False

    @property
    def params(self) -> FlatArrays:
        """The present parameters, in the order of `paths`; NotReady once they were let go of."""
        with self._keeping:
            if self._dropped:
                raise _closed()
            return self._params

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters on the device."""
        return sum(array.nbytes for array in self._params)

    @property
    def parameter_count(self) -> int:
        """How many leaves the parameters have."""
        return len(self.paths)

    def zeros(self) -> FlatArrays:
        """The state as it starts: zeros, made on the host, since an eager `jnp.zeros` would compile."""
        return tuple(
            jax.device_put(np.zeros(spec.concrete({}), spec.numpy_dtype), self._sharding) for spec in self._state_specs
        )

    def reset_state(self) -> None:
        """Starts the state anew."""
        self._state = self.zeros()

    def run(
        self,
        function: str,
        bucket: Bucket,
        buffers: Buffers | FlatArrays,
        *,
        params: FlatArrays | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[tuple[np.ndarray[Any, Any], ...], dict[str, float]]:
        """Calls the program with `buffers`, and gives its outputs in order of name, with times.

        The outputs may be views of device buffers (contract 7): copy before the next run. Times are in seconds, each
        step blocked on: `transfer`, `execute`, `copy`. On a CPU the program reads the host's own buffers: what JAX does
        about them is in `execute`, and `transfer` is close to 0.

        Args:
          function: by name.
          bucket: of the program.
          buffers: host arrays, or what `put` made of them.
          params: in place of the present ones, as `fit` gives them.
          meanwhile: called once the program is on its way, before its outputs are waited for; it does not raise.

        Raises:
          ExecutionError: the program failed; RecompileError when it would have compiled.
        """
        served = self._functions[function]
        params = self._params if params is None else params  # read once: a swap takes effect between requests
        began = time.perf_counter()
        inputs = self._put(buffers)
        moved = time.perf_counter()
        state = self._state if served.stateful else ()
        try:
            new_state, outputs = self._call(function, bucket, params, state, inputs)
            if meanwhile is not None:
                meanwhile()
            jax.block_until_ready((new_state, outputs) if served.stateful else outputs)
            ran = time.perf_counter()
            if served.stateful:
                self._state = new_state
            host = self._fetch(outputs)
        except Exception as error:
            failure = self._failure(error, function, bucket, (params, state, inputs))
            if served.stateful:
                self.reset_state()
            raise failure from error
        return host, {"transfer": moved - began, "execute": ran - moved, "copy": time.perf_counter() - ran}

    def dispatch(self, function: str, bucket: Bucket, buffers: Buffers) -> FlatArrays:
        """As `run`, without waiting: outputs as arrays on the device, for `fetch`.

        The buffers must not be written to until the outputs were fetched (contract 7).

        Raises:
          ExecutionError: the call failed; RecompileError when it would have compiled.
        """
        served = self._functions[function]
        state = self._state if served.stateful else ()
        inputs = tuple(buffers) if self._on_host else tuple(jax.device_put(each, self._sharding) for each in buffers)
        try:
            new_state, outputs = self._call(function, bucket, self._params, state, inputs)
        except Exception as error:
            failure = self._failure(error, function, bucket, (self._params, state, inputs))
            if served.stateful:
                self.reset_state()
            raise failure from error
        if served.stateful:
            self._state = new_state
        return outputs

    def fetch(self, outputs: Sequence[Any]) -> tuple[np.ndarray[Any, Any], ...]:
        """Waits for outputs that `dispatch` gave, and gives them on the host; views of the device's on a CPU.

        Raises:
          ExecutionError: the program failed; the state is lost and starts again at zeros.
        """
        try:
            return self._fetch(outputs)
        except Exception as error:
            self.reset_state()
            raise ExecutionError(
                "a program failed on the device",
                seen=first_line(error),
                remedy="The state was lost and starts again at zeros.",
            ) from error

    def fit(self, params: Mapping[KeyPath, Any]) -> FlatArrays:
        """Other parameters of the same structure, on the device, as `replace` takes them.

        Raises:
          CheckpointError: paths, shapes, dtypes or placement differ; all differences are listed.
        """
        missing = [path_text(path) for path in self.paths if path not in params]
        extra = [path_text(path) for path in params if path not in set(self.paths)]
        if missing or extra:
            found = [*(f"missing {path}" for path in missing), *(f"not in the model: {path}" for path in extra)]
            raise _mismatch(found)
        fresh = self._commit({path: params[path] for path in self.paths})
        if found := differences(self._expected, self._avals(fresh)):
            raise _mismatch(found)
        jax.block_until_ready(fresh)
        return fresh

    def replace(self, fresh: FlatArrays) -> int:
        """Puts parameters that `fit` gave in place of the present ones; returns their bytes.

        Requests that run keep the old ones, which are freed with the last of them.

        Raises:
          NotReady: everything was let go of meanwhile.
        """
        with self._keeping:
            if self._dropped:
                raise _closed()
            self._params = fresh
        return self.parameter_bytes

    def drop(self) -> None:
        """Lets go of everything on the device, for good."""
        with self._keeping:
            self._dropped = True
            self._params = ()
            self._state = ()

    def _call(
        self, function: str, bucket: Bucket, params: FlatArrays, state: FlatArrays, inputs: FlatArrays
    ) -> tuple[FlatArrays, FlatArrays]:
        program = self._table[function, bucket].program
        if not self._on_host:
            return program(params, state, inputs)
        with jax.transfer_guard_host_to_device("allow"):  # of this call's inputs, which are the host's
            return program(params, state, inputs)

    def put(self, buffers: Buffers) -> FlatArrays:
        """Starts to move a batch's inputs to the device, as `run` takes them; the buffers stay the batch's."""
        if self._on_host:
            return tuple(buffers)
        return tuple(jax.device_put(buffer, self._sharding) for buffer in buffers)

    def _put(self, buffers: Buffers | FlatArrays) -> FlatArrays:
        if self._on_host:
            return tuple(buffers)
        inputs = tuple(
            jax.device_put(buffer, self._sharding) if isinstance(buffer, np.ndarray) else buffer for buffer in buffers
        )
        jax.block_until_ready(inputs)
        return inputs

    def _fetch(self, outputs: Sequence[Any]) -> tuple[np.ndarray[Any, Any], ...]:
        return tuple(map(np.asarray, outputs)) if self._on_host else tuple(jax.device_get(tuple(outputs)))

    def _commit(self, params: Mapping[KeyPath, Any]) -> FlatArrays:
        # A NumPy leaf is copied first: on the CPU, device_put would make the device array a view of the caller's.
        return tuple(
            jax.device_put(np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, self._sharding)
            for leaf in params.values()
        )

    def _avals(self, params: FlatArrays) -> tuple[Aval, ...]:
        return tuple(
            Aval.of(f"parameter '{path_text(path)}'", leaf) for path, leaf in zip(self.paths, params, strict=True)
        )

    def _failure(
        self, error: Exception, function: str, bucket: Bucket, arguments: tuple[FlatArrays, FlatArrays, FlatArrays]
    ) -> ExecutionError:
        served = self._functions[function]
        params, state, inputs = arguments
        specs = sorted(served.signature.inputs, key=lambda spec: spec.name)
        seen = [
            *self._avals(params),
            *(Aval.of(f"state '{spec.name}'", array) for spec, array in zip(self._state_specs, state, strict=False)),
            *(Aval.of(f"input '{spec.name}'", array) for spec, array in zip(specs, inputs, strict=True)),
        ]
        expected = [
            *self._expected,
            *(
                self._aval("state", spec, {}, self._placement)
                for spec in (self._state_specs if served.stateful else ())
            ),
            *(
                self._aval("input", spec, bucket.mapping(), ON_HOST if self._on_host else self._placement)
                for spec in specs
            ),
        ]
        failure = explain(error, f"{function}@{bucket.label}", expected, seen)
        if served.stateful:
            failure.remedy = " ".join(filter(None, (failure.remedy, "The state was lost and starts again at zeros.")))
        return failure

    def _aval(self, kind: str, spec: TensorSpec, sizes: Mapping[str, int], placement: str) -> Aval:
        dtype = spec.numpy_dtype if placement == ON_HOST else jax.dtypes.canonicalize_dtype(spec.numpy_dtype)
        return Aval(f"{kind} '{spec.name}'", str(dtype), spec.concrete(sizes), False, placement)


def _closed() -> NotReady:
    return NotReady("the servable was closed before the new parameters were in place", remedy="load it again")


def _mismatch(found: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        "the new parameters do not fit the compiled programs",
        seen="; ".join(found),
        expected="the structure, dtypes and shapes of the present parameters",
        remedy="build a bundle from this checkpoint instead; a swap takes new values only",
    )
