"""The model of the ingress's tests: what the routes are made over."""

from tests.app.ingress.conftest import model, pretrained, tokenizer

__all__ = ["model", "pretrained", "tokenizer"]
