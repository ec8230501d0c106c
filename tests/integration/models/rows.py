"""The facts of the table "What moves how" in docs/limits.md: one row per feature of vLLM, and the test that runs it.

To add a feature: add a row here, have its test take the row by its name (`row`) and assert that requests move as it
has it, and copy `table()` into the page. A unit test compares the page with these rows, and finds each in its test.
"""

from dataclasses import dataclass
from enum import StrEnum

MODELS = "tests/integration/models/test_models.py"
SETTINGS = "tests/app/test_settings.py"
ENGINE = "tests/deployments/engine/test_vllm_engine.py"
VISION = "tests/integration/test_3_vision.py"
POOLING = "tests/integration/test_8_pooling.py"
WORKERS = "tests/integration/test_3_tensor_parallel.py"
UNLIKE = "tests/integration/models/test_resharding.py"
ADAPTERS = "tests/integration/test_1_adapters.py"


class How(StrEnum):
    """How the requests of an engine move."""

    KV = "by KV"
    TOKENS = "by tokens"
    PLACED = "only placed"
    REFUSED = "refused at start"


@dataclass(frozen=True, slots=True)
class Row:
    """A feature, how requests move with it, and the file of its test.

    `tested` describes the engines of the test. Without a test, `how` follows from vLLM's source.
    """

    feature: str
    how: How
    tested: str
    test: str | None = MODELS


_REAL = "real engines on CPU"

ROWS = (
    Row("Models with full attention (Llama, Qwen, Mixtral)", How.KV, _REAL),
    Row("Multi-head latent attention (DeepSeek V2, V3)", How.TOKENS, "not run", None),
    Row("Sliding windows in some layers (Gemma 3, gpt-oss, Olmo 3)", How.TOKENS, _REAL),
    Row("the same with `disable_hybrid_kv_cache_manager: true`", How.KV, _REAL),
    Row("Sliding windows in all layers (Mistral 7B v0.1)", How.TOKENS, _REAL),
    Row("State-space and convolution layers (Mamba, Jamba, LFM2)", How.TOKENS, "not run", None),
    Row("Images (Qwen-VL, LLaVA, PaddleOCR-VL)", How.KV, "real replicas of two workers on CPU", VISION),
    Row("Audio, video", How.KV, "not run", None),
    Row("Encoder-decoder models (Whisper)", How.REFUSED, "its configuration", ENGINE),
    Row("Pooling models (embeddings, scores, classes)", How.PLACED, _REAL, POOLING),
    Row("Diffusion models", How.REFUSED, "its configuration", ENGINE),
    Row("Speculative decoding with n-grams", How.KV, _REAL),
    Row("Speculative decoding with a draft model", How.KV, _REAL),
    Row("Speculative decoding with EAGLE or MTP", How.KV, "real engines on CPU (EAGLE)"),
    Row("Speculative decoding, requests with `seed` and a `temperature` above 0", How.PLACED, _REAL),
    Row("LoRA adapters", How.KV, "real engines on CPU, beside vLLM's server", ADAPTERS),
    Row("`kv_cache_dtype: fp8`", How.KV, _REAL),
    Row(
        "`kv_cache_dtype` with scales per token or block (`int8_per_token_head`, `nvfp4`)", How.TOKENS, "not run", None
    ),
    Row("`enable_prefix_caching: false`", How.TOKENS, _REAL),
    Row("`tensor_parallel_size`", How.KV, "real replicas of two workers on CPU", WORKERS),
    Row("`tensor_parallel_size`, unlike at both ends", How.KV, _REAL, UNLIKE),
    Row("`pipeline_parallel_size`, `data_parallel_size`, context parallelism", How.REFUSED, "settings", SETTINGS),
    Row("`kv_transfer_config`, `kv_offloading_size`", How.REFUSED, "settings", SETTINGS),
    Row("`enable_sleep_mode`", How.REFUSED, "settings", SETTINGS),
    Row("`enable_prompt_embeds`", How.REFUSED, "settings", SETTINGS),
)


def row(feature: str) -> Row:
    """The row of a feature."""
    (found,) = (row for row in ROWS if row.feature == feature)
    return found


def table() -> str:
    """The rows as a table in Markdown."""
    lines = [f"| {row.feature} | {row.how} | {row.tested} |" for row in ROWS]
    return "\n".join(["| Feature of vLLM | Requests move | Tested on |", "|---|---|---|", *lines, ""])
