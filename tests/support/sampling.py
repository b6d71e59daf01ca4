"""Cases of which some are in the default set, and the others in the soak set."""

import pytest


def every(step, cases):
    """Every `step`-th case in the default set, the others in the soak set."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.soak] * bool(number % step),
        )
        for number, case in enumerate(cases)
    ]
