"""API keys: valid and invalid lists, the comparison of keys, and files of keys."""

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.ingress.access.keys import (
    ApiKey,
    InvalidKeys,
    KeyFile,
    bearer,
    check_classes,
    digest,
    entry,
    find,
    new_key,
    parse_keys,
)
from app.ingress.access.limits import KeyLimits

A, B = digest("a"), digest("b")


def test_a_list_in_yaml_equals_the_list_in_json() -> None:
    entries = [
        {"name": "team-a", "sha256": A, "requests_per_minute": 600, "tokens_per_minute": 9, "concurrent_requests": 8},
        {"name": "b.2", "sha256": B},
    ]
    yaml = f"""
- name: team-a  # the first
  sha256: {A}
  requests_per_minute: 600
  tokens_per_minute: 9
  concurrent_requests: 8
- {{name: b.2, sha256: {B}}}
"""
    keys = (ApiKey("team-a", A, KeyLimits(600, 9, 8)), ApiKey("b.2", B))
    assert parse_keys(yaml, "here") == parse_keys(json.dumps(entries), "here") == keys


def test_a_key_lists_its_classes() -> None:
    keys = parse_keys(f"- {{name: a, sha256: {A}, classes: [batch, gold]}}\n- {{name: b, sha256: {B}}}", "here")
    assert [key.classes for key in keys] == [("batch", "gold"), ()]
    check_classes(keys, ("default", "batch", "gold"), "here")
    with pytest.raises(InvalidKeys, match=r"^here: key 1 lists 'gold'; the classes are default, batch$"):
        check_classes(keys, ("default", "batch"), "here")


SECRET = "mell-this-is-the-key-itself"
BAD = {
    "nothing": ("", "not a list of keys"),
    "no key": ("[]", "the list is empty"),
    "a key itself": (SECRET, "not a list of keys"),
    "keys themselves": (f"- {SECRET}", "key 1 is not a mapping"),
    "a mapping": (f"keys: [{{name: a, sha256: {A}}}]", "not a list of keys"),
    "no YAML": (f"- name: a\n  sha256: [{SECRET}\n", "line 3: neither YAML nor JSON"),
    "no number": ("- name: !!int x", "neither YAML nor JSON"),
    "an object": ("!!python/object/apply:os.getcwd []", "line 1: neither YAML nor JSON"),
    "brackets": ("[" * 10_000, "neither YAML nor JSON"),
    "no digest": ("- name: a", "key 1 has no sha256"),
    "no name": (f"- sha256: {A}", "key 1 has no name"),
    "the key for its digest": (f"- {{name: a, sha256: {SECRET}}}", "key 1, sha256: write 64 hexadecimal digits"),
    "a digest in capitals": (f"- {{name: a, sha256: {A.upper()}}}", "key 1, sha256: write 64 hexadecimal"),
    "a long digest": (f"- {{name: a, sha256: {A}0}}", "key 1, sha256: write"),
    "a name that is a number": (f"- {{name: 12, sha256: {A}}}", "key 1, name: write .* in quotes"),
    "a name with a space": (f"- {{name: a b, sha256: {A}}}", "key 1, name: write"),
    "no name to speak of": (f"- {{name: '', sha256: {A}}}", "key 1, name: write"),
    "a limit of 0": (
        f"- {{name: a, sha256: {A}, requests_per_minute: 0}}",
        "requests_per_minute: write a whole number",
    ),
    "half a request": (f"- {{name: a, sha256: {A}, concurrent_requests: 0.5}}", "concurrent_requests: write a whole"),
    "a limit in quotes": (f"- {{name: a, sha256: {A}, tokens_per_minute: '9'}}", "tokens_per_minute: write a whole"),
    "an unknown limit": (f"- {{name: a, sha256: {A}, {SECRET}: 9}}", "key 1 has an unknown member"),
    "a member that is no text": (f"- {{name: a, sha256: {A}, 9: 9}}", "key 1 has an unknown member"),
    "no class": (f"- {{name: a, sha256: {A}, classes: []}}", "key 1, classes: write a list with the name of a service"),
    "a class that is no list": (f"- {{name: a, sha256: {A}, classes: gold}}", "key 1, classes: write a list"),
    "a class that is no text": (f"- {{name: a, sha256: {A}, classes: [9]}}", "key 1, classes: write a list"),
    "two limits of a name": (
        f"- {{name: a, sha256: {A}, requests_per_minute: 5}}\n- {{name: a, sha256: {B}, requests_per_minute: 6}}",
        "key 2, requests_per_minute: write that of the other keys with its name",
    ),
    "a key twice": (f"- {{name: a, sha256: {A}}}\n- {{name: b, sha256: {A}}}", "keys 1 and 2 have the same sha256"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_the_error_for_an_invalid_list_gives_the_form_without_its_content(text: str, message: str) -> None:
    with pytest.raises(InvalidKeys, match=f"^keys.yaml.*{message}") as error:
        parse_keys(text, "keys.yaml")
    assert SECRET not in str(error.value)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text() | st.lists(st.sampled_from(list("-{}[]:,'\"&*! \nabc019"))).map("".join))
def test_any_text_is_a_list_or_a_key_list_error(text: str) -> None:
    with contextlib.suppress(InvalidKeys):
        assert parse_keys(text, "here")


def test_keys_of_one_name_have_its_limits_and_classes() -> None:
    text = f"- {{name: a, sha256: {A}, requests_per_minute: 5}}\n- {{name: a, sha256: {B}, classes: [x]}}"
    old, new = parse_keys(text, "here")
    assert (old.sha256, new.sha256) == (A, B)
    assert (old.limits, old.classes) == (new.limits, new.classes) == (KeyLimits(requests_per_minute=5), ("x",))


def test_a_new_key_matches_its_entry() -> None:
    key = new_key()
    (made,) = parse_keys(entry("team-a", key), "here")
    assert made == ApiKey("team-a", digest(key)) and key not in entry("team-a", key)
    assert find([ApiKey("other", B), made], key) is made
    assert len(key) > 40 and new_key() != key


@pytest.mark.parametrize("name", ["12", "yes", "null", "1.5", "a-b_c.D", "2026-01-01"])
def test_an_entry_quotes_names_that_yaml_would_convert(name: str) -> None:
    assert parse_keys(entry(name, "k"), "here")[0].name == name


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "ä", "a\n"])
def test_an_entry_refuses_names_that_a_list_refuses(name: str) -> None:
    with pytest.raises(InvalidKeys, match="is not a valid name"):
        entry(name, "k")


