"""What a run needs before it starts: disk, memory and time of each stage, and whether this machine has them.

`sizes.py` counts parameters and text, `rates.py` and `measure.py` say how long a unit of work takes, `needs.py` has a
formula for each stage, and `fits.py` compares their sum with the machine.
"""
