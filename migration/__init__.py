"""Moving one running request between replicas, and reading it wherever it is.

`protocol` decides, `run` carries out, `kv` and `transport` carry blocks. The deployments import
them for the replicas, the ingress for the reader.
"""
