"""The parts of the page, in order."""
