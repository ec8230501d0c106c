"""What brings Mell to its users: the build of the wheel. Nothing imports this package but build tools and tests."""
