"""Does a step fit: the peak of memory, counted on fake tensors as `mprun memory` counts it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from mprun.inspect.check.check_result import Finding
from mprun.inspect.check.checked_mode import CheckedMode
from mprun.records.console.formatting import UNITS, size_text

SHOWN = 3  # Categories that a finding names


def fits(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of this check; the bytes at the peak are figures, also by category."""
    counted, samples = mode.memory, mode.plan.batch.micro
    mode.checks.figures |= {f"{name}_bytes": size for name, size in counted.totals.items()}
    limit = (mode.settings.memory_gib or math.inf) * UNITS["GiB"]
    if counted.peak_bytes <= limit:
        return
    largest = Counter(counted.categories).most_common(SHOWN)
    module, own = max(counted.modules.items(), key=lambda x: sum(x[1].values()))
    text = f"{size_text(counted.peak_bytes)} with {samples} samples, limit {size_text(int(limit))}"
    text += f": {', '.join(f'{name} {size_text(size)}' for name, size in largest if size)}; "
    text += f"{module or 'the model'} has the most, {size_text(sum(own.values()))}"
    yield Finding("over_memory", "", text, at=counted.peak_bytes / limit)
