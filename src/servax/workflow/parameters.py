"""A bundle's parameters, its own or those of another checkpoint, on a device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from servax.checkpoint.quantized import restore_quantized
from servax.checkpoint.restoring import Restored, restore
from servax.core import trees
from servax.core.device import Device
from servax.core.errors import CheckpointError
from servax.core.events import step as named_step
from servax.core.monitoring import LOADING, thread_role
from servax.core.trees import KeyPath, Tree
from servax.targets.bundle import PARAMETERS, Bundle
from servax.workflow.source import CheckpointChoice


def bundle_params(bundle: Bundle, device: Device) -> dict[KeyPath, Any]:
    """The bundle's parameters on `device`, by key path, after a check of their digests.

    Raises:
      BundleError: a parameter file changed or is missing; names it.
    """
    bundle.check(PARAMETERS)
    restored = restore(bundle.path(PARAMETERS), like=bundle.manifest.abstract_params(), placement=device)
    return trees.flatten(restored.params)


def restored_as(
    checkpoint: str | os.PathLike[str],
    *,
    like: Tree,
    selected: str | None,
    device: Device,
    lifted: Mapping[KeyPath, Any],
    int8: bool = False,
    **choice: Any,
) -> Restored:
    """Parameters of another checkpoint, of the structure and dtypes that compiled programs take, and their provenance.

    Args:
      checkpoint: where the parameters are.
      like: shapes and dtypes that the programs take.
      selected: the subtree that the present parameters came from, meant where there are several candidates.
      device: where they go.
      lifted: values of the leaves that come from the model's definition, for a checkpoint that lacks them.
      int8: whether matrices that the programs take in 8 bits may be floating in the checkpoint.
      choice: `select`, `step` and `item`.

    Raises:
      CheckpointError: the checkpoint cannot be read, or does not match.
    """

    def read(**more: Any) -> Restored:
        found = restore_quantized if int8 else restore
        return found(checkpoint, like=like, placement=device, defaults=lifted, **{**choice, **more})

    try:
        return read()
    except CheckpointError as error:
        if selected is None or choice.get("select") is not None:
            raise
        try:
            return read(select=selected)
        except CheckpointError:
            raise error from None


def restore_as(
    checkpoint: str | os.PathLike[str],
    *,
    like: Tree,
    selected: str | None,
    device: Device,
    lifted: Mapping[KeyPath, Any],
    int8: bool = False,
    **choice: Any,
) -> dict[KeyPath, Any]:
    """The same parameters by key path; arguments and errors as of `restored_as`."""
    restored = restored_as(checkpoint, like=like, selected=selected, device=device, lifted=lifted, int8=int8, **choice)
    return trees.flatten(restored.params)


def restore_bundle(bundle: Bundle, device: Device, choice: CheckpointChoice | None) -> dict[KeyPath, Any]:
    """The parameters to serve a bundle with, on `device`: its own, or those of `choice`.

    Raises:
      BundleError: a parameter file of the bundle changed or is missing; names it.
      CheckpointError: the other checkpoint cannot be read, or does not match.
    """
    with thread_role(LOADING), named_step("restore"):
        if choice is None or choice.path is None:
            return bundle_params(bundle, device)
        lifted = lifted_values(bundle, bundle_params(bundle, device)) if lifted_paths(bundle) else {}
        options = {"select": choice.select, "step": choice.step, "item": choice.item}
        return restore_as(
            choice.path,
            like=bundle.manifest.abstract_params(),
            selected=bundle.manifest.provenance.select,
            device=device,
            lifted=lifted,
            int8=bundle.manifest.is_int8,
            **options,
        )


def lifted_paths(bundle: Bundle) -> list[KeyPath]:
    """Paths of the leaves that the model's definition gave."""
    return [trees.path_of(record.path) for record in bundle.manifest.parameters if record.origin == "model"]


def lifted_values(bundle: Bundle, params: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    """Values, on the host, of the leaves that the model's definition gave."""
    return {path: np.array(params[path]) for path in lifted_paths(bundle)}
