"""KunServe's evaluation in the simulator, claim by claim: replicas that drop layers in a burst, and their rivals.

`case` has the models and contenders, `windows` the arrivals, `results` the runs and their figures, `claims` the
verdicts. It imports the simulator alone; `python -m benchmarks.kunserve` writes its part of docs/evaluation.md.
"""
