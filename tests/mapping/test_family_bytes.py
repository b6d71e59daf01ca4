"""Models of real sizes through the ready mappings: what one process of several reads."""

from pathlib import Path

import pytest
from family_bytes import CASES, MODEL, plans_of, ratio, row

DOCS = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
MAX_GAP_BYTES = MODEL.profile("local").max_gap_bytes


def contiguous(plan):
    """The leaves of which each region is one run of its file."""
    scattered = {
        region.leaf
        for batch in plan.batches
        for region in batch.regions
        if region.read.runs.count > 1
    }
    return set(range(len(plan.leaves))) - scattered


def requests(plan):
    """Ranges of all regions, before neighbours are joined."""
    return sum(r.read.requests.count for batch in plan.batches for r in batch.regions)


@pytest.mark.parametrize(("name", "target"), CASES)
def test_a_process_reads_its_own_bytes(name, target):
    plans = plans_of(name, target)
    for split, (plan, exact) in plans.items():
        assert exact.cost().read_bytes == exact.cost().needed_bytes, split
        cost = plan.cost()
        joined = sum(len(batch.regions) for batch in plan.batches) - len([*plan.groups()])
        read_through = requests(exact) - requests(plan) + joined
        assert cost.read_bytes - cost.needed_bytes <= read_through * MAX_GAP_BYTES, split
        by_tensor = plan.by_tensor()
        for number in contiguous(exact):
            leaf, needed, read = by_tensor[number]
            assert read <= 1.05 * needed, (split, leaf)
    assert ratio(plans["replicated"][0]) <= 1.05
    assert row(name, target, plans) in DOCS, (
        "the table is old: python tests/support/family_bytes.py"
    )
