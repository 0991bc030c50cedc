"""``rd2h check``: two ends of a data plane, tried out without vLLM.

``rd2h check prefill`` (:mod:`~rd2h.cli.check.server`) owns memory that was filled from a seed;
``rd2h check decode`` (:mod:`~rd2h.cli.check.decode`) pulls it through the transfer engine and
compares every byte with what the seed says, and a digest with the one that Prefill took of its own
memory. They talk over a control port with messages of their own (:mod:`~rd2h.cli.check.messages`).

Everything happens in a step that has a name, a deadline, and advice for whoever it fails on
(:mod:`~rd2h.cli.check.steps`, :mod:`~rd2h.cli.check.advice`).
"""
