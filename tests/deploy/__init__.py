"""Tests of the manifests in `deploy/`."""
