"""`mell doctor`: what may keep an installation from serving, and what to do about it."""
