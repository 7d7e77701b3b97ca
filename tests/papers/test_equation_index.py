"""Every equation of the four papers is found by name, ``FedDyMem Eq. 12``, where it is implemented and only there."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

import lit_fedad

PACKAGE = Path(lit_fedad.__file__).parent
MENTION = re.compile(r"(\w+) Eq\. (\d+)")

IMPLEMENTED = {
    "FedDyMem": {
        4: ["evaluation/anomaly.py"],
        8: ["tasks/patches.py"],
        9: ["models/memory_generator.py"],
        10: ["models/memory_generator.py"],
        11: ["models/memory_generator.py"],
        12: ["tasks/memory_bank.py", "tasks/slot_distances.py"],
        13: ["memory/reduce.py"],
        14: ["memory/reduce.py", "methods/feddymem.py"],
        15: ["memory/reduce.py", "methods/feddymem.py"],
        16: ["audits/statistics.py", "memory/reduce.py", "methods/feddymem.py", "tasks/memory_bank.py"],
    },
    "FADngs": {
        1: ["memory/density.py", "methods/fadngs.py", "tasks/contrastive.py"],
        2: ["memory/density.py", "methods/fadngs.py", "tasks/contrastive.py"],
        3: ["memory/density.py", "methods/fadngs.py", "tasks/contrastive.py"],
        4: ["memory/density.py"],
        5: ["memory/density.py"],
        6: ["memory/density.py", "tasks/contrastive.py"],
        7: ["tasks/contrastive_losses.py"],
        8: ["methods/fadngs.py", "tasks/contrastive.py", "tasks/contrastive_losses.py"],
        9: ["tasks/contrastive_losses.py"],
        10: ["methods/fadngs.py", "methods/parts/ensemble_distillation.py"],
        11: ["methods/fadngs.py", "methods/parts/ensemble_distillation.py"],
        12: ["methods/fadngs.py", "methods/parts/ensemble_distillation.py"],
        13: ["methods/fadngs.py", "methods/parts/ensemble_distillation.py"],
        17: ["metrics/functional/errors.py"],
        18: ["audits/density_privacy.py", "privacy/distance_correlation.py", "report/correlation_heatmap.py"],
        19: ["audits/density_privacy.py", "privacy/distance_correlation.py"],
    },
    "FedVCK": {
        2: ["condensation/kernels.py", "methods/fedvck.py"],
        3: ["condensation/kernels.py", "methods/fedvck.py"],
        4: ["condensation/batch_statistics.py", "methods/fedvck.py"],
        5: ["condensation/selection.py", "methods/fedvck.py"],
        6: ["condensation/selection.py"],
        7: ["condensation/selection.py", "methods/fedvck.py"],
        8: ["condensation/selection.py", "methods/fedvck.py"],
        9: ["condensation/kernels.py", "methods/fedvck.py", "methods/fedvck_sums.py"],
        11: ["audits/statistics.py", "methods/fedvck.py"],
        12: ["condensation/relations.py"],
        13: ["condensation/relations.py", "methods/fedvck.py"],
        14: ["condensation/relations.py"],
        15: ["condensation/relations.py", "methods/fedvck.py"],
        16: ["methods/fedvck.py", "methods/fedvck_sums.py"],
    },
    "GLDP": {
        3: ["methods/gldp.py"],
        4: ["methods/gldp.py"],
        5: ["methods/gldp.py"],
        6: ["memory/prototypes.py", "methods/gldp.py"],
        7: ["methods/gldp.py"],
        8: ["methods/gldp.py"],
        9: ["memory/prototypes.py", "methods/gldp.py"],
        10: ["methods/gldp.py"],
        11: ["memory/prototypes.py", "methods/gldp.py"],
        12: ["methods/gldp.py"],
        13: ["memory/prototypes.py", "methods/gldp.py"],
    },
}

# Numbered in the papers, and nothing that a program computes.
STATED = {
    "FedDyMem": {
        **dict.fromkeys((1, 2, 3, 5, 6, 7), "problem statement"),
        **dict.fromkeys((17, 18, 19, 20, 21), "convergence analysis"),
    },
    "FADngs": dict.fromkeys((14, 15, 16), "proof that densities reveal little"),
    "FedVCK": {
        1: "objective whose solution is FedVCK Eq. 2",
        10: "form of the objective that FedVCK Eq. 9 solves",
    },
    "GLDP": {1: "problem statement", 2: "cross-entropy, which torch has"},
}
LAST = {"FedDyMem": 21, "FADngs": 19, "FedVCK": 16, "GLDP": 13}


def mentions() -> dict[str, dict[int, set[str]]]:
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in sorted(PACKAGE.rglob("*.py")):
        for paper, number in MENTION.findall(path.read_text()):
            found[paper][int(number)].add(path.relative_to(PACKAGE).as_posix())
    return found


@pytest.mark.parametrize("paper", IMPLEMENTED)
def test_each_number_is_implemented_or_stated(paper):
    known = {*IMPLEMENTED[paper], *STATED[paper]}
    assert known == set(range(1, LAST[paper] + 1))
    assert not IMPLEMENTED[paper].keys() & STATED[paper].keys()


@pytest.mark.parametrize("paper", IMPLEMENTED)
def test_mentions_lead_to_the_implementation(paper):
    found = {number: sorted(paths) for number, paths in mentions()[paper].items()}
    assert found == {number: sorted(paths) for number, paths in IMPLEMENTED[paper].items()}


def test_a_number_stands_behind_its_papers_name_alone():
    """Neither ``Eq. 12`` without a paper, nor ``Eqs. 2-9``, in which no search finds 5."""
    papers = (*IMPLEMENTED, "Geiping")
    for path in sorted(PACKAGE.rglob("*.py")):
        for line in path.read_text().splitlines():
            assert not re.search(r"Eqs\.|Eq\. \d+ ?(-|to|and|,) ?\d", line), f"{path}: {line.strip()}"
            for found in re.finditer(r"(\w+)?,? ?Eq\. \d", line):
                assert found[1] in papers, f"{path}: {line.strip()}"
