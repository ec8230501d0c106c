"""The command `mell`, also as `python -m mell`."""

from app.cli.__main__ import main

if __name__ == "__main__":
    main()
