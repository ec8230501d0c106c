"""`python -m app.keys`: the key is printed once, and its list entry does not contain it."""

import pytest

from app.ingress.access.keys import find, parse_keys
from app.keys import main


def test_the_entries_are_valid_and_match_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    main(["team-a"])
    main(["team-b"])
    out, err = capsys.readouterr()
    keys = parse_keys(out, "keys.yaml")
    shown = [line.rpartition(" ")[2] for line in err.splitlines()]
    assert [found.name for key in shown if (found := find(keys, key))] == ["team-a", "team-b"]
    assert not any(key in out for key in shown)


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--help"], ["-h"]])
def test_anything_else_shows_how_to_use_it(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"python -m app\.keys NAME"):
        main(arguments)


def test_a_bad_name_makes_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="'a b' is not a valid name"):
        main(["a b"])
    assert capsys.readouterr() == ("", "")
