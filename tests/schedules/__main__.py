"""Run the schedules of any seeds: ``python -m tests.schedules --seeds 100 200``.

What breaks is printed with its schedule in one line, which ``python -m tests.schedules --line '…'`` runs again, also
after events were taken out of it by hand.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.schedules.drawing import Schedule, draw
from tests.schedules.running import problems_of


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("A", "B"), default=(0, 20), help="from A to B - 1")
    parser.add_argument("--line", help="a schedule, instead of those of seeds")
    options = parser.parse_args()
    schedules = [Schedule.parse(options.line)] if options.line else [draw(seed) for seed in range(*options.seeds)]
    broken = 0
    for s in schedules:
        began = time.monotonic()
        problem = problems_of(s)
        broken += bool(problem)
        took = time.monotonic() - began
        print(f"{'BROKEN' if problem else 'holds'}  {s}  ({took:.0f} s){problem and chr(10) + problem}", flush=True)
    print(f"{broken} of {len(schedules)} are broken" if broken else f"all {len(schedules)} hold")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
