"""Many runs: which are made, how they are compared, and the report.

Doors: `study.py` (sweep, advise and double run their trials through it), `compare/` (records of
runs to verdicts), `report/` (tables, figures, the HTML page). `compare/` and `report/` do not
import torch: records are compared on any machine.

How data goes through: a request becomes trials, one for each variant and seed. Hydra's launchers
run them, each a run of `train`, which leaves a record. `compare/load.py` reads the records,
`comparison.py` pairs them by seed, `verdicts.py` judges each pair's differences, and `report/`
shows them.
"""
