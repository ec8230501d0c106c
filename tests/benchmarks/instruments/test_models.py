"""Generated models: loadable, with a text for every token id, and with or without weights."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.instruments.models import MODELS, ModelShape


@pytest.fixture(params=["small", "8b"])
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelShape:
    """A shape of the kind of a real one, but small."""
    monkeypatch.setenv("MELL_CACHE", str(tmp_path))
    return replace(MODELS[request.param], vocabulary=600, hidden=64, inner=64, layers=2, heads=4, kv_heads=2)


@pytest.mark.slow
def test_model_is_generated_once(shape: ModelShape) -> None:
    from transformers import AutoConfig, AutoTokenizer

    folder = shape.folder()
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (config.vocab_size, config.max_position_embeddings) == (600, shape.context)
    assert len({tokenizer.decode([token]) for token in range(259, 600)}) == 600 - 259
    assert any(folder.glob("*.safetensors")) == (shape.spread is not None)
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert shape.folder() == folder and written == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
