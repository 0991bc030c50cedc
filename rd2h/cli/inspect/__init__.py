"""``rd2h inspect``: captured frames of the control protocol as something that a person can read.

`sources` finds the frames, `layout` and `places` look at their bytes, `report` puts it all into
one value for each frame, and `tree` draws that. `command` is the command line.
"""
