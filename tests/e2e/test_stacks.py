"""Table of which tests run on which stack."""

import ast
from pathlib import Path

from tests.e2e.stacks import OF_MODULES, OF_TESTS, STACKS


def test_the_table_of_stacks_names_modules_and_tests_that_exist() -> None:
    """A renamed test would otherwise run on one stack only."""
    modules = {
        path.stem: ast.parse(path.read_text()) for path in Path(__file__).parent.glob("*.py")
    }
    tests = {
        node.name
        for module in modules.values()
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    assert set(OF_MODULES) <= set(modules)
    assert set(OF_TESTS) <= tests


def test_each_stack_has_a_test() -> None:
    used = {spec for stacks in [*OF_MODULES.values(), *OF_TESTS.values()] for spec in stacks}

    assert used == set(STACKS)