@pytest.mark.parametrize("given", ["", "A", "a ", "aa", A, "\udcff", "é"])
def test_other_texts_do_not_match_the_key(given: str) -> None:
    assert find([ApiKey("a", A)], given) is None


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (None, None),
        ("", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("Bearer k", "k"),
        ("bearer k", "k"),
        ("BEARER  k ", "k"),
        ("Basic k", None),
        ("k", None),
        ("Bearerk", None),
    ],
)
def test_a_key_is_a_bearer_token(header: str | None, key: str | None) -> None:
    assert bearer(header) == key


# --- files --------------------------------------------------------------------------------------------


def write(path: Path, *names: str) -> None:
    """Replace the file by a rename, as operators and orchestrators do."""
    new = path.with_suffix(".new")
    new.write_text("".join(entry(name, name) for name in names))
    os.replace(new, path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    write(path, "a")
    return path


def test_a_file_is_reloaded_only_after_a_change(path: Path) -> None:
    file = KeyFile(str(path))
    assert file.read() == (ApiKey("a", A),) and file.changed() is None
    write(path, "a", "b")
    assert file.changed() == (ApiKey("a", A), ApiKey("b", B)) and file.changed() is None


@pytest.mark.parametrize("wrong", ["bad", "gone", "no text"])
def test_an_invalid_change_raises_once_and_a_later_valid_one_is_loaded(path: Path, wrong: str) -> None:
    file = KeyFile(str(path))
    file.read()
    match wrong:
        case "bad":
            path.write_text("[]")
        case "gone":
            path.unlink()
        case "no text":
            path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidKeys, match=str(path)):
        file.changed()
    assert file.changed() is None
    write(path, "b")
    assert file.changed() == (ApiKey("b", B),)


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_the_error_names_an_unreadable_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidKeys, match="cannot be read"):
        KeyFile(str(tmp_path / name)).read()
