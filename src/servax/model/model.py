"""A trained module, or a plain function of parameters, as named functions that servax can serve."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from servax.core.errors import ModelError
from servax.core.trees import KeyPath, Tree, flatten, path_text, unflatten
from servax.model.adapter import Example, NetFunction, adapter_of, call_signature
from servax.model.call import make_call
from servax.model.function import Function
from servax.model.layout import abstract_leaf
from servax.model.plain import PlainAdapter
from servax.model.processors import Processor
from servax.model.signature import BATCH, Checked, Declaration, check, flat_items, mentioned, nested, state_specs

PREDICT = "predict"
"""The name of the model's own function."""

_NAME = re.compile(r"^[A-Za-z]\w*$")
_UNKNOWN_SIZE = 8
"""Size of a dimension without buckets, where Linen must be shown an input to find its parameters."""

F = TypeVar("F", bound=Callable[..., Any])


class Model:
    """Abstract parameters plus named functions.

    Args:
      source: a Flax NNX, Linen or Equinox module; a factory without required arguments that returns one, or an Equinox
        (module, `State`) pair; or a plain function `f(params, **inputs)`. A factory runs under abstract evaluation and
        allocates nothing; a module is put into evaluation mode, a live one by way of a copy.
      inputs: name of the argument -> spec, such as `"int32[batch, length]"` or, optional, `"float32[batch] = 1.0"`;
        dictionaries nest. None: the model has no function of its own, only those declared with `function`.
      buckets: default sizes by dimension.
      pad: name of the input -> the value that fills it up to a bucket; 0 unless given.
      batch: the dimension along which requests are joined; None where there is none.
      lengths: name of an extra argument (`int32[batch]`) -> the dimension whose true sizes it gets.
      vmap: the function takes one example, without the batch axis; lengths and `seed` are scalars for it.
      state: name -> spec of fixed shape, of the state that functions with `stateful=True` share. It starts as zeros.
      processors: input -> how text becomes it.
      params: of a plain function: an example of its parameters, their shapes, or a factory; None: the checkpoint's.
      name: of the model; by default that of the module's class or of the function.
      static: arguments passed to the module's call unchanged. Flags such as `train` and `deterministic` are set for
        evaluation where they are not given.

    Raises:
      ModelError: a definition has faults, each named with its remedy.

    Attributes:
      name: of the model.
      functions: by name.
      reference: `net.py:model` or `package.module:model`, by which another process finds it; None in a notebook.
      module: name of the Python module that defines it.
      source_file: the file that defines it, from whose folder relative paths are read; None in a notebook.
    """

    def __init__(
        self,
        source: Any,
        *,
        inputs: Mapping[str, Any] | None = None,
        buckets: Mapping[str, Sequence[int]] | None = None,
        pad: Mapping[str, Any] | None = None,
        batch: str | None = BATCH,
        lengths: Mapping[str, str] | None = None,
        vmap: bool = False,
        state: Mapping[str, Any] | None = None,
        processors: Mapping[str, Processor] | None = None,
        params: Any = None,
        name: str | None = None,
        static: Mapping[str, Any] | None = None,
    ) -> None:
        caller = _caller(self)
        self.reference: str | None = None
        self.source_file: Path | None = Path(caller["__file__"]).resolve() if "__file__" in caller else None
        self.module: str = caller.get("__name__", "__main__")
        self._adapter = adapter_of(source, params=params, examples=self._examples)
        if params is not None and not isinstance(self._adapter, PlainAdapter):
            raise ModelError(
                "params= is for plain functions; a module says itself what parameters it has",
                seen=f"a module of kind {self._adapter.kind}",
                remedy="Drop params=, or pass live parameters to servax.load(model, params=...).",
            )
        self.name = name or self._adapter.name.strip("<>")
        self.functions: dict[str, Function] = {}
        self._nets: dict[str, tuple[NetFunction, Checked, bool, bool]] = {}
        self._state = state_specs(state) if state else None
        self._defaults: tuple[int, dict[KeyPath, np.ndarray]] | None = None
        self._buckets = dict(buckets or {})
        self._pad = dict(flat_items(pad or {}))
        self._batch = batch
        self._vmap = vmap
        self._processors = dict(processors or {})
        if inputs is not None:
            if self._adapter.signature is None and self._adapter.kind != "plain":
                raise ModelError(
                    f"{self._adapter.name} cannot be called",
                    where="inputs=",
                    remedy="Give it __call__, or leave inputs= out and declare functions with @model.function.",
                )
            declaration = Declaration(
                inputs, self._buckets, self._pad, batch, lengths or {}, vmap, False, self._processors, static or {}
            )
            self._add(PREDICT, self._adapter.predict, self._adapter.signature, declaration)

    def function(
        self,
        *,
        inputs: Mapping[str, Any],
        name: str | None = None,
        buckets: Mapping[str, Sequence[int]] | None = None,
        pad: Mapping[str, Any] | None = None,
        batch: str | None = None,
        lengths: Mapping[str, str] | None = None,
        vmap: bool | None = None,
        stateful: bool = False,
        processors: Mapping[str, Processor] | None = None,
        static: Mapping[str, Any] | None = None,
    ) -> Callable[[F], F]:
        """A decorator that adds `f(net, **inputs)`, or `f(net, state, **inputs) -> (state, outputs)` if `stateful`.

        `net` is the live module (Linen: bound to its variables; Equinox with `State`: the pair), or the parameters of a
        plain function. What is not given is taken from the model, so far as the function has these dimensions and
        inputs.

        Raises:
          ModelError: the definition has faults, each named with its remedy.
        """

        def add(function: F) -> F:
            names = dict(flat_items(inputs))
            chosen = self._batch if batch is None else batch
            mapped = not stateful and self._vmap if vmap is None else vmap
            dims = mentioned(inputs)
            if mapped and chosen is not None:
                dims.add(chosen)
            declaration = Declaration(
                inputs,
                {**{dim: sizes for dim, sizes in self._buckets.items() if dim in dims}, **(buckets or {})},
                {**{key: value for key, value in self._pad.items() if key in names}, **dict(flat_items(pad or {}))},
                chosen if batch is not None or chosen in dims else None,
                lengths or {},
                mapped,
                stateful,
                {key: value for key, value in self._processors.items() if key in names}
                if processors is None
                else processors,
                static or {},
            )
            accepted = call_signature(function, skip=2 if stateful else 1)
            self._add(name or function.__name__, function, accepted, declaration)
            return function

        return add

    @property
    def state(self) -> Any:
        """Specs of the state that stateful functions share, in order of name; None without state."""
        return self._state

    def abstract_params(self) -> Tree | None:
        """Parameters as `jax.ShapeDtypeStruct`s, nothing allocated; None for a plain function without `params=`."""
        return self._adapter.abstract()

    def defaults(self) -> dict[KeyPath, np.ndarray]:
        """Values of plain arrays of the definition, which a checkpoint may lack.

        Only these are computed, and only once (but for functions added since): a swap of weights compiles nothing.
        """
        if self._defaults is None or self._defaults[0] != len(self.functions):
            self._defaults = (len(self.functions), self._adapter.defaults())
        return dict(self._defaults[1])

    def random_state(self) -> tuple[KeyPath, ...]:
        """Paths of RNG state: a checkpoint may hold it, but it is no parameter."""
        return self._adapter.random()

    def params_of(self, live: Any) -> Tree:
        """Canonical parameters of a live module, of its state or variables, or of a plain function's parameters.

        Plain arrays of the definition are filled in where `live` lacks them.

        Raises:
          ModelError: parameters are missing, unexpected or of another shape; every one is named.
        """
        given = flatten(self._adapter.canonical(live))
        expected = self.abstract_params()
        if expected is None:
            return unflatten({path: _strong(leaf) for path, leaf in given.items()})
        wanted = flatten(expected)
        if any(path not in given for path in wanted):
            given = {**{path: value for path, value in self.defaults().items() if path in wanted}, **given}
        _compare(wanted, {path: abstract_leaf(leaf) for path, leaf in given.items()})
        return unflatten({path: _strong(given[path]) for path in wanted})

    def bind(self, structure: Tree) -> Model:
        """The model over parameters of this structure: adopted by a plain function without `params=`, else checked.

        Raises:
          ModelError: the structure is not the model's; every difference is named.
        """
        seen = {path: abstract_leaf(leaf) for path, leaf in flatten(structure).items()}
        expected = self.abstract_params()
        if expected is not None:
            optional = self.defaults() if any(path not in seen for path in flatten(expected)) else {}
            _compare(flatten(expected), seen, optional=optional)
            return self
        bound = copy.copy(self)
        if isinstance(self._adapter, PlainAdapter):
            bound._adapter = self._adapter.bind(unflatten(seen))
        return bound

    def _add(
        self, name: str, function: NetFunction, accepted: inspect.Signature | None, declaration: Declaration
    ) -> None:
        if _NAME.match(name) is None:
            raise ModelError(
                f"{name!r} is not a name for a function",
                expected="a letter, then letters, digits and underscores",
                remedy="Pass name= to @model.function.",
            )
        if name in self.functions:
            raise ModelError(
                f"the model has two functions named {name!r}",
                where=f"function {name!r}",
                seen=", ".join(self.functions),
                remedy="Pass another name= to @model.function.",
            )
        if declaration.stateful and self._state is None:
            raise ModelError(
                f"function {name!r} is stateful, but the model has no state",
                where=f"function {name!r}",
                remedy='Declare it: Model(..., state={"cache": "float32[4, 16]"}).',
            )
        checked = check(name, declaration, accepted)
        state = self._state if declaration.stateful else None
        call = make_call(
            self._adapter,
            function,
            name=name,
            signature=checked.signature,
            state=state,
            fixed=checked.fixed,
            vmap=declaration.vmap,
        )
        self.functions[name] = Function(
            name, checked.signature, call, state, checked.buckets, dict(declaration.processors)
        )
        self._nets[name] = (function, checked, declaration.vmap, declaration.stateful)

    def _examples(self) -> list[Example]:
        """Each function with abstract arguments at its smallest sizes."""
        return [self._example(name) for name in self.functions]

    def _example(self, name: str) -> Example:
        function, checked, vmap, stateful = self._nets[name]
        sizes = {dim: checked.buckets.get(dim, (_UNKNOWN_SIZE,))[0] for dim in checked.signature.dims}
        inputs: dict[str, Any] = {}
        for spec in checked.signature.inputs:
            shape = list(spec.concrete(sizes))
            if vmap and checked.signature.batch is not None:
                del shape[spec.shape.index(checked.signature.batch)]
            inputs[spec.name] = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(spec.numpy_dtype))
        state = self._state if stateful and self._state is not None else ()
        cells = {spec.name: jax.ShapeDtypeStruct(spec.concrete({}), jnp.dtype(spec.numpy_dtype)) for spec in state}

        def call(net: Any, arrays: Any) -> Any:
            given, named = arrays
            arguments = (nested(given),) if stateful else ()
            return function(net, *arguments, **nested(named), **checked.fixed)

        return Example(name, sizes, (cells, inputs), call)


