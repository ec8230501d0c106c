"""The parts of the page, one module each with a `SECTION`: the runs that it needs, and its tables and figures.

`benchmarks.evaluation.page` imports them in the order of the page. Metrics come from `benchmarks.evaluation.runs`;
tables go to the page, figures to the folder of pictures.
"""
