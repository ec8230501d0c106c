"""Make an API key: `python -m app.keys NAME >> FILE`, where FILE is the `ingress.api_keys_file`.

The key's list entry goes to standard output; the key itself goes to standard error, once, and is not stored.
"""

import sys

from app.ingress.access.keys import InvalidKeys, entry, new_key


def main(arguments: list[str]) -> None:
    """Print the entry and the key."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise SystemExit(__doc__)
    key = new_key()
    try:
        text = entry(arguments[0], key)
    except InvalidKeys as error:
        raise SystemExit(f"app.keys: {error}") from None
    sys.stdout.write(text)
    sys.stdout.flush()
    sys.stderr.write(f"API key of {arguments[0]}, shown only now: {key}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
