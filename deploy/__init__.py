"""The build of Mell's wheel. Nothing imports this package but build tools and tests."""
