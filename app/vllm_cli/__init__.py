"""`mell serve`: the command line of `vllm serve`, turned into Mell's configuration and started.

`flags` is the table of vLLM's flags, `command_line` runs vLLM's own parser, `translation` maps the given flags to
settings, `document` is the YAML file of the settings, and `__main__` is the program. The settings import `flags`, to
refuse the same arguments in `engine_kwargs`, and `mell convert` (`app.convert`) imports the rest; no other
code imports this room. `mell` starts it as a process of its own, since vLLM's parser takes seconds to import. Flags
come from a terminal or from vLLM's YAML file; a configuration file goes to the disk, the terminal or the launcher.
"""
