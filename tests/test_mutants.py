"""The table of faults is sound: `make mutants`, which plants them, is no part of `make test`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutants
from tests.faults import Fault
from tests.mutants import ALL_FAULTS


@pytest.mark.parametrize("fault", ALL_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place_and_its_test(fault: Fault, repo: Path) -> None:
    source = (repo / fault.file).read_text("utf-8")
    assert mutants.complaint(fault, source) is None
    mutant = source.replace(fault.text, fault.becomes)
    assert mutant != source
    compile(mutant, fault.file, "exec")  # a file that cannot be read would be red without a reason
    file, _, name = fault.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (repo / file).read_text("utf-8")


def test_the_page_is_the_table(repo: Path) -> None:
    rule = f"{mutants.PAGE} is not that of the files of faults: python -m tests.mutants --table"
    assert (repo / mutants.PAGE).read_text("utf-8") == mutants.table(), rule


def test_names_are_unique_and_a_text_that_moved_is_named() -> None:
    assert len({fault.name for fault in ALL_FAULTS}) == len(ALL_FAULTS) >= 20
    moved = Fault("rotary", "model/blocks.py", "sin", "cos", "tests/test_mutants.py::test_x")
    says = r"rotary: model/blocks.py holds 'sin' 2 times instead of once"
    assert mutants.complaint(moved, "sin and sin") == says
