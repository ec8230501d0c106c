"""The engine port, its vLLM implementation, and a fake one that needs neither Ray nor vLLM."""
