"""The needs of Mell in vLLM and Ray, compared with the files of an installed or of any other version, without imports.

facts        one statement about a library, such as the parameters of a method, and its check
sources      the Python files of a library, which facts are checked against
contract     all facts by the part of Mell that needs them (requirements/contract.toml), and the parts that are lost
supported    the pairs of versions that are supported (requirements/supported.toml)
"""
