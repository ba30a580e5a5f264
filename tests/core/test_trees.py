"""Trees and flat leaves: order, inverse, agreement with JAX."""

from __future__ import annotations

import gc
import weakref

import jax
from hypothesis import given
from hypothesis import strategies as st

from servax.core.trees import flatten, path_of, path_text, unflatten

KEYS = st.text(st.characters(categories=("L", "N", "P"), exclude_characters="/"), min_size=1, max_size=4)
TREES = st.recursive(
    st.dictionaries(KEYS, st.integers(), min_size=1),
    lambda inner: st.dictionaries(KEYS, inner | st.integers(), min_size=1),
    max_leaves=12,
)


@given(TREES)
def test_leaves_come_in_the_order_of_jax(tree):
    assert list(flatten(tree).values()) == jax.tree.leaves(tree)


@given(TREES)
def test_flat_and_nested_are_inverse(tree):
    assert unflatten(flatten(tree)) == tree


@given(TREES)
def test_paths_and_texts_are_inverse(tree):
    assert all(path_of(path_text(path)) == path for path in flatten(tree))


def test_empty_dictionaries_vanish():
    assert flatten({"a": {}, "b": {"c": {}, "d": 1}}) == {("b", "d"): 1}
    assert path_of("") == ()
    assert path_text(("layers", "10", "kernel")) == "layers/10/kernel"
    assert list(flatten({"10": 1, "2": 2})) == [("10",), ("2",)]


def test_leaves_go_with_their_last_holder_and_not_with_the_collector():
    class Leaf:
        pass

    leaf = Leaf()
    alive = weakref.ref(leaf)
    gc.disable()
    try:
        leaves = flatten({"a": {"b": leaf}})
        del leaf, leaves
        assert alive() is None
    finally:
        gc.enable()
