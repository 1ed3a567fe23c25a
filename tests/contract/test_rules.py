"""Rules are read from files that somebody else may have written."""

import pytest
from pydantic import ValidationError

from ktforge import Rule


@pytest.mark.parametrize(
    "match",
    ["re:(.*)*(.*)*x", "re:" + "(" * 500 + ")" * 500, "re:(a|a)+b", "re:.*.*.*.*.*x", "*" * 201, "re:" + "a" * 300],
)
def test_a_rule_that_may_take_forever_is_refused(match):
    with pytest.raises(ValidationError, match=r"may take forever to match: write it without repeated groups"):
        Rule(match=match, quantizer=None)


def test_a_glob_of_the_longest_kind_is_matched_at_once():
    rule = Rule(match="*a" * 100, quantizer=None)
    assert not rule.matches("a" * 500 + "b") and rule.matches("a" * 500)
