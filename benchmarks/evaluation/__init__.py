"""The evaluation report, docs/evaluation.md with its figures: the paper repeated, and Mell's own policy beside it.

`runs` declares, carries out and keeps the simulated runs. A section (`sections`) declares the runs that it needs and
makes tables and figures from their metrics; `page` puts these into the page, whose prose is written by hand, and
`words`, `plots`, `points` and `style` make their text and drawings. `python -m benchmarks.evaluation --help` lists the
options.
"""
