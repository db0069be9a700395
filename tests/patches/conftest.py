"""Checkouts of the upstreams, each made once for the tests of a file."""

import functools

import pytest

import upstream_trees


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A function: the checkout of an upstream, patched or not."""

    @functools.cache
    def make(name, patched):
        return upstream_trees.make_tree(name, patched, tmp_path_factory.mktemp("upstream"))

    return lambda name, patched=True: make(name, patched)
