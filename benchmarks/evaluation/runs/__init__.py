"""The runs behind the page: as values, as metrics, and as files on disk.

`case` is one run as a value, `scale` has the lengths and seeds of all runs, and `eight` the paper's workloads. `store`
carries out missing runs by `perform`, which drives `simulator` on traces from a folder, and keeps each until the
code that determines it changes (`sources`). The sections of the page take metrics from `results`.
"""
