"""docs/conformance.md names what is there."""

import pytest

from tests.upstream.catalogue import HICACHE, KIT, PAGE, Check, page

ROOT = PAGE.parent.parent


def test_the_page_is_made_of_the_catalogue() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run python -m tests.upstream.catalogue"


@pytest.mark.parametrize("check", [*HICACHE, *KIT], ids=lambda check: check.what[:40])
def test_each_check_is_shown_by_a_test_or_has_a_reason(check: Check) -> None:
    assert bool(check.shown) != bool(check.why)
    for test in check.shown:
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test
