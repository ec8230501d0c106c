"""The `mell` command: what an operator sees and does in a terminal, over the HTTP API. Starts without Ray and vLLM."""
