"""`python -m app.cli`: the `mell` command."""

from app.cli.main import main

if __name__ == "__main__":
    main()
