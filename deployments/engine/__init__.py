"""The engine port, on vLLM, at the pace of a GPU without one, and a fake; the last two need neither Ray nor vLLM."""
