"""Configuration in other forms than Mell's settings: files of Serve and Kubernetes, arguments of Ray Serve LLM, vLLM.

`documents` finds Mell's application in a file, `ray_llm` turns `llm_configs` into settings, `surroundings` has the
conditions on the file around them, `engine_arguments` finds the arguments that vLLM would refuse (`vllm_source` reads
its files), and `files` the files that this machine lacks. The doctor, the build and `mell serve` import this room, and
so do the settings; only `files` imports them. It reads files, and has no other input.
"""
