"""Moving one running request between replicas: the pure protocol, and the shells that carry it out."""
