"""The `mell` command: an operator's view of a running Mell, and orders to it, over its HTTP API.

No other code imports this room; it imports `client` and starts without Ray, vLLM and torch. State and migration
records come from an ingress, arguments from a terminal; text or JSON goes to the terminal, orders go to the ingress.
Each command lies in the module of its name; `move` and `drain` are in `orders`, `serve`, `convert`, `replay`,
`simulate`, `plan` and `keys` in `programs`, those of `cache` in `cache`.
"""
