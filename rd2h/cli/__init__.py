"""The ``rd2h`` command: one file for each sub-command, which imports what it runs when it runs."""
