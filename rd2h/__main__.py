"""``python -m rd2h`` is ``rd2h``."""

from rd2h.cli.main import main

if __name__ == "__main__":
    main()
