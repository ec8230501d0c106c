"""The OpenAPI document: Mell's own routes in words and schemas, beside those of vLLM's application.

`app.ingress.frontends` serves it and `docs.make` prints Mell's part; it imports the bodies of orders. vLLM's part comes
from vLLM's application, with the open routes only.
"""
