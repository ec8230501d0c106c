"""The HTTP side: text in and out. Replicas see tokens only."""
