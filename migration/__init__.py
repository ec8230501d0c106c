"""Moving one running request between replicas, and reading it wherever it is.

`protocol` decides, `run` carries out, `kv` and `transport` carry blocks; `concurrency` runs coroutines side by side.
The deployments import them for the replicas, the ingress for the reader.
"""
