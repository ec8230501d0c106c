"""The evaluation report: experiments in the simulator, their raw runs on disk, and the page generated from these.

A section declares its runs (`case`) and writes its part of the page from their metrics; `store` keeps raw runs and
carries out missing ones by `perform`, which drives `app.simulator`. The page is docs/evaluation.md, with its figures.
"""