def _caller(model: Model) -> dict[str, Any]:
    """The globals of the code that makes a model, past the constructors of its subclasses."""
    frame = inspect.currentframe()
    while frame is not None and (frame.f_code.co_name == "_caller" or frame.f_locals.get("self") is model):
        frame = frame.f_back
    return {} if frame is None else frame.f_globals


def _strong(leaf: Any) -> Any:
    """An array that no longer takes on the dtype of what it meets, as programs are compiled for such."""
    if isinstance(leaf, jax.Array):
        return jax.lax.convert_element_type(leaf, leaf.dtype) if leaf.weak_type else leaf
    return np.asarray(leaf, abstract_leaf(leaf).dtype)


def _compare(
    expected: Mapping[KeyPath, Any], seen: Mapping[KeyPath, Any], *, optional: Mapping[KeyPath, Any] | None = None
) -> None:
    """Raises a ModelError that names every missing, unexpected and misshapen parameter."""
    missing = [path for path in expected if path not in seen and path not in (optional or {})]
    faults = [f"{path_text(path)} is missing" for path in missing]
    faults += [f"{path_text(path)} is not expected" for path in seen if path not in expected]
    faults += [
        f"{path_text(path)} has shape {seen[path].shape}, expected {expected[path].shape}"
        for path in expected
        if path in seen and seen[path].shape != expected[path].shape
    ]
    if faults:
        raise ModelError(
            f"the parameters are not the model's ({len(faults)} differences)",
            seen="".join(f"\n    {fault}" for fault in faults),
            remedy="Pass parameters of the same module and configuration; of a checkpoint, select the right subtree.",
        )
