"""Many runs: which are made, how they are compared, and the report.

Doors: `study.py` (sweep, advise and double run their trials through it), `compare/` (records of
runs to verdicts), `report/` (tables, figures, the HTML page). `compare/` and `report/` do not
import torch: records are compared on any machine.

How data goes through: a request becomes trials, one for each variant and seed. Jobs take them, here
or started by one of Hydra's launchers; each is a run of `train`, which leaves a record.
`compare/load.py` reads the records, `verdicts.py` pairs them by seed and judges each variant, and
`report/` shows that.
"""
