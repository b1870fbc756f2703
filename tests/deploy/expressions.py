"""Metric names and labels that a PromQL expression uses."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import promql_parser
from promql_parser import AggModifierType, AggregateExpr, Expr, MatrixSelector, VectorSelector

from tests.deploy.tools import Document

GRAFANA = {"$__rate_interval": "5m", "$__range": "1h", "$model": ".*", "$proxy": ".*"}
"""Values for Grafana's variables."""

Asked = tuple[str, frozenset[str]]
"""Metric name, and labels that the metric must have."""


def plain(expr: str, variables: Mapping[str, str] = GRAFANA) -> str:
    """Return the expression with Grafana's variables replaced."""
    for variable, value in variables.items():
        expr = expr.replace(variable, value)
    return expr


def asked(expr: str) -> set[Asked]:
    """Return the metrics of an expression, with the labels that select or aggregate them.

    Raises:
        ValueError: the expression is not valid PromQL.
    """
    return set(_asked(promql_parser.parse(plain(expr)), frozenset()))


def _asked(expr: Any, labels: frozenset[str]) -> Iterator[Asked]:
    match expr:
        case VectorSelector():
            matchers = {matcher.name for matcher in expr.matchers.matchers}
            assert expr.name is not None, expr
            yield expr.name, labels | matchers
        case MatrixSelector():
            yield from _asked(expr.vector_selector, labels)
        case AggregateExpr():
            by = expr.modifier
            if by is not None:
                assert by.type == AggModifierType.By
                labels |= set(by.labels)
            yield from _asked(expr.expr, labels)
        case _:
            for part in _parts(expr):
                yield from _asked(part, labels)


def _parts(expr: Any) -> Iterable[Expr]:
    if hasattr(expr, "args"):
        return list(expr.args)
    names = ("expr", "lhs", "rhs")
    return [getattr(expr, name) for name in names if hasattr(expr, name)]


def panels(dashboard: Document) -> list[Document]:
    """Return all panels that show data, without the row headers."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard: Document) -> list[str]:
    """Return the expression of every query and annotation."""
    return [
        *(target["expr"] for panel in panels(dashboard) for target in panel["targets"]),
        *(one["expr"] for one in dashboard["annotations"]["list"]),
    ]
