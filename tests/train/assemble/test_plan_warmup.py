"""A warm-up that is longer than the run: a mistake of the user, or a recipe's that is cut short."""

from __future__ import annotations

import pytest

from mprun.config import compose
from mprun.errors import UsageError
from mprun.train.assemble import make_plan

WORDS = ["recipe=char_gpt", "device=cpu", "data.source=generated"]


def test_the_recipes_own_warmup_may_be_cut_short() -> None:
    composed = compose([*WORDS, "train.max_steps=10"])
    plan = make_plan(composed.config, composed.given)
    assert "the run's 10 steps end within the recipe's warm-up of 100" in plan.warnings
    composed = compose([*WORDS, "train.max_steps=100"])
    assert not any("warm-up" in x for x in make_plan(composed.config, composed.given).warnings)


def test_the_users_is_refused() -> None:
    composed = compose([*WORDS, "train.max_steps=10", "train.warmup_steps=11"])
    with pytest.raises(UsageError, match="legal is at most 10"):
        make_plan(composed.config, composed.given)
