"""``rd2h demo``: a hand-off between real processes on this machine, each byte checked.

One parent (:mod:`~rd2h.cli.demo.run`) starts Prefill ranks and Decode ranks as processes of
their own and talks to them over typed pipes. They use the sender, the receiver and the transfer
engine as an engine would; only the model is missing: what it would compute is a pattern
(:mod:`~rd2h.cli.demo.content`) that both sides can work out for themselves.
"""
