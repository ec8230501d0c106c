"""The measurements that only a GPU can settle, as one command: parts of a few minutes, a record, and one page.

`plan` lists the parts: servers, and steps that measure them. `running` plays a part within its time and adds rows to a
`record`, from which `page` and `figures` write the page; docs/gpu.md has the same sections. Steps are in `moving`,
`serving`, `equality`, `faults` and `checks`, the last of which run `stages` and `nccl` as processes. They use the
instruments of the other benchmarks. Everything also plays on the CPU build, in a short form among the integration
tests.
"""
