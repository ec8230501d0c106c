"""docs/configuration.md matches the settings."""

import pytest

from app.settings import CPU_ENGINE, Settings
from docs.make.settings import PAGE, page, sections


def table_of(path: str) -> str:
    """The text under a section's heading."""
    return page().split(f"## `{path}`\n")[1].split("\n## ")[0]


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m docs.make"


def test_sections_are_named_by_their_path() -> None:
    paths = dict(sections())
    assert paths[""] is Settings
    assert "deployment_config.autoscaling_config" in paths


@pytest.mark.parametrize("path", [path for path, _ in sections()])
def test_every_setting_has_a_row(path: str) -> None:
    rows = table_of(path or "args")
    assert all(f"| `{name}` |" in rows for name in dict(sections())[path].model_fields)


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ("migration", '| `slot_mib` | `auto` or whole number, 1 to 1024 | `"auto"` | Payload of one staging slot'),
        ("ingress", "| `port` | whole number or null, 1 to 65535 | `8000` |"),
        ("ingress", "| `admin_key` | text or null, 8 characters or more | `null` |"),
        ("ingress", "| `lease_s` | number, more than 0 | `10.0` |"),
        ("args", "| `engine_kwargs` | mapping | `{}` |"),
        ("args", "| `scheduler` | section [`scheduler`](#scheduler) |  |"),
    ],
)
def test_a_row_has_type_bounds_and_default(path: str, row: str) -> None:
    assert row in table_of(path)


@pytest.mark.parametrize(("name", "value"), CPU_ENGINE.items(), ids=list(CPU_ENGINE))
def test_page_names_the_defaults_of_cpu_engines(name: str, value: object) -> None:
    shown = str(value).lower() if isinstance(value, bool) else value
    assert f"`{name}: {shown}`" in page()


@pytest.mark.slow
def test_page_lists_the_arguments_that_mell_owns() -> None:
    from deployments.engine.arguments import OWNED

    assert all(f"`{name}`" in page() for name in OWNED)
