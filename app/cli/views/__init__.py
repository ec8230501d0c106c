"""What the command shows: pure functions from documents to what rich can render, at any width."""
