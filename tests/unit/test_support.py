"""The table of what runs is whole, the page shows it, and a start goes by it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from common.errors import StartupError
from common.model.config import _FAMILIES
from common.model.quantization import Quantization
from common.support import (
    DTYPES,
    FAMILIES,
    MAX_RANKS,
    QUANTIZATIONS,
    TABLE,
    Support,
    check_support,
    family_of,
    markdown,
)

PAGE = Path(__file__).resolve().parents[2] / "docs/SUPPORT.md"


def test_every_combination_has_exactly_one_row() -> None:
    for combination in product(FAMILIES, DTYPES, QUANTIZATIONS, (1, 2, MAX_RANKS), ("cpu", "cuda")):
        assert sum(row.fits(*combination) for row in TABLE) == 1, combination


def test_it_speaks_of_all_that_settings_and_models_can_name() -> None:
    assert {family_of(name) for name in _FAMILIES} == set(FAMILIES)
    assert set(get_args(Quantization)) == set(QUANTIZATIONS)


@pytest.mark.parametrize("row", [row for row in TABLE if row.support is Support.NOT_YET], ids=lambda row: row.how)
def test_what_is_not_yet_is_refused_in_the_tables_words(row) -> None:
    with pytest.raises(StartupError, match=Support.NOT_YET) as caught:
        check_support(
            f"{row.families[0]}ForCausalLM", row.dtypes[0], row.quantizations[0], row.tensor_parallel[0], row.device
        )
    assert row.how in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_rest_is_let_through() -> None:
    assert check_support("MixtralForCausalLM", "bfloat16", "int8", 4, "cpu").support is Support.TESTED


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == markdown(), "run: python scripts/support_page.py > docs/SUPPORT.md"
