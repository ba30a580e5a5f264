"""References to models, `net.py:model` or `package.module:model`, by which another process finds the same model."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

from servax.core.errors import ModelError, ServaxError, UsageError
from servax.model.model import Model

_FORM = "MODEL.py:NAME or package.module:NAME"


def load_model(reference: str) -> Model:
    """The model that `reference` names; its `reference` and `source_file` are set.

    A file is loaded afresh each time, as a module of a name that its path alone decides. While it is imported its
    folder comes first on `sys.path`, so that it may import the files beside it; for a package, the working directory.

    Args:
      reference: `MODEL.py:NAME` or `package.module:NAME`; NAME is a `Model`, or a function without arguments that
        returns one.

    Raises:
      UsageError: there is no colon in the reference.
      ModelError: there is no such file, module or name, the import raises, or NAME is no model.
    """
    place, colon, name = reference.rpartition(":")
    if not colon:
        raise UsageError(
            "there is neither a bundle nor a model of this name",
            where=reference,
            seen=_what_lies_at(reference),
            expected=f"a directory that servax build wrote, or {_FORM}",
            remedy="check the path, or add the name of the variable that holds the model, e.g. net.py:model",
        )
    if not place or not name.isidentifier():
        raise ModelError(
            f"{reference!r} does not name a model",
            expected=_FORM,
            remedy="Add the name of the variable that holds the model, e.g. net.py:model.",
        )
    if place.endswith(".py") or "/" in place:
        module = _load_file(Path(place).expanduser().resolve())
    else:
        module = _load_module(place)
    model = _model(module, name, reference)
    model.reference = reference
    if module.__file__ is not None:
        model.source_file = Path(module.__file__).resolve()
    model.module = module.__name__
    return model


def _what_lies_at(path: str) -> str:
    found = Path(path).expanduser()
    if found.is_dir():
        return "a directory without bundle.json"
    return "a file" if found.exists() else "no such path"


def find_reference(model: Model) -> str | None:
    """A reference to a model that was made at the top level of an imported file; None in a notebook or a script."""
    if model.reference is not None:
        return model.reference
    module = sys.modules.get(model.module)
    if module is None or model.module == "__main__":
        return None
    name = next((name for name, value in vars(module).items() if value is model), None)
    if name is None:
        return None
    if module.__package__ or module.__file__ is None:
        return f"{model.module}:{name}"
    return f"{Path(module.__file__).resolve()}:{name}"


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise ModelError(
            "there is no such model file",
            where=str(file),
            expected=_FORM,
            remedy=_nearby(file),
        )
    name = f"servax_model_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModelError("the model file is no Python source", where=str(file), expected=_FORM)
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    with _first_on_path(file.parent), _import_errors(str(file)):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before
            raise
    return module


def _load_module(name: str) -> ModuleType:
    with _first_on_path(Path.cwd()), _import_errors(name):
        return importlib.import_module(name)


@contextlib.contextmanager
def _first_on_path(folder: Path) -> Generator[None]:
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the import may have changed sys.path itself
            sys.path.remove(entry)


@contextlib.contextmanager
def _import_errors(place: str) -> Generator[None]:
    """Turns what an import raises into a ModelError that shows the line."""
    try:
        yield
    except ServaxError:
        raise
    except Exception as error:
        raise ModelError(
            f"importing the model raised {type(error).__name__}: {error}",
            where=_line(error, place),
            remedy="Install what it needs, or start from the folder it imports from."
            if isinstance(error, ImportError)
            else "Correct the line.",
        ) from error


def _line(error: Exception, place: str) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename != __file__ and "importlib" not in frame.filename
    ]
    own = [frame for frame in frames if frame.filename == place] or frames
    if not own:
        return place
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}"


def _model(module: ModuleType, name: str, reference: str) -> Model:
    if not hasattr(module, name):
        models = [key for key, value in vars(module).items() if isinstance(value, Model)]
        raise ModelError(
            f"there is no {name!r} in the module",
            where=reference,
            seen=f"models in it: {', '.join(models) or 'none'}",
            remedy=f"Name one of them after the colon, as in {reference.rpartition(':')[0]}:{models[0]}."
            if models
            else "Define it there: model = servax.Model(...).",
        )
    value: Any = getattr(module, name)
    if callable(value) and not isinstance(value, Model):
        try:
            value = value()
        except ServaxError:
            raise
        except Exception as error:
            raise ModelError(
                f"{name}() raised {type(error).__name__}: {error}",
                where=_line(error, reference),
                expected="a servax.Model, or a function without arguments that returns one",
            ) from error
    if not isinstance(value, Model):
        raise ModelError(
            f"{name!r} is no model",
            where=reference,
            seen=f"a {type(value).__name__}",
            expected="a servax.Model, or a function without arguments that returns one",
        )
    return value


def _nearby(file: Path) -> str:
    if not file.parent.is_dir():
        return f"There is no folder {file.parent}."
    names = sorted(path.name for path in file.parent.glob("*.py"))[:8]
    return f"Python files in {file.parent}: {', '.join(names) or 'none'}."
