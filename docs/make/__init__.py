"""Generators of the pages that repeat what the code declares, each compared with its page by a test.

Settings become docs/configuration.md, the OpenAPI document docs/api.md, the list of panels below the Grafana
dashboard. `python -m docs.make` writes all three; only its tests import this package.
"""
