"""docs/compatibility.md has the supported pairs and the parts of the contract."""

from app.compatibility.contract import parts
from app.compatibility.supported import pairs
from docs.make.compatibility import PAGE, page


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m docs.make"


def test_pairs_and_parts_have_rows() -> None:
    text = page()
    assert all(f"| {pair.contract[0]} | {pair.contract[1]} | {pair.state} |" in text for pair in pairs())
    assert all(f"| {part.title} | {part.lost or 'Mell does not start'} |" in text for part in parts())
