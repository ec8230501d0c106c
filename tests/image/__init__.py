"""Tests of the container image, which `make image-test` builds first: not part of `make test`."""
