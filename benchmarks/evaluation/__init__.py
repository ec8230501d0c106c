"""The evaluation report, docs/evaluation.md with its figures: the paper repeated, and Mell's own policy beside it.

`runs` declares, carries out and keeps the simulated runs. A section (`sections`) declares the runs that it needs and
writes its part of the page from their metrics; `page` puts the sections together, and `words`, `plots`, `points` and
`style` make their text and figures. `python -m benchmarks.evaluation --help` lists the options.
"""
