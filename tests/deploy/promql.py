"""What an expression of Prometheus selects from a server's `/metrics`, and which labels its series have."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

OF_TARGETS = frozenset(("job", "instance"))
"""Labels that Prometheus adds."""

OF_COUNTERS = frozenset(("rate", "increase"))


@dataclass(frozen=True)
class Series:
    """All samples of one name.

    Attributes:
        is_counter: whether they only grow.
        labels: of each of them.
    """

    is_counter: bool
    labels: tuple[dict[str, str], ...]


class Exposed:
    """What a server exposes.

    Attributes:
        families: the names of its metrics, without what ends the names of their samples.
        series: all samples, by name.
    """

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        self.families = {each.name for each in families}
        self.series: dict[str, Series] = {}
        for family in families:
            for name in {sample.name for sample in family.samples}:
                labels = tuple(sample.labels for sample in family.samples if sample.name == name)
                self.series[name] = Series(family.type in ("counter", "histogram"), labels)

    def labels_of(self, expression: str) -> frozenset[str]:
        """The labels of the expression's series. Fails if it selects nothing, or series that do not match."""
        return self._labels(promql.parse(expression)) or frozenset()

    def _labels(self, node: promql.Expr, is_rated: bool = False) -> frozenset[str] | None:
        """See `labels_of`; None of a number."""
        match node:
            case promql.NumberLiteral():
                return None
            case promql.ParenExpr():
                return self._labels(node.expr, is_rated)
            case promql.VectorSelector():
                return self._selected(node, is_rated)
            case promql.MatrixSelector():
                return self._selected(node.vector_selector, is_rated)
            case promql.Call():
                return self._of_call(node)
            case promql.AggregateExpr():
                return self._aggregated(node)
            case promql.BinaryExpr():
                assert node.modifier is None, node.prettify()
                left, right = self._labels(node.lhs), self._labels(node.rhs)
                assert left is None or right is None or left == right, f"{node.prettify()}: {left} are not {right}"
                return right if left is None else left
        raise AssertionError(f"{node.prettify()} is not understood here")

    def _selected(self, node: promql.VectorSelector, is_rated: bool) -> frozenset[str]:
        text = node.prettify()
        series = self.series.get(node.name)
        assert series is not None, f"{node.name} is not exposed"
        assert series.is_counter == is_rated, f"{text}: rates are for counters, and counters for rates"
        names = frozenset(series.labels[0]) | OF_TARGETS
        matchers = node.matchers.matchers
        assert {each.name for each in matchers} <= names, f"{text}: it has {sorted(names)}"
        of_ours = [each for each in matchers if each.name not in OF_TARGETS]
        assert any(all(_is_match(each, labels) for each in of_ours) for labels in series.labels), f"{text} is empty"
        return names

    def _of_call(self, node: promql.Call) -> frozenset[str] | None:
        name = node.func.name
        of_arguments = [self._labels(each, name in OF_COUNTERS) for each in node.args]
        (labels,) = (each for each in of_arguments if each is not None)
        if name == "histogram_quantile":
            assert "le" in labels, f"{node.prettify()} has no buckets"
            return labels - {"le"}
        return labels

    def _aggregated(self, node: promql.AggregateExpr) -> frozenset[str]:
        inner = self._labels(node.expr)
        assert inner is not None
        if node.modifier is None:
            return frozenset()
        kept = frozenset(node.modifier.labels)
        assert node.modifier.type == promql.AggModifierType.By
        assert kept <= inner, f"{node.prettify()}: it has {sorted(inner)}"
        return kept


def selected_by(expression: str) -> set[str]:
    """The names of the series that an expression selects."""
    names: set[str] = set()

    def observe(node: promql.Expr) -> None:
        if isinstance(node, promql.VectorSelector):
            names.add(node.name)

    promql.walk(promql.parse(expression), observe)
    return names


def _is_match(matcher: promql.Matcher, labels: dict[str, str]) -> bool:
    value = labels[matcher.name]
    match matcher.op:
        case promql.MatchOp.Equal:
            return value == matcher.value
        case promql.MatchOp.NotEqual:
            return value != matcher.value
        case promql.MatchOp.Re:
            return re.fullmatch(matcher.value, value) is not None
        case promql.MatchOp.NotRe:
            return re.fullmatch(matcher.value, value) is None
    raise AssertionError(matcher.op)


def names_in(texts: Iterable[str]) -> set[str]:
    """Names of metrics that stand anywhere in the texts."""
    return {name for text in texts for name in re.findall(r"\b(?:vllm|inflight):[a-z]\w+", text)}
