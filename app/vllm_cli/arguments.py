"""The arguments of vLLM's server and their parser, wherever the installed vLLM has them."""

try:
    from vllm.entrypoints.common.cli_args import FrontendArgs, make_arg_parser, validate_parsed_serve_args
except ImportError:  # before vLLM 0.33
    from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser, validate_parsed_serve_args

__all__ = ["FrontendArgs", "make_arg_parser", "validate_parsed_serve_args"]
