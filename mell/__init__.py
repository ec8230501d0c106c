"""The name by which Mell is imported anywhere, `import_path: mell:build_app` included.

In the source tree, this package is beside `app`, `deployments`, `migration`, `policies` and `simulator`. In an
installed Mell those five are below this package, so that no other name is taken: `deploy/wheel_backend.py` renames
them. Processes that need little import this package first, so it imports nothing itself.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray import serve

__all__ = ["build_app"]


def build_app(args: dict[str, Any]) -> "serve.Application":
    """The Serve application, see `app.main.build_app`. Raises ValueError."""
    from app.main import build_app

    return build_app(args)
